"""The time to first token of one request, split into its parts."""

from __future__ import annotations

import dataclasses
import time

from headwater.v1 import prefill_pb2, router_pb2

# What TTFT is made of; they sum to the total. `TtftParts` in router.proto says where each begins and ends.
PARTS = {
    "routing": "text to token ids, and the choice of a pair",
    "admission": "the decode group grants",
    "retry": "on groups that were lost or full",
    "queue": "waiting for pages and turns in the prefill group",
    "exposed_transfer": "prefill waits for KV to move",
    "compute": "the last stage computes this prompt",
    "bubble": "the last stage has nothing to compute",
    "relay": "between router, leader and client",
}


@dataclasses.dataclass(slots=True)
class Timeline:
    """When things happened, in seconds of the router's monotonic clock; 0 when they have not."""

    received: float
    # The first pair, and the newest one.
    first_paired: float = 0.0
    paired: float = 0.0
    admitted: float = 0.0
    # A prefill group was asked; the newest one.
    asked: float = 0.0
    first_token: float = 0.0
    committed: float = 0.0

    def on_paired(self) -> None:
        """A pair is chosen."""
        self.paired = time.monotonic()
        self.first_paired = self.first_paired or self.paired

    def on_admitted(self) -> None:
        """The pair's decode group has granted; its prefill group is asked now."""
        self.admitted = self.asked = time.monotonic()

    def on_resumed(self) -> None:
        """Another prefill group is asked instead of one that was lost."""
        self.asked = time.monotonic()

    def parts(self, leader: prefill_pb2.FirstToken, sent: float) -> router_pb2.TtftParts:
        """The parts of what ended at `sent`, when the first token was handed to the client's stream.

        `relay` is what is left after the leader's own durations, so the parts sum to `sent - received` up to rounding.
        """
        leader_parts = {
            "queue": leader.queue_seconds,
            "exposed_transfer": leader.exposed_transfer_seconds,
            "compute": leader.compute_seconds,
            "bubble": leader.bubble_seconds,
        }
        parts = {
            "routing": self.first_paired - self.received,
            "admission": self.admitted - self.paired,
            "retry": (self.paired - self.first_paired) + (self.asked - self.admitted),
            **leader_parts,
            "relay": sent - self.asked - sum(leader_parts.values()),
        }
        return router_pb2.TtftParts(total=sum(parts[name] for name in PARTS), **parts)

    @property
    def commit_after_first_token(self) -> float:
        """Seconds from the first token to the commit; 0 without a commit, or when it came first."""
        return max(0.0, self.committed - self.first_token)
