"""The scheduler as a state machine: whatever is submitted, cancelled, done and released, in any order."""

from __future__ import annotations

import collections

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headwater.errors import CapacityError, DuplicateTransfer, InvalidRequest, StalePeer
from headwater.v1 import common_pb2, worker_pb2
from prefill_node.pages import PagePool
from prefill_node.scheduler import Entry, Request, Scheduler

CHUNK, PAGE, PAGES, IN_FLIGHT, WORLD = 8, 4, 12, 3, 2


def make(max_queued: int = 100) -> Scheduler:
    pool = PagePool(PAGES, PAGE)
    return Scheduler(
        pool, chunk_tokens=CHUNK, max_in_flight=IN_FLIGHT, max_running=3, max_queued=max_queued, world_size=WORLD
    )


def request(name: str, num_tokens: int, grant: common_pb2.Grant | None = None) -> Request:
    return Request(name, list(range(num_tokens)), common_pb2.SamplingParams(), grant)


class Machine(RuleBasedStateMachine):
    """Plays the workers: they process the log in order and release what is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make()
        self.names = iter(range(10_000))
        self.sizes: dict[str, int] = {}
        self.alive: set[str] = set()
        self.steps: collections.deque[worker_pb2.Step] = collections.deque()
        self.computed: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
        self.attempts: dict[str, int] = {}
        # What was delivered by earlier attempts, and who has not fetched it yet.
        self.verified: dict[str, int] = {}
        self.to_fetch: list[tuple[str, int]] = []
        self.to_release: list[tuple[str, int, int]] = []
        self.closed: set[str] = set()
        self.cancelled: set[str] = set()
        self.forgotten: set[str] = set()

    def apply(self, entries: list[Entry]) -> None:
        for entry in entries:
            if isinstance(entry, worker_pb2.Step):
                self.on_step(entry)
            elif isinstance(entry, worker_pb2.OpenRequest):
                if self.verified[entry.request_id]:
                    self.to_fetch += [(entry.request_id, rank) for rank in range(WORLD)]
            elif isinstance(entry, worker_pb2.CloseRequest):
                self.on_close(entry)
            elif isinstance(entry, worker_pb2.RedirectDelivery):
                name = entry.request_id
                self.attempts[name] = entry.grant.attempt
                if name in self.closed:
                    self.to_release += [(name, rank, entry.grant.attempt) for rank in range(WORLD)]
            else:
                assert entry.request_id not in self.forgotten
                self.forgotten.add(entry.request_id)

    def on_step(self, step: worker_pb2.Step) -> None:
        assert sum(chunk.end - chunk.start for chunk in step.chunks) <= CHUNK
        for chunk in step.chunks:
            assert chunk.request_id not in self.closed
            computed = self.computed[chunk.request_id]
            assert chunk.start == (computed[-1][1] if computed else self.verified[chunk.request_id])
            # Nothing is computed on top of what is not there.
            assert not any(name == chunk.request_id for name, _ in self.to_fetch)
            assert list(chunk.token_ids) == list(range(chunk.start, chunk.end))
            assert chunk.last == (chunk.end == self.sizes[chunk.request_id])
            computed.append((chunk.start, chunk.end))
        self.steps.append(step)

    def on_close(self, close: worker_pb2.CloseRequest) -> None:
        name = close.request_id
        if name in self.closed:
            return
        self.closed.add(name)
        self.to_fetch = [waiting for waiting in self.to_fetch if waiting[0] != name]
        self.to_release += [(name, rank, self.attempts[name]) for rank in range(WORLD)]
        if not close.abort:
            assert self.computed[name][-1][1] == self.sizes[name]

    @rule(num_tokens=st.integers(1, PAGES * PAGE), attempt=st.integers(0, 2), verified=st.integers(0, PAGES * PAGE))
    def submit(self, num_tokens: int, attempt: int, verified: int) -> None:
        name = f"r{next(self.names)}"
        self.sizes[name] = num_tokens
        self.attempts[name] = attempt
        self.verified[name] = min(verified, num_tokens - 1) if attempt > 1 else 0
        self.alive.add(name)
        grant = common_pb2.Grant(attempt=attempt, verified_tokens=self.verified[name]) if attempt else None
        self.scheduler.submit(request(name, num_tokens, grant))

    @precondition(lambda self: self.to_fetch)
    @rule(data=st.data())
    def fetched(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.to_fetch) - 1))
        self.scheduler.fetched(*self.to_fetch.pop(index))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), attempt=st.integers(1, 5))
    def redirect(self, data: st.DataObject, attempt: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        before = self.attempts[name]
        running = name in self.scheduler._active
        if running and name not in self.cancelled and 0 < before < attempt:
            self.apply(self.scheduler.redirect(name, common_pb2.Grant(attempt=attempt)))
        else:
            with pytest.raises(StalePeer):
                self.scheduler.redirect(name, common_pb2.Grant(attempt=attempt))

    @rule()
    def plan(self) -> None:
        self.apply(self.scheduler.plan())

    @precondition(lambda self: self.steps)
    @rule()
    def step_done(self) -> None:
        step = self.steps.popleft()
        assert list(self.scheduler.step_done(step.sequence)) == list(step.chunks)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        gone, entries = self.scheduler.cancel(name)
        self.cancelled.add(name)
        self.apply(entries)
        if gone:
            self.alive.discard(name)

    @precondition(lambda self: self.to_release)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.to_release) - 1))
        name, rank, attempt = self.to_release.pop(index)
        self.release_one(name, rank, attempt)

    def release_one(self, name: str, rank: int, attempt: int) -> None:
        over = self.scheduler.released(name, rank, attempt)
        self.apply(over)
        if over:
            self.alive.discard(name)
            assert not any(waiting[0] == name for waiting in self.to_release if waiting[2] == self.attempts[name])

    @invariant()
    def bounded_and_balanced(self) -> None:
        self.scheduler.pool.check()
        assert self.scheduler.steps_in_flight == len(self.steps) <= IN_FLIGHT
        assert self.scheduler.num_running <= 3

    def teardown(self) -> None:
        """Everything that was accepted ends, and nothing is left."""
        for _ in range(10_000):
            self.apply(self.scheduler.plan())
            while self.steps:
                self.step_done()
            while self.to_fetch:
                self.scheduler.fetched(*self.to_fetch.pop())
            while self.to_release:
                self.release_one(*self.to_release.pop())
            if not self.scheduler.num_running and not self.scheduler.num_queued:
                break
        assert (self.scheduler.num_running, self.scheduler.num_queued) == (0, 0)
        assert self.scheduler.pool.free_pages == PAGES


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestScheduler = Machine.TestCase


def test_requests_take_turns_and_tails_share_a_step() -> None:
    scheduler = make()
    scheduler.submit(request("long", 20))
    scheduler.submit(request("short", 3))
    steps = [entry for entry in scheduler.plan() if isinstance(entry, worker_pb2.Step)]
    spans = [[(chunk.request_id, chunk.start, chunk.end) for chunk in step.chunks] for step in steps]
    assert spans == [[("long", 0, 8)], [("short", 0, 3)], [("long", 8, 16)]]


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidRequest, match="has 49 tokens; this prefill group's pool holds 48"):
        make().submit(request("r", 49))


def test_a_full_queue_and_a_second_request_of_the_same_name_are_refused() -> None:
    scheduler = make(max_queued=1)
    scheduler.submit(request("r", 4))
    with pytest.raises(CapacityError, match="max_queued_requests"):
        scheduler.submit(request("s", 4))
    scheduler.plan()
    with pytest.raises(DuplicateTransfer, match="request r is already here"):
        scheduler.submit(request("r", 4))


def test_pages_come_as_one_run_where_there_is_one() -> None:
    pool = PagePool(10, 4)
    assert pool.take("a", 8) == [0, 1]
    assert pool.take("b", 12) == [2, 3, 4]
    pool.give_back("a")
    assert pool.take("c", 12) == [5, 6, 7]
    assert pool.take("d", 16) == [0, 1, 8, 9]
    with pytest.raises(CapacityError, match="1 pages were asked for and 0 of 10"):
        pool.take("e", 1)
    pool.check()
