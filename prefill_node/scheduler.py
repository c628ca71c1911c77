"""Which chunks go through the pipeline next, and which stage may have them.

Pure: requests in, log entries out; no I/O, no torch, an injected clock. The leader sends the entries, in order, to the
workers they are for; the simulator plays the workers.

    queued ──pages──▶ running ──last chunk planned, or cancelled──▶ closing ──all ranks released──▶ gone
       └──pages──▶ fetching ──all ranks have what was verified──▲

*Pages* are taken for the whole prompt at once, so running requests never wait for each other's pages. They are
given back only when every rank has released the request: computed, written and quiesced. Until then its KV can
be redirected, and then every rank has to release it once more.

*Prefixes.* Full pages that the last stage, and so every stage, has computed are shared with requests that begin with
the same tokens, and kept for later ones (`pages`). What is shared is decided when a request gets its pages, and told to
the ranks with them: computing starts after it, and each rank delivers it with what it computes. What was fetched is not
shared, because it has been through the element type of another group; nor is what was computed on top of it.

*Turns.* A step is one chunk of the request whose turn it is, joined by last chunks of others that fit. The turn goes to
the highest priority, and there to the request with the least work left, where a second of waiting counts as a second of
work less; but whoever has waited for `max_wait` goes before all. Pages are given out by the same rule.

*Stages.* A step is planned when the first stage has room for it: `1 + look_ahead` steps that it has not computed. Each
further stage gets steps when it has room, and then one more than that if there is one: two steps in one message cost
little more than one. What is decided meanwhile counts: the chunks of a cancelled request are void for every stage that
does not have them yet.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
from collections.abc import Callable, Mapping

from headwater.errors import CapacityError, DuplicateTransfer, InvalidRequest, StalePeer
from headwater.tokens import TOKEN_BYTES
from headwater.v1 import common_pb2, worker_pb2
from prefill_node.chunking import ChunkPolicy
from prefill_node.pages import PagePool

# A request is cut anew when so many times more or fewer share the pipeline than when it was cut.
_RECUT = 2

LogEntry = (
    worker_pb2.OpenRequest
    | worker_pb2.Step
    | worker_pb2.AbortRequest
    | worker_pb2.RedirectDelivery
    | worker_pb2.ForgetRequest
)


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """An addition to the log of the ranks of one stage, or of all ranks (None)."""

    entry: LogEntry
    stage: int | None = None


class RequestState(enum.Enum):
    """See the module's diagram."""

    QUEUED = "queued"
    FETCHING = "fetching"
    RUNNING = "running"
    CLOSING = "closing"


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt. Only the scheduler changes what is below the line."""

    request_id: str
    # As in PrefillRequest.
    tokens: bytes
    sampling: common_pb2.SamplingParams
    grant: common_pb2.Grant | None
    priority: int = 0
    # As in OpenRequest.
    trace_context: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # ---
    state: RequestState = RequestState.QUEUED
    # Where the chunks that are not planned yet end, and what they and those after them take in seconds.
    ends: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    seconds_left: collections.deque[float] = dataclasses.field(default_factory=collections.deque)
    # Chunks in all, as far as can be said, and those that are planned.
    num_chunks: int = 0
    num_planned: int = 0
    # How many requests there were when the rest was cut.
    cut_for: int = 1
    next_token: int = 0
    # What is shared at the beginning, and where computing starts: after that, or after what is fetched. Until the
    # request has pages both are what they would be now.
    cached_tokens: int = 0
    first_token: int = 0
    # When it came, or got its latest chunk.
    served_at: float = 0.0
    fetching_ranks: set[int] = dataclasses.field(default_factory=set)
    holding_ranks: set[int] = dataclasses.field(default_factory=set)
    cancelled: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def verified_tokens(self) -> int:
        """Of the grant: what earlier attempts have delivered; 0 without one."""
        return self.grant.verified_tokens if self.grant is not None else 0

    @property
    def attempt(self) -> int:
        """Of the grant; 0 without one."""
        return self.grant.attempt if self.grant is not None else 0


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a scheduler.

    Attributes:
        step_tokens: most tokens of a step.
        look_ahead: steps beyond the one being computed that a stage may have.
        max_running: requests with pages.
        max_queued: requests without.
        max_wait_seconds: after this long without a chunk a request goes before all others.
    """

    step_tokens: int
    look_ahead: int
    max_running: int
    max_queued: int
    max_wait_seconds: float


