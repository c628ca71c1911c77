"""The time to first token of one request, split into its parts."""

from __future__ import annotations

import dataclasses

from headwater.v1 import prefill_pb2, router_pb2

# In order of time; they sum to the total.
PARTS = ("tokenize", "pair", "queue", "first_chunks", "last_chunk", "hand_over", "deliver")


@dataclasses.dataclass(slots=True)
class Timeline:
    """When things happened, in seconds of the router's monotonic clock; 0 when they have not."""

    received: float
    tokenized: float = 0.0
    paired: float = 0.0
    first_token: float = 0.0
    first_token_sent: float = 0.0
    committed: float = 0.0

    def parts(self, leader: prefill_pb2.FirstToken) -> router_pb2.TtftParts:
        """The parts, once the first token was sent.

        `hand_over` is what is left of the wait for prefill after the leader's own durations. The total is the
        sum of the parts, which is `first_token_sent - received` up to rounding.
        """
        leader_seconds = leader.queue_seconds + leader.first_chunks_seconds + leader.last_chunk_seconds
        parts = {
            "tokenize": self.tokenized - self.received,
            "pair": self.paired - self.tokenized,
            "queue": leader.queue_seconds,
            "first_chunks": leader.first_chunks_seconds,
            "last_chunk": leader.last_chunk_seconds,
            "hand_over": self.first_token - self.paired - leader_seconds,
            "deliver": self.first_token_sent - self.first_token,
        }
        return router_pb2.TtftParts(total=sum(parts[name] for name in PARTS), **parts)

    @property
    def commit_after_first_token(self) -> float:
        """Seconds from the first token to the commit; 0 without a commit, or when it came first."""
        return max(0.0, self.committed - self.first_token)
