"""What is kept of prompts, for whom, and until when."""

from __future__ import annotations

import pytest

from headwater.errors import CapacityError
from headwater.tokens import pack
from headwater.v1 import common_pb2, worker_pb2
from prefill_node.pages import PagePool
from prefill_node.scheduler import Entry, Request, Scheduler
from tests.prefill_node.test_scheduler import CHUNK, PAGE, PAGES, STAGES, WORLD, make, steps_of


def pool_after(*prompts: list[int], num_pages: int = 10) -> PagePool:
    """A pool of pages of 4 tokens in which requests "0", "1", … have been computed, one after the other."""
    pool = PagePool(num_pages, 4, keep_prefixes=True)
    for number, prompt in enumerate(prompts):
        tokens = pack(prompt)
        pool.take(str(number), len(prompt), pool.find(tokens))
        pool.computed(str(number), tokens, len(prompt))
        pool.give_back(str(number))
        pool.check()
    return pool


ONE = list(range(100, 112))
OTHER = [*range(100, 108), *range(200, 204)]


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (ONE, 2),
        ([*ONE, 1], 3),
        (ONE[:9], 2),
        (ONE[:8], 1),
        (ONE[:4], 0),
        (ONE[:1], 0),
        ([*ONE[:7], 1, 1, 1, 1, 1], 1),
        ([1, *ONE], 0),
        # The second page's tokens after another first page.
        ([1, 1, 1, 1, *ONE[4:], 1], 0),
    ],
)
def test_whole_pages_are_found_as_long_as_all_before_are_equal_and_never_the_last_token(
    prompt: list[int], found: int
) -> None:
    assert pool_after(ONE).find(pack(prompt)) == [0, 1, 2][:found]


def test_a_page_is_not_known_before_all_of_it_is_computed() -> None:
    pool = PagePool(10, 4, keep_prefixes=True)
    tokens = pack([*ONE, 1])
    pool.take("a", 13)
    for num_tokens, found in ((3, 0), (4, 1), (7, 1), (12, 3), (13, 3)):
        pool.computed("a", tokens, num_tokens)
        assert len(pool.find(tokens)) == found
    pool.give_back("a")
    assert (pool.free_pages, pool.cached_pages) == (10, 3)
    pool.check()
    pool.check_idle()


def test_without_prefixes_nothing_is_kept() -> None:
    pool = PagePool(10, 4)
    pool.take("a", 12)
    pool.computed("a", pack(ONE), 12)
    pool.give_back("a")
    assert (pool.find(pack(ONE)), pool.cached_pages, pool.free_pages) == ([], 0, 10)


def test_shared_pages_come_first_and_the_rest_are_own() -> None:
    pool = pool_after(ONE)
    shared = pool.find(pack(OTHER))
    assert pool.take("a", 12, shared) == [0, 1, 3]
    # ONE's last page is kept for nobody in particular; the other two are held.
    assert (pool.free_pages, pool.cached_pages) == (7, 1)
    pool.check()
    pool.give_back("a")
    assert (pool.free_pages, pool.cached_pages) == (10, 3)


def test_what_was_unused_longest_is_emptied_first_and_from_its_end() -> None:
    pool = pool_after(ONE, OTHER)
    # ONE and OTHER share two pages, and OTHER was last: of ONE only the third page is older.
    assert (pool.free_pages, pool.cached_pages) == (10, 4)
    pool.take("a", 7 * 4)
    assert [len(pool.find(pack([*prompt, 1]))) for prompt in (ONE, OTHER)] == [2, 3]
    pool.take("b", 4)
    assert [len(pool.find(pack([*prompt, 1]))) for prompt in (ONE, OTHER)] == [2, 2]
    pool.take("c", 8)
    assert pool.find(pack(ONE)) == []
    assert (pool.free_pages, pool.cached_pages) == (0, 0)
    for owner in "abc":
        pool.give_back(owner)
    pool.check()


def test_pages_are_not_emptied_while_anybody_reads_them() -> None:
    pool = pool_after(ONE)
    pool.take("a", 12, pool.find(pack(OTHER)))
    pool.take("b", 12, pool.find(pack(OTHER)))
    with pytest.raises(CapacityError, match="7 pages were asked for and 6 of 10 are free"):
        pool.take("c", 28)
    pool.take("c", 24)
    pool.give_back("a")
    # Still b's.
    with pytest.raises(CapacityError, match="2 pages were asked for and 1 of 10 are free"):
        pool.take("d", 8)
    pool.give_back("b")
    pool.take("d", 16)
    assert pool.find(pack(ONE)) == []
    pool.check()


def test_pages_that_are_to_be_shared_are_not_free_for_the_rest() -> None:
    pool = pool_after(ONE, num_pages=4)
    tokens = pack([*ONE, *range(9)])
    shared = pool.find(tokens)
    # Three cached and one empty: room for four pages, but not for three shared and three more.
    assert not pool.fits(21, shared)
    with pytest.raises(CapacityError, match="3 pages were asked for and 1 of 4 are free"):
        pool.take("a", 21, shared)
    assert (pool.free_pages, pool.cached_pages, pool.find(tokens)) == (4, 3, shared)
    assert pool.take("a", 16, shared) == [0, 1, 2, 3]


def test_two_that_compute_the_same_at_once_end_with_one_copy() -> None:
    pool = PagePool(10, 4, keep_prefixes=True)
    short, long = pack(ONE[:8]), pack([*ONE, 1])
    assert pool.take("short", 8) == [0, 1]
    assert pool.take("long", 13) == [2, 3, 4, 5]
    pool.computed("short", short, 8)
    pool.computed("long", long, 13)
    # The third page follows two that are known by the other request's pages.
    assert pool.find(long) == [0, 1, 4]
    pool.give_back("short")
    assert (pool.free_pages, pool.cached_pages) == (4, 0)
    pool.check()
    with pytest.raises(CapacityError):
        pool.take("large", 20)
    pool.give_back("long")
    assert (pool.free_pages, pool.cached_pages) == (10, 3)
    pool.check()