class Scheduler:
    """Decides for one group of `num_stages` stages and `world_size` ranks.

    Args:
        cuts: where the chunks of a prompt end.
        seconds: predicted time of a chunk, of (prefix, count), on the slowest stage.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        num_stages: int,
        world_size: int,
        limits: Limits,
        cuts: ChunkPolicy,
        seconds: Callable[[int, int], float],
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.limits = limits
        self._num_stages = num_stages
        self._world_size = world_size
        self._cuts = cuts
        self._seconds = seconds
        self._clock = clock
        self._queue: list[Request] = []
        # Requests with pages, and of those the ones with chunks left to plan.
        self._active: dict[str, Request] = {}
        self._turns: list[Request] = []
        # Steps that the last stage has not computed, oldest first, and how many of all steps each stage was given
        # and has computed.
        self._in_flight: collections.deque[worker_pb2.Step] = collections.deque()
        self._given = [0] * num_stages
        self._done = [0] * num_stages
        # Tokens of the prompts that have got pages, and those of them that were shared.
        self.query_tokens = 0
        self.hit_tokens = 0

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def oldest_queued_seconds(self) -> float:
        """How long the oldest of the queued requests has waited. May be asked from another thread."""
        now = self._clock()
        return max((now - request.served_at for request in list(self._queue)), default=0.0)

    @property
    def num_running(self) -> int:
        return len(self._active)

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    def begin_at(self, sequence: int) -> None:
        """The workers have computed steps before `sequence` already, which were not planned here."""
        self._given = [sequence] * self._num_stages
        self._done = [sequence] * self._num_stages

    @property
    def backlog_seconds(self) -> float:
        """Predicted time of everything that is queued or not yet planned."""
        planned = sum(request.seconds_left[0] for request in self._turns)
        return planned + sum(request.seconds_left[0] for request in self._queue)

    @property
    def backlog_tokens(self) -> int:
        """Of everything that is queued or not yet planned."""
        running = sum(request.num_tokens - request.next_token for request in self._turns)
        return running + sum(request.num_tokens - request.first_token for request in self._queue)

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            InvalidRequest: it can never fit the pool.
            CapacityError: the queue is full.
            DuplicateTransfer: the request id is in use.
        """
        pool = self.pool
        if pool.pages_for(request.num_tokens) > pool.num_pages:
            raise InvalidRequest(
                f"the prompt has {request.num_tokens} tokens; this prefill group's pool holds "
                f"{pool.num_pages * pool.page_size}. Shorten the prompt, or raise pool_tokens."
            )
        if request.verified_tokens >= request.num_tokens:
            raise InvalidRequest(
                f"the grant calls {request.verified_tokens} tokens verified, and the prompt has {request.num_tokens}: "
                "at least the last one must be computed."
            )
        if len(self._queue) >= self.limits.max_queued:
            raise CapacityError(
                f"{len(self._queue)} requests are waiting (max_queued_requests). Try again later or add a group."
            )
        if request.request_id in self._active or any(r.request_id == request.request_id for r in self._queue):
            raise DuplicateTransfer(f"request {request.request_id} is already here.")
        self._share(request)
        # Not cut yet: that depends on who else is there when it begins.
        request.seconds_left.append(self._seconds(request.first_token, request.num_tokens - request.first_token))
        request.served_at = self._clock()
        self._queue.append(request)

    def cancel(self, request_id: str) -> tuple[bool, list[Entry]]:
        """Ends a request early. Returns whether it is gone already, and what the workers must be told."""
        for request in self._queue:
            if request.request_id == request_id:
                self._queue.remove(request)
                return True, []
        cancelled = self._active.get(request_id)
        if cancelled is None:
            return True, []
        if cancelled.state is RequestState.RUNNING:
            self._turns.remove(cancelled)
        cancelled.state = RequestState.CLOSING
        cancelled.cancelled = True
        for step in self._in_flight:
            for chunk in step.chunks:
                chunk.void |= chunk.request_id == request_id
        return False, [Entry(worker_pb2.AbortRequest(request_id=request_id))]

    def plan(self) -> list[Entry]:
        """Everything that may be sent to the workers now, in order."""
        entries: list[Entry] = []
        now = self._clock()
        while self._queue and len(self._active) < self.limits.max_running:
            request = self._next_admission(now)
            if request is None:
                break
            self._queue.remove(request)
            entries.append(Entry(self._admit(request)))
        # Steps differ in length, and a short queue would make stages wait for each other: with one step a stage and one
        # more in all, a quarter of the time of eight stages was lost where a twentieth is now.
        most = self._num_stages * (1 + self.limits.look_ahead)
        while self._turns and self._has_room(0) and len(self._in_flight) < most:
            self._in_flight.append(self._next_step(now))
            entries.append(self._give(0))
        for stage in range(1, self._num_stages):
            if self._has_room(stage):
                most = min(self._given[stage - 1], self._done[stage] + self.limits.look_ahead + 2)
                entries += [self._give(stage) for _ in range(most - self._given[stage])]
        return entries

    def step_done(self, stage: int, sequence: int) -> list[worker_pb2.Chunk]:
        """A stage has computed a step. Returns the step's chunks when it was the last stage."""
        if sequence != self._done[stage]:
            raise AssertionError(f"stage {stage} says step {sequence} is done; step {self._done[stage]} is the oldest")
        self._done[stage] += 1
        if stage < self._num_stages - 1:
            return []
        chunks = list(self._in_flight.popleft().chunks)
        for chunk in chunks:
            request = self._active.get(chunk.request_id)
            # Of one that was cancelled, this chunk is void on some stage, maybe.
            if request is not None and not chunk.void and request.first_token == request.cached_tokens:
                self.pool.computed(request.request_id, request.tokens, chunk.end)
        return chunks

    def fetched(self, request_id: str, rank: int) -> None:
        """A rank has its share of what was verified. The last one makes the request run."""
        request = self._active.get(request_id)
        if request is None or request.state is not RequestState.FETCHING:
            return
        request.fetching_ranks.remove(rank)
        if not request.fetching_ranks:
            request.state = RequestState.RUNNING
            self._turns.append(request)

    def is_fetching(self, request_id: str) -> bool:
        request = self._active.get(request_id)
        return request is not None and request.state is RequestState.FETCHING

    def redirect(self, request_id: str, grant: common_pb2.Grant) -> list[Entry]:
        """Sends the KV of an active request where `grant` allows. Returns what the workers must be told.

        Raises:
            StalePeer: the request is not active, or was cancelled, or the grant is not of a later attempt.
        """
        request = self._active.get(request_id)
        if request is None or request.cancelled or request.grant is None:
            raise StalePeer(
                f"request {request_id} has no KV here that could be redirected: it is over, or has no grant."
            )
        if grant.attempt <= request.attempt:
            raise StalePeer(
                f"request {request_id} is in attempt {request.attempt}; a grant of attempt {grant.attempt} is too old."
            )
        request.grant = grant
        request.holding_ranks = set(range(self._world_size))
        return [Entry(worker_pb2.RedirectDelivery(request_id=request_id, grant=grant))]

    def released(self, request_id: str, rank: int, attempt: int) -> list[Entry]:
        """A rank has nothing of this attempt under way any more. When it was the last one the pages are free, and
        the workers must be told what is returned.
        """
        request = self._active.get(request_id)
        if request is None or attempt != request.attempt:
            return []
        request.holding_ranks.remove(rank)
        if request.holding_ranks:
            return []
        del self._active[request_id]
        self.pool.give_back(request_id)
        return [Entry(worker_pb2.ForgetRequest(request_id=request_id))]

    def _turn(self, request: Request, now: float) -> tuple[float, ...]:
        """Who has the least goes first."""
        waited = now - request.served_at
        if waited >= self.limits.max_wait_seconds:
            return (0.0, -waited)
        return (1.0, -request.priority, request.seconds_left[0] - waited)

    def _next_admission(self, now: float) -> Request | None:
        """The request that gets pages now, if any does."""
        for place, request in enumerate(sorted(self._queue, key=lambda waiting: self._turn(waiting, now))):
            if self.pool.fits(request.num_tokens):
                return request
            # What it would share is looked up for the first only: for all, with every plan, that would take too long.
            if place == 0 and self.pool.fits(request.num_tokens, self._share(request)):
                return request
            if now - request.served_at >= self.limits.max_wait_seconds:
                # Pages that come back are kept for it.
                return None
        return None

    def _admit(self, request: Request) -> worker_pb2.OpenRequest:
        pages = self.pool.take(request.request_id, request.num_tokens, self._share(request))
        self.query_tokens += request.num_tokens
        self.hit_tokens += request.cached_tokens
        request.holding_ranks = set(range(self._world_size))
        self._active[request.request_id] = request
        request.next_token = request.first_token
        if request.first_token > request.cached_tokens:
            request.state = RequestState.FETCHING
            request.fetching_ranks = set(range(self._world_size))
        else:
            request.state = RequestState.RUNNING
            self._turns.append(request)
        self._cut(request)
        return worker_pb2.OpenRequest(
            request_id=request.request_id,
            num_tokens=request.num_tokens,
            pages=pages,
            sampling=request.sampling,
            grant=request.grant,
            cached_tokens=request.cached_tokens,
            trace_context=request.trace_context,
        )

    def _share(self, request: Request) -> list[int]:
        """The pages that a request would share now; notes where its computing would start."""
        pages = self.pool.find(request.tokens)
        request.cached_tokens = len(pages) * self.pool.page_size
        if request.cached_tokens <= request.verified_tokens:
            # Fetching writes into the first pages, so those must be its own.
            request.cached_tokens, pages = 0, []
        request.first_token = request.cached_tokens or request.verified_tokens
        return pages

    def _sharing(self) -> int:
        """Requests that have chunks left."""
        return max(1, len(self._turns) + len(self._queue))

    def _cut(self, request: Request) -> None:
        """Decides about the chunks that are not planned yet."""
        start, request.cut_for = request.next_token, self._sharing()
        ends = self._cuts(start, request.num_tokens, request.cut_for)
        times = [self._seconds(begin, end - begin) for begin, end in itertools.pairwise((start, *ends))]
        request.ends = collections.deque(ends)
        request.seconds_left = collections.deque(reversed(list(itertools.accumulate(reversed(times)))))
        request.num_chunks = request.num_planned + len(ends)

    def _has_room(self, stage: int) -> bool:
        return self._given[stage] - self._done[stage] <= self.limits.look_ahead

    def _give(self, stage: int) -> Entry:
        """The next step for a stage, as things stand now."""
        planned = self._in_flight[self._given[stage] - self._done[-1]]
        self._given[stage] += 1
        step = worker_pb2.Step()
        step.CopyFrom(planned)
        if stage == 0:
            # No other stage needs them.
            for chunk in planned.chunks:
                chunk.ClearField("tokens")
        return Entry(step, stage)

    def _next_step(self, now: float) -> worker_pb2.Step:
        step = worker_pb2.Step(sequence=self._given[0])
        self._turns.sort(key=lambda request: self._turn(request, now))
        first = self._turns[0]
        if not 1 / _RECUT < self._sharing() / first.cut_for < _RECUT:
            self._cut(first)
        budget = self.limits.step_tokens - (first.ends[0] - first.next_token)
        chosen = [first]
        # Only what ends with this step joins it: the chunks of long prompts would make it longer for those.
        for request in self._turns[1:]:
            count = request.ends[0] - request.next_token
            if len(request.ends) == 1 and count <= budget:
                budget -= count
                chosen.append(request)
        for request in chosen:
            start, end = request.next_token, request.ends.popleft()
            request.seconds_left.popleft()
            request.num_planned += 1
            request.next_token, request.served_at = end, now
            tokens = request.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]
            step.chunks.add(request_id=request.request_id, start=start, end=end, tokens=tokens, last=not request.ends)
            if not request.ends:
                request.state = RequestState.CLOSING
                self._turns.remove(request)
        return step
