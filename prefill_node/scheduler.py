"""Which chunks go through the pipeline next.

Pure: requests in, log entries out; no clock, no I/O, no torch. The leader sends the entries, in order, to
every worker.

    queued ──pages──▶ running ──last chunk planned, or cancelled──▶ closing ──all ranks released──▶ gone
       └──pages──▶ fetching ──all ranks have what was verified──▲

Pages are taken for the whole prompt at once, so running requests never wait for each other's pages. They are
given back only when every rank has released the request: computed, written and quiesced. Until then its KV can
be redirected, and then every rank has to release it once more.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence

from headwater.errors import CapacityError, DuplicateTransfer, InvalidRequest, StalePeer
from headwater.v1 import common_pb2, worker_pb2
from prefill_node.pages import PagePool

Entry = (
    worker_pb2.OpenRequest
    | worker_pb2.Step
    | worker_pb2.CloseRequest
    | worker_pb2.RedirectDelivery
    | worker_pb2.ForgetRequest
)


class RequestState(enum.Enum):
    """See the module's diagram."""

    QUEUED = "queued"
    FETCHING = "fetching"
    RUNNING = "running"
    CLOSING = "closing"


@dataclasses.dataclass
class Request:
    """One prompt. Only the scheduler changes what is below the line."""

    request_id: str
    token_ids: Sequence[int]
    sampling: common_pb2.SamplingParams
    grant: common_pb2.Grant | None
    # ---
    state: RequestState = RequestState.QUEUED
    next_token: int = 0
    fetching_ranks: set[int] = dataclasses.field(default_factory=set)
    holding_ranks: set[int] = dataclasses.field(default_factory=set)
    cancelled: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def first_token(self) -> int:
        """Where computing starts: what earlier attempts delivered is fetched."""
        return self.grant.verified_tokens if self.grant is not None else 0

    @property
    def attempt(self) -> int:
        """Of the grant; 0 without one."""
        return self.grant.attempt if self.grant is not None else 0


class Scheduler:
    """Fixed-size chunks, round robin over the running requests.

    A step takes the next whole chunk of one request, and then those of others that still fit the budget of
    one chunk, so short prompts and tails share steps.

    Args:
        max_in_flight: steps sent and not yet done: the pipeline's depth and some look-ahead.
        world_size: ranks that must release a request.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        chunk_tokens: int,
        max_in_flight: int,
        max_running: int,
        max_queued: int,
        world_size: int,
    ) -> None:
        self.pool = pool
        self.chunk_tokens = chunk_tokens
        self._max_in_flight = max_in_flight
        self._max_running = max_running
        self._max_queued = max_queued
        self._world_size = world_size
        self._queue: collections.deque[Request] = collections.deque()
        # Requests with pages; those with chunks left to plan are in turn order at the front of `_turns`.
        self._active: dict[str, Request] = {}
        self._turns: collections.deque[Request] = collections.deque()
        self._in_flight: collections.deque[worker_pb2.Step] = collections.deque()
        self._next_sequence = 0

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._active)

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    def num_chunks(self, request: Request) -> int:
        return -(-(request.num_tokens - request.first_token) // self.chunk_tokens)

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
        if request.first_token >= request.num_tokens:
            raise InvalidRequest(
                f"the grant calls {request.first_token} tokens verified, and the prompt has {request.num_tokens}: at "
                "least the last one must be computed."
            )
        if len(self._queue) >= self._max_queued:
            raise CapacityError(
                f"{len(self._queue)} requests are waiting (max_queued_requests). Try again later or add a group."
            )
        if request.request_id in self._active or any(r.request_id == request.request_id for r in self._queue):
            raise DuplicateTransfer(f"request {request.request_id} is already here.")
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
        return False, [worker_pb2.CloseRequest(request_id=request_id, abort=True)]

    def plan(self) -> list[Entry]:
        """Everything that may be sent to the workers now, in order."""
        entries: list[Entry] = []
        while self._queue and len(self._active) < self._max_running:
            request = self._queue[0]
            if self.pool.pages_for(request.num_tokens) > self.pool.free_pages:
                break
            self._queue.popleft()
            entries.append(self._admit(request))
        while self._turns and len(self._in_flight) < self._max_in_flight:
            step, finished = self._next_step()
            self._in_flight.append(step)
            entries.append(step)
            entries += [worker_pb2.CloseRequest(request_id=request.request_id, abort=False) for request in finished]
        return entries

    def step_done(self, sequence: int) -> list[worker_pb2.Chunk]:
        """The last stage has computed a step. Returns its chunks."""
        step = self._in_flight.popleft()
        if step.sequence != sequence:
            raise AssertionError(f"step {sequence} was reported done, step {step.sequence} is the oldest")
        return list(step.chunks)

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
        return [worker_pb2.RedirectDelivery(request_id=request_id, grant=grant)]

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
        return [worker_pb2.ForgetRequest(request_id=request_id)]

    def _admit(self, request: Request) -> worker_pb2.OpenRequest:
        pages = self.pool.take(request.request_id, request.num_tokens)
        request.holding_ranks = set(range(self._world_size))
        request.next_token = request.first_token
        self._active[request.request_id] = request
        if request.first_token:
            request.state = RequestState.FETCHING
            request.fetching_ranks = set(range(self._world_size))
        else:
            request.state = RequestState.RUNNING
            self._turns.append(request)
        return worker_pb2.OpenRequest(
            request_id=request.request_id,
            num_tokens=request.num_tokens,
            pages=pages,
            sampling=request.sampling,
            grant=request.grant,
        )

    def _next_step(self) -> tuple[worker_pb2.Step, list[Request]]:
        step = worker_pb2.Step(sequence=self._next_sequence)
        self._next_sequence += 1
        budget = self.chunk_tokens
        finished: list[Request] = []
        # Whoever got no room keeps its place before those that did.
        passed_over: list[Request] = []
        served: list[Request] = []
        while self._turns:
            request = self._turns.popleft()
            count = min(self.chunk_tokens, request.num_tokens - request.next_token)
            if count > budget:
                passed_over.append(request)
                continue
            budget -= count
            start, end = request.next_token, request.next_token + count
            request.next_token = end
            last = end == request.num_tokens
            token_ids = request.token_ids[start:end]
            step.chunks.add(request_id=request.request_id, start=start, end=end, token_ids=token_ids, last=last)
            if last:
                request.state = RequestState.CLOSING
                finished.append(request)
            else:
                served.append(request)
        self._turns.extend([*passed_over, *served])
        return step, finished
