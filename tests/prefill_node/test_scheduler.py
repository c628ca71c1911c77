"""The scheduler as a state machine: whatever is submitted, cancelled, done and released, in any order."""

from __future__ import annotations

import collections

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headwater.errors import CapacityError, DuplicateTransfer, InvalidRequest, StalePeer
from headwater.tokens import pack, unpack
from headwater.v1 import common_pb2, worker_pb2
from prefill_node.chunking import fixed
from prefill_node.pages import PagePool
from prefill_node.scheduler import Entry, Limits, LogEntry, Request, Scheduler

CHUNK, PAGE, PAGES, STAGES, WORLD, LOOK_AHEAD, MAX_WAIT = 8, 4, 12, 3, 6, 1, 20.0


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(
    max_queued: int = 100, stages: int = STAGES, clock: Clock | None = None, *, keep_prefixes: bool = False
) -> Scheduler:
    return Scheduler(
        PagePool(PAGES, PAGE, keep_prefixes=keep_prefixes),
        num_stages=stages,
        world_size=WORLD,
        limits=Limits(CHUNK, LOOK_AHEAD, max_running=3, max_queued=max_queued, max_wait_seconds=MAX_WAIT),
        cuts=lambda start, end, sharing: fixed.cuts(start, end, chunk_tokens=CHUNK, align=1),
        seconds=lambda prefix, count: float(count),
        clock=clock or Clock(),
    )


def request(name: str, num_tokens: int, grant: common_pb2.Grant | None = None, priority: int = 0) -> Request:
    return Request(name, pack(range(num_tokens)), common_pb2.SamplingParams(), grant, priority)


