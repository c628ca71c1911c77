"""The group under a virtual clock: the same scheduler and policies, with stages that take what a cost says.

Says what a cluster would do that is not here: time to first token, throughput, bubbles and a timeline. Control takes no
time; activations take `hop_seconds` from stage to stage; KV leaves each stage chunk by chunk at `kv_bytes_per_second`.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Sequence

from headwater.tokens import TOKEN_BYTES
from headwater.v1 import common_pb2, worker_pb2
from prefill_node.chunking import ChunkPolicy
from prefill_node.costs import GroupCost
from prefill_node.pages import PagePool
from prefill_node.scheduler import Entry, Limits, LogEntry, Request, Scheduler
from prefill_node.timeline import Bar


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """A request comes at `at` seconds, and leaves at `cancel_at`, if ever."""

    request_id: str
    at: float
    num_tokens: int
    priority: int = 0
    cancel_at: float | None = None


@dataclasses.dataclass(slots=True)
class Outcome:
    """What became of a request. Seconds of the virtual clock; None: it did not get there."""

    arrival: Arrival
    started_at: float | None = None
    first_token_at: float | None = None
    delivered_at: float | None = None
    num_chunks: int = 0

    @property
    def ttft(self) -> float:
        """Raises ValueError when there was no first token."""
        if self.first_token_at is None:
            raise ValueError(f"request {self.arrival.request_id} has no first token")
        return self.first_token_at - self.arrival.at


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """What takes time.

    Attributes:
        cost: of each stage.
        hop_seconds: from a stage to the next.
        kv_bytes_per_token: of all layers together.
        kv_bytes_per_second: of each stage's link.
    """

    cost: GroupCost
    hop_seconds: float = 0.0
    kv_bytes_per_token: float = 0.0
    kv_bytes_per_second: float = float("inf")


@dataclasses.dataclass(frozen=True)
class Result:
    """A simulation's end.

    Attributes:
        bars: on tracks "stage 0", …, and "transfer 0", ….
        busy_seconds: of each stage.
        seconds: until the last stage was done with everything.
    """

    outcomes: list[Outcome]
    bars: list[Bar]
    busy_seconds: list[float]
    seconds: float

    @property
    def tracks(self) -> list[str]:
        numbers = range(len(self.busy_seconds))
        return [*(f"stage {number}" for number in numbers), *(f"transfer {number}" for number in numbers)]

    @property
    def bubble_share(self) -> float:
        """Of the time in which any stage had work, on average over stages."""
        return 1 - sum(self.busy_seconds) / (len(self.busy_seconds) * self.seconds) if self.seconds else 0.0


def simulate(
    arrivals: Sequence[Arrival],
    hardware: Hardware,
    *,
    cuts: ChunkPolicy,
    limits: Limits,
    num_pages: int,
    page_size: int,
    check: Callable[[Scheduler], None] | None = None,
) -> Result:
    """Runs all arrivals to their end.

    Args:
        cuts: the policy; it may believe in another cost than the hardware's.
        check: called after every event.

    Raises:
        InvalidRequest, CapacityError: as `Scheduler.submit`.
    """
    return _Simulation(arrivals, hardware, cuts, limits, PagePool(num_pages, page_size), check).run()


class _Simulation:
    def __init__(
        self,
        arrivals: Sequence[Arrival],
        hardware: Hardware,
        cuts: ChunkPolicy,
        limits: Limits,
        pool: PagePool,
        check: Callable[[Scheduler], None] | None,
    ) -> None:
        self._hardware = hardware
        self._check = check
        self._stages = len(hardware.cost.stages)
        self._now = 0.0
        self._scheduler = Scheduler(
            pool,
            num_stages=self._stages,
            # One rank stands for the tensor ranks of its stage, which do the same things.
            world_size=self._stages,
            limits=limits,
            cuts=cuts,
            seconds=hardware.cost.seconds,
            clock=lambda: self._now,
        )
        self._outcomes = {arrival.request_id: Outcome(arrival) for arrival in arrivals}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._logs: list[collections.deque[LogEntry]] = [collections.deque() for _ in range(self._stages)]
        self._busy = [False] * self._stages
        # Steps whose activations have come to each stage.
        self._arrived = [0] * self._stages
        self._link_free = [0.0] * self._stages
        self._busy_seconds = [0.0] * self._stages
        self._released: set[tuple[str, int]] = set()
        self._bars: list[Bar] = []
        self._last = 0.0
        for arrival in arrivals:
            self._at(arrival.at, lambda arrival=arrival: self._arrive(arrival))  # type: ignore[misc]
            if arrival.cancel_at is not None:
                self._at(arrival.cancel_at, lambda arrival=arrival: self._cancel(arrival))  # type: ignore[misc]

    def run(self) -> Result:
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
            self._settle()
            if self._check is not None:
                self._check(self._scheduler)
        return Result(list(self._outcomes.values()), self._bars, self._busy_seconds, self._last)

    def _settle(self) -> None:
        """Plans, and lets every stage go on with its log, until nothing changes before the next event."""
        while True:
            self._append(self._scheduler.plan())
            went_on = [self._go_on(stage) for stage in range(self._stages)]
            if not any(went_on):
                return

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _arrive(self, arrival: Arrival) -> None:
        tokens = bytes(TOKEN_BYTES * arrival.num_tokens)
        self._scheduler.submit(Request(arrival.request_id, tokens, common_pb2.SamplingParams(), None, arrival.priority))

    def _cancel(self, arrival: Arrival) -> None:
        _, entries = self._scheduler.cancel(arrival.request_id)
        self._append(entries)

    def _append(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            for stage, entries_of in enumerate(self._logs):
                if entry.stage in (None, stage):
                    entries_of.append(entry.entry)

    def _go_on(self, stage: int) -> bool:
        """Applies a stage's log as far as it can now. Returns whether anything happened."""
        log = self._logs[stage]
        changed = False
        while log and not self._busy[stage]:
            entry = log[0]
            if isinstance(entry, worker_pb2.Step):
                if stage and self._arrived[stage] <= entry.sequence:
                    break
                self._begin(stage, entry)
            elif isinstance(entry, worker_pb2.AbortRequest):
                self._release(entry.request_id, stage)
            log.popleft()
            changed = True
        return changed

    def _begin(self, stage: int, step: worker_pb2.Step) -> None:
        chunks = [chunk for chunk in step.chunks if not chunk.void]
        cost = self._hardware.cost.stages[stage]
        seconds = cost.step_seconds([(chunk.start, chunk.end - chunk.start) for chunk in chunks]) if chunks else 0.0
        self._busy[stage] = True
        self._busy_seconds[stage] += seconds
        for chunk in chunks:
            outcome = self._outcomes[chunk.request_id]
            outcome.started_at = self._now if outcome.started_at is None else outcome.started_at
            outcome.num_chunks += stage == 0
            label = f"{chunk.start}-{chunk.end}"
            self._bars.append(Bar(f"stage {stage}", self._now, self._now + seconds, label, chunk.request_id))
        self._at(self._now + seconds, lambda: self._done(stage, step, chunks))

    def _done(self, stage: int, step: worker_pb2.Step, chunks: list[worker_pb2.Chunk]) -> None:
        self._busy[stage] = False
        self._last = self._now if chunks else self._last
        if stage + 1 < self._stages:
            self._at(self._now + self._hardware.hop_seconds, lambda: self._activations_at(stage + 1))
        for chunk in chunks:
            sent_at = self._send(stage, chunk)
            if chunk.last:
                self._at(sent_at, lambda chunk=chunk: self._delivered(stage, chunk))  # type: ignore[misc]
        for chunk in self._scheduler.step_done(stage, step.sequence):
            if chunk.last and not chunk.void:
                self._outcomes[chunk.request_id].first_token_at = self._now

    def _activations_at(self, stage: int) -> None:
        self._arrived[stage] += 1

    def _send(self, stage: int, chunk: worker_pb2.Chunk) -> float:
        """Queues a chunk's KV on the stage's link. Returns when it will have arrived."""
        hardware = self._hardware
        num_bytes = (chunk.end - chunk.start) * hardware.kv_bytes_per_token / self._stages
        start = max(self._now, self._link_free[stage])
        self._link_free[stage] = end = start + num_bytes / hardware.kv_bytes_per_second
        if num_bytes:
            label = f"{chunk.start}-{chunk.end}"
            self._bars.append(Bar(f"transfer {stage}", start, end, label, chunk.request_id, {"num_bytes": num_bytes}))
        return end

    def _delivered(self, stage: int, chunk: worker_pb2.Chunk) -> None:
        outcome = self._outcomes[chunk.request_id]
        outcome.delivered_at = max(self._now, outcome.delivered_at or 0.0)
        self._release(chunk.request_id, stage)

    def _release(self, request_id: str, stage: int) -> None:
        # A request that is cancelled after its last chunk has been released already.
        if (request_id, stage) not in self._released:
            self._released.add((request_id, stage))
            self._scheduler.released(request_id, stage, 0)