# --- and the scheduler


PROMPT = list(range(20))


def asked(name: str, prompt: list[int], verified: int = 0) -> Request:
    grant = common_pb2.Grant(attempt=2, verified_tokens=verified) if verified else None
    return Request(name, pack(prompt), common_pb2.SamplingParams(), grant)


def opened(entries: list[Entry]) -> list[worker_pb2.OpenRequest]:
    return [entry.entry for entry in entries if isinstance(entry.entry, worker_pb2.OpenRequest)]


def run(scheduler: Scheduler, sequence: int = 0, *, num_stages: int = STAGES) -> int:
    """Has every stage compute whatever it is given. Returns the number of the next step."""
    while scheduler.plan() or scheduler.steps_in_flight:
        for stage in range(num_stages):
            scheduler.step_done(stage, sequence)
        sequence += 1
    return sequence


def release(scheduler: Scheduler, name: str, attempt: int = 0) -> None:
    for rank in range(WORLD):
        scheduler.released(name, rank, attempt)


def test_computing_starts_after_what_is_known_and_the_ranks_are_told() -> None:
    scheduler = make(keep_prefixes=True)
    scheduler.submit(asked("a", PROMPT))
    sequence = run(scheduler)
    release(scheduler, "a")
    scheduler.submit(asked("b", [*PROMPT[:14], 7, 7]))
    assert scheduler.backlog_tokens == 16 - 12
    assert scheduler.backlog_seconds == 16 - 12
    entries = scheduler.plan()
    (entry,) = opened(entries)
    assert (entry.cached_tokens, list(entry.pages)) == (12, [0, 1, 2, 5])
    assert steps_of(entries) == [[("b", 12, 16)]]
    assert (scheduler.query_tokens, scheduler.hit_tokens) == (20 + 16, 12)
    for stage in range(STAGES):
        scheduler.step_done(stage, sequence)
    release(scheduler, "b")
    scheduler.pool.check()
    scheduler.pool.check_idle()


def test_nothing_is_known_before_the_last_stage_has_computed_it() -> None:
    scheduler = make(keep_prefixes=True)
    scheduler.submit(asked("a", PROMPT))
    scheduler.plan()
    for stage in range(STAGES - 1):
        scheduler.step_done(stage, 0)
        scheduler.plan()
        assert scheduler.pool.find(pack(PROMPT)) == []
    scheduler.step_done(STAGES - 1, 0)
    # The request still runs; its first chunk can be shared already.
    assert len(scheduler.pool.find(pack(PROMPT))) == CHUNK // PAGE
    scheduler.submit(asked("b", PROMPT))
    assert [entry.cached_tokens for entry in opened(scheduler.plan())] == [CHUNK]


def test_of_a_cancelled_request_what_every_stage_has_computed_stays_known_and_no_more() -> None:
    scheduler = make(keep_prefixes=True)
    scheduler.submit(asked("a", PROMPT))
    scheduler.plan()
    for stage in range(STAGES):
        scheduler.step_done(stage, 0)
        scheduler.plan()
    # The first stage computes the second chunk, and it is void for the others.
    scheduler.step_done(0, 1)
    scheduler.cancel("a")
    scheduler.plan()
    for stage in range(1, STAGES):
        scheduler.step_done(stage, 1)
        scheduler.plan()
    release(scheduler, "a")
    assert len(scheduler.pool.find(pack(PROMPT))) == CHUNK // PAGE
    scheduler.pool.check()
    assert scheduler.pool.cached_pages == CHUNK // PAGE


def test_what_was_fetched_and_what_follows_it_is_not_shared() -> None:
    scheduler = make(keep_prefixes=True)
    scheduler.submit(asked("a", PROMPT, verified=8))
    (entry,) = opened(scheduler.plan())
    assert entry.cached_tokens == 0
    for rank in range(WORLD):
        scheduler.fetched("a", rank)
    run(scheduler)
    release(scheduler, "a", attempt=2)
    assert scheduler.pool.cached_pages == 0
    scheduler.pool.check_idle()


@pytest.mark.parametrize(("verified", "cached", "start"), [(4, 16, 16), (15, 16, 16), (16, 0, 16), (17, 0, 17)])
def test_nothing_is_fetched_where_more_is_known(verified: int, cached: int, start: int) -> None:
    scheduler = make(keep_prefixes=True)
    scheduler.submit(asked("a", PROMPT))
    run(scheduler)
    release(scheduler, "a")
    scheduler.submit(asked("b", PROMPT, verified))
    entries = scheduler.plan()
    (entry,) = opened(entries)
    assert entry.cached_tokens == cached
    assert scheduler.is_fetching("b") == (cached == 0)
    for rank in range(WORLD if cached == 0 else 0):
        scheduler.fetched("b", rank)
    assert steps_of([*entries, *scheduler.plan()]) == [[("b", start, 20)]]


def test_whoever_is_next_need_not_wait_for_pages_that_it_shares() -> None:
    scheduler = make(keep_prefixes=True)
    large = list(range(PAGE * (PAGES - 2)))
    scheduler.submit(asked("a", large))
    run(scheduler)
    # "a" is still being delivered: ten pages are held.
    for name in ("b", "c"):
        scheduler.submit(asked(name, [*large[:-1], 1000]))
    assert [(entry.request_id, entry.cached_tokens) for entry in opened(scheduler.plan())] == [("b", 36), ("c", 36)]
    scheduler.pool.check()