class Machine(RuleBasedStateMachine):
    """Plays the ranks: each stage applies its log in order, after the stage before, and releases what is over.

    What a stage has of a token is noted in its page's slot: the prompt up to there, and who has fetched any of it.
    """

    keep_prefixes = True

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.scheduler = make(clock=self.clock, keep_prefixes=self.keep_prefixes)
        self.names = iter(range(10_000))
        self.prompts: dict[str, list[int]] = {}
        self.sizes: dict[str, int] = {}
        self.opened: dict[str, worker_pb2.OpenRequest] = {}
        self.slots: list[dict[int, object]] = [{} for _ in range(STAGES)]
        self.alive: set[str] = set()
        # Of each stage: its log, and the number of steps that it has computed.
        self.logs: list[collections.deque[LogEntry]] = [collections.deque() for _ in range(STAGES)]
        self.num_done = [0] * STAGES
        # What each stage has computed of each request, and whether it takes more.
        self.computed: list[dict[str, list[tuple[int, int]]]] = [collections.defaultdict(list) for _ in range(STAGES)]
        self.closed: list[set[str]] = [set() for _ in range(STAGES)]
        # As the leader knows it, and as each stage's log has it so far.
        self.attempts: dict[str, int] = {}
        self.attempts_of: list[dict[str, int]] = [{} for _ in range(STAGES)]
        # What was delivered by earlier attempts, and who has not fetched it yet.
        self.verified: dict[str, int] = {}
        self.to_fetch: list[tuple[str, int]] = []
        self.to_release: list[tuple[str, int, int]] = []
        self.cancelled: set[str] = set()

    # --- the leader's side

    @rule(
        num_tokens=st.integers(1, PAGES * PAGE),
        differs_at=st.sampled_from([0, 3, 4, 10, 16, PAGES * PAGE]),
        attempt=st.sampled_from([0, 0, 1, 2]),
        verified=st.integers(0, PAGES * PAGE),
        priority=st.integers(0, 1),
    )
    def submit(self, num_tokens: int, differs_at: int, attempt: int, verified: int, priority: int) -> None:
        name = f"r{next(self.names)}"
        self.sizes[name] = num_tokens
        # Prompts begin alike, and then some go another way.
        self.prompts[name] = [token + 1000 * (token >= differs_at) for token in range(num_tokens)]
        self.attempts[name] = attempt
        self.verified[name] = min(verified, num_tokens - 1) if attempt > 1 else 0
        self.alive.add(name)
        grant = common_pb2.Grant(attempt=attempt, verified_tokens=self.verified[name]) if attempt else None
        self.scheduler.submit(
            Request(name, pack(self.prompts[name]), common_pb2.SamplingParams(), grant, priority=priority)
        )

    @rule()
    def plan(self) -> None:
        before = {name: running.served_at for name, running in self.scheduler._active.items()}
        turns = {running.request_id for running in self.scheduler._turns}
        for entry in self.scheduler.plan():
            if isinstance(entry.entry, worker_pb2.Step) and entry.stage == 0:
                self.check_turn(entry.entry, before, turns)
            self.append(entry)

    def check_turn(self, step: worker_pb2.Step, served_at: dict[str, float], turns: set[str]) -> None:
        """Bounded wait: whoever has waited too long goes before all who have waited less."""
        assert sum(chunk.end - chunk.start for chunk in step.chunks) <= CHUNK
        first = step.chunks[0].request_id
        for name in turns - self.cancelled - {first}:
            if first in served_at and self.clock.now - served_at[name] >= MAX_WAIT:
                assert served_at[first] <= served_at[name]
        for chunk in step.chunks:
            served_at[chunk.request_id] = self.clock.now
            if chunk.last:
                turns.discard(chunk.request_id)
            assert list(unpack(chunk.tokens)) == self.prompts[chunk.request_id][chunk.start : chunk.end]

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), attempt=st.integers(1, 5))
    def redirect(self, data: st.DataObject, attempt: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        grant = common_pb2.Grant(attempt=attempt)
        running = name in self.scheduler._active
        if running and name not in self.cancelled and 0 < self.attempts[name] < attempt:
            self.attempts[name] = attempt
            for entry in self.scheduler.redirect(name, grant):
                self.append(entry)
        else:
            with pytest.raises(StalePeer):
                self.scheduler.redirect(name, grant)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        gone, entries = self.scheduler.cancel(name)
        self.cancelled.add(name)
        for entry in entries:
            self.append(entry)
        if gone:
            self.alive.discard(name)

    @rule(seconds=st.floats(0, MAX_WAIT))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    def append(self, entry: Entry) -> None:
        if isinstance(entry.entry, worker_pb2.Step):
            for chunk in entry.entry.chunks:
                # No stage is given a chunk after it was told of the end.
                assert chunk.void == (chunk.request_id in self.cancelled)
        for stage, log in enumerate(self.logs):
            if entry.stage in (None, stage):
                log.append(entry.entry)

    # --- the ranks' side

    @precondition(lambda self: any(self.logs))
    @rule(stage=st.integers(0, STAGES - 1), count=st.integers(1, 5))
    def apply(self, stage: int, count: int) -> None:
        for _ in range(count):
            if not self.logs[stage]:
                return
            entry = self.logs[stage][0]
            if isinstance(entry, worker_pb2.Step) and stage and self.num_done[stage - 1] == self.num_done[stage]:
                # Its activations have not come.
                return
            self.logs[stage].popleft()
            self.apply_one(stage, entry)

    def apply_one(self, stage: int, entry: LogEntry) -> None:
        if isinstance(entry, worker_pb2.Step):
            self.compute(stage, entry)
        elif isinstance(entry, worker_pb2.OpenRequest):
            self.attempts_of[stage][entry.request_id] = entry.grant.attempt
            self.opened[entry.request_id] = entry
            cached = entry.cached_tokens
            assert cached % PAGE == 0
            assert cached < entry.num_tokens
            assert cached == 0 or cached > self.verified[entry.request_id]
            self.check_kv(stage, entry.request_id, cached)
            if self.fetches(entry.request_id):
                self.to_fetch += [(entry.request_id, rank) for rank in self.ranks(stage)]
        elif isinstance(entry, worker_pb2.AbortRequest):
            self.to_fetch = [one for one in self.to_fetch if one[0] != entry.request_id]
            self.close(stage, entry.request_id)
        elif isinstance(entry, worker_pb2.RedirectDelivery):
            name = entry.request_id
            self.attempts_of[stage][name] = entry.grant.attempt
            if name in self.closed[stage]:
                self.to_release += [(name, rank, entry.grant.attempt) for rank in self.ranks(stage)]
        else:
            assert entry.request_id in self.closed[stage]

    def fetches(self, name: str) -> bool:
        return self.verified[name] > self.opened[name].cached_tokens

    def slot(self, name: str, place: int) -> int:
        return self.opened[name].pages[place // PAGE] * PAGE + place % PAGE

    def kv(self, name: str, place: int) -> object:
        """What stands for the KV of a token."""
        return tuple(self.prompts[name][: place + 1]), name if self.fetches(name) else ""

    def write_kv(self, stage: int, name: str, start: int, end: int) -> None:
        for place in range(start, end):
            self.slots[stage][self.slot(name, place)] = self.kv(name, place)

    def check_kv(self, stage: int, name: str, end: int) -> None:
        for place in range(end):
            assert self.slots[stage][self.slot(name, place)] == self.kv(name, place)

    def compute(self, stage: int, step: worker_pb2.Step) -> None:
        assert step.sequence == self.num_done[stage]
        # Beside this one.
        given = sum(isinstance(entry, worker_pb2.Step) for entry in self.logs[stage])
        assert given <= LOOK_AHEAD + (stage > 0)
        for chunk in step.chunks:
            name = chunk.request_id
            assert bool(chunk.tokens) == (stage == 0 and not chunk.void)
            if chunk.void:
                continue
            computed = self.computed[stage][name]
            assert name not in self.closed[stage]
            assert chunk.start == (
                computed[-1][1] if computed else max(self.verified[name], self.opened[name].cached_tokens)
            )
            self.check_kv(stage, name, chunk.start)
            self.write_kv(stage, name, chunk.start, chunk.end)
            # Nothing is computed on top of what is not there.
            assert not any(waiting == name for waiting, _ in self.to_fetch)
            assert chunk.last == (chunk.end == self.sizes[name])
            computed.append((chunk.start, chunk.end))
            if chunk.last:
                self.close(stage, name)
        self.num_done[stage] += 1
        chunks = self.scheduler.step_done(stage, step.sequence)
        assert [(c.request_id, c.end) for c in chunks] == (
            [(c.request_id, c.end) for c in step.chunks] if stage == STAGES - 1 else []
        )

    def close(self, stage: int, name: str) -> None:
        if name not in self.closed[stage]:
            self.closed[stage].add(name)
            self.to_release += [(name, rank, self.attempts_of[stage][name]) for rank in self.ranks(stage)]

    @staticmethod
    def ranks(stage: int) -> range:
        return range(stage * WORLD // STAGES, (stage + 1) * WORLD // STAGES)

    @precondition(lambda self: self.to_fetch)
    @rule(data=st.data())
    def fetched(self, data: st.DataObject) -> None:
        self.fetch_one(data.draw(st.integers(0, len(self.to_fetch) - 1)))

    def fetch_one(self, index: int) -> None:
        name, rank = self.to_fetch.pop(index)
        self.write_kv(rank * STAGES // WORLD, name, 0, self.verified[name])
        self.scheduler.fetched(name, rank)

    @precondition(lambda self: self.to_release)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.to_release) - 1))
        self.release_one(*self.to_release.pop(index))

    def release_one(self, name: str, rank: int, attempt: int) -> None:
        # Until now it was delivered from these pages.
        stage = rank * STAGES // WORLD
        computed = self.computed[stage][name]
        self.check_kv(stage, name, computed[-1][1] if computed else self.opened[name].cached_tokens)
        over = self.scheduler.released(name, rank, attempt)
        for entry in over:
            self.append(entry)
        if over:
            self.alive.discard(name)

    @invariant()
    def bounded_and_balanced(self) -> None:
        self.scheduler.pool.check()
        assert self.scheduler.steps_in_flight <= STAGES * (1 + LOOK_AHEAD)
        assert self.scheduler.num_running <= 3

    def teardown(self) -> None:
        """Everything that was accepted ends, and nothing is left."""
        for _ in range(10_000):
            self.clock.now += 1.0
            self.plan()
            for stage in range(STAGES):
                self.apply(stage, 1000)
            while self.to_fetch:
                self.fetch_one(-1)
            while self.to_release:
                self.release_one(*self.to_release.pop())
            if not self.scheduler.num_running and not self.scheduler.num_queued and not any(self.logs):
                break
        assert (self.scheduler.num_running, self.scheduler.num_queued) == (0, 0)
        assert self.scheduler.steps_in_flight == 0
        self.scheduler.pool.check()
        self.scheduler.pool.check_idle()
        if not self.keep_prefixes:
            assert self.scheduler.pool.cached_pages == self.scheduler.hit_tokens == 0
        for name, size in self.sizes.items():
            if name not in self.cancelled:
                for computed in self.computed:
                    assert computed[name][-1][1] == size


class MachineWithoutPrefixes(Machine):
    keep_prefixes = False


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestScheduler = Machine.TestCase
MachineWithoutPrefixes.TestCase.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
TestSchedulerWithoutPrefixes = MachineWithoutPrefixes.TestCase


def steps_of(entries: list[Entry], stage: int = 0) -> list[list[tuple[str, int, int]]]:
    return [
        [(chunk.request_id, chunk.start, chunk.end) for chunk in entry.entry.chunks]
        for entry in entries
        if isinstance(entry.entry, worker_pb2.Step) and entry.stage == stage
    ]


def drain(scheduler: Scheduler, clock: Clock, seconds: float = 1.0) -> list[list[tuple[str, int, int]]]:
    """Steps of a one-stage scheduler, each done before the next is asked for."""
    steps = []
    sequence = 0
    while new := steps_of(scheduler.plan()):
        steps += new
        for _ in new:
            clock.now += seconds
            scheduler.step_done(0, sequence)
            sequence += 1
    return steps


def test_the_least_work_left_goes_first_and_prompts_that_end_share_a_step() -> None:
    clock = Clock()
    scheduler = make(stages=1, clock=clock)
    scheduler.submit(request("long", 20))
    scheduler.submit(request("short", 3))
    scheduler.submit(request("brief", 4))
    assert drain(scheduler, clock)[:2] == [[("short", 0, 3), ("brief", 0, 4)], [("long", 0, 8)]]


def test_s12_a_long_prompt_delays_a_short_one_by_no_more_than_what_the_first_stage_has() -> None:
    """S12: one long prompt owns every chunk. Here a stage is given the chunk that it computes and one more."""
    scheduler = make()
    scheduler.submit(request("long", 40))
    assert steps_of(scheduler.plan()) == [[("long", 0, 8)], [("long", 8, 16)]]
    scheduler.submit(request("short", 3))
    assert steps_of(scheduler.plan()) == []
    scheduler.step_done(0, 0)
    assert steps_of(scheduler.plan()) == [[("short", 0, 3)]]


def test_waiting_counts_and_is_bounded() -> None:
    clock = Clock()
    scheduler = make(stages=1, clock=clock)
    scheduler.submit(request("long", 40))
    order = []
    for number in range(40):
        if scheduler.num_queued + scheduler.num_running < 3:
            scheduler.submit(request(f"s{number}", 8))
        for step in steps_of(scheduler.plan()):
            order += [(name, clock.now) for name, _, _ in step]
            clock.now += 1
            scheduler.step_done(0, len(order) - 1)
            for rank in range(WORLD):
                if step[0][0] != "long":
                    scheduler.released(step[0][0], rank, 0)
    served = [now for name, now in order if name == "long"]
    assert len(served) >= 2
    assert max(b - a for a, b in zip([0.0, *served], served, strict=False)) <= MAX_WAIT + 3


def test_a_higher_priority_goes_first() -> None:
    clock = Clock()
    scheduler = make(stages=1, clock=clock)
    scheduler.submit(request("short", 3))
    scheduler.submit(request("urgent", 20, priority=1))
    assert [step[0][0] for step in drain(scheduler, clock)] == ["urgent", "urgent", "urgent"]


def test_pages_are_kept_for_a_large_prompt_that_has_waited_too_long() -> None:
    clock = Clock()
    scheduler = make(stages=1, clock=clock)
    scheduler.submit(request("first", 8))
    scheduler.plan()
    scheduler.submit(request("large", PAGES * PAGE))
    scheduler.submit(request("small", 4))
    scheduler.plan()
    assert (scheduler.num_queued, scheduler.num_running) == (1, 2)
    clock.now = MAX_WAIT
    scheduler.submit(request("late", 4))
    scheduler.plan()
    assert (scheduler.num_queued, scheduler.num_running) == (2, 2)


def test_s11_a_cancel_takes_effect_on_every_stage_that_does_not_have_the_chunk() -> None:
    """S11: a cancelled prompt runs to its end."""
    scheduler = make()
    scheduler.submit(request("r", 40))
    scheduler.plan()
    scheduler.step_done(0, 0)
    assert steps_of(scheduler.plan()) == [[("r", 16, 24)]]
    gone, entries = scheduler.cancel("r")
    assert (gone, [entry.stage for entry in entries]) == (False, [None])
    # The third stage has had room for two steps all along; the third step is void for the later stages.
    given = []
    for sequence in (0, 1, 2):
        if sequence:
            scheduler.step_done(0, sequence)
        for stage in (1, 2):
            scheduler.step_done(stage, sequence)
            given += [entry for entry in scheduler.plan() if isinstance(entry.entry, worker_pb2.Step)]
    assert [(entry.stage, entry.entry.sequence) for entry in given] == [(1, 2), (2, 2)]
    assert all(chunk.void for entry in given for chunk in entry.entry.chunks)  # type: ignore[union-attr]
    assert scheduler.steps_in_flight == 0


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
