"""Chunk policies: their rules, and that the optimal one is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_node.chunking import alignment, dynamic, fixed, optimal, without_small_tail
from prefill_node.costs import GroupCost, StageCost

COEFFICIENTS = st.builds(StageCost, st.floats(0.01, 5), st.floats(0, 0.3), st.floats(0.001, 1), st.floats(0, 0.1))
COSTS = st.integers(1, 6).flatmap(
    lambda stages: st.lists(COEFFICIENTS, min_size=stages, max_size=stages).map(lambda found: GroupCost(tuple(found)))
)
# About a 7B model on one GPU.
STAGE = StageCost(0.02, 1e-8, 2e-5, 1.5e-10)


def spans(start: int, ends: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(itertools.pairwise((start, *ends)))


def objective(cost: GroupCost, start: int, ends: tuple[int, ...], waits: float) -> float:
    times = [cost.seconds(begin, end - begin) for begin, end in spans(start, ends)]
    return sum(times) + waits * max(times)


@given(
    COSTS, st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(5, 30), st.integers(0, 50), st.floats(0, 7)
)
@settings(max_examples=200, deadline=None)
def test_optimal_equals_brute_force(
    cost: GroupCost, steps: list[int], max_tokens: int, start: int, waits: float
) -> None:
    grid = list(itertools.accumulate([start, *steps]))
    found = optimal.best_cuts(grid, cost, max_tokens, waits)
    every = [
        objective(cost, start, (*inner, grid[-1]), waits)
        for size in range(len(grid) - 1)
        for inner in itertools.combinations(grid[1:-1], size)
        if all(end - begin <= max_tokens for begin, end in spans(start, (*inner, grid[-1])))
    ]
    assert set(found) <= set(grid)
    assert all(end - begin <= max_tokens for begin, end in spans(start, found))
    assert objective(cost, start, found, waits) == pytest.approx(min(every), rel=1e-9)


@given(COSTS, st.integers(1, 5000), st.integers(0, 2000), st.sampled_from([64, 100, 512, 4096]))
@settings(max_examples=60, deadline=None)
def test_every_policy_cuts_the_whole_range_into_bounded_chunks(
    cost: GroupCost, num_tokens: int, start: int, chunk_tokens: int
) -> None:
    align = alignment(16, chunk_tokens)
    end = start + num_tokens
    by_policy = {
        "fixed": fixed.cuts(start, end, chunk_tokens=chunk_tokens, align=align),
        "dynamic": dynamic.cuts(start, end, cost=cost, chunk_tokens=chunk_tokens, align=align),
        "optimal": optimal.cuts(start, end, cost=cost, chunk_tokens=chunk_tokens, align=align),
    }
    for ends in by_policy.values():
        assert ends[-1] == end
        assert all(0 < stop - begin <= chunk_tokens for begin, stop in spans(start, ends))
    latest = {name: cost.makespan(start, ends) for name, ends in by_policy.items()}
    assert latest["optimal"] <= min(latest.values()) * (1 + 1e-9)


@pytest.mark.parametrize("policy", ["fixed", "dynamic", "optimal"])
@pytest.mark.parametrize("num_tokens", [4097, 8192, 33_000, 131_072, 1_000_000])
def test_s13_no_tail_is_smaller_than_a_quarter_of_the_mean(policy: str, num_tokens: int) -> None:
    """S13: dynamic chunking leaves a 192-token tail."""
    cost, size, align = GroupCost((STAGE,) * 8), 4096, 64
    ends = {
        "fixed": lambda: fixed.cuts(0, num_tokens, chunk_tokens=size, align=align),
        "dynamic": lambda: dynamic.cuts(0, num_tokens, cost=cost, chunk_tokens=size, align=align),
        "optimal": lambda: optimal.cuts(0, num_tokens, cost=cost, chunk_tokens=size, align=align),
    }[policy]()
    sizes = [end - begin for begin, end in spans(0, ends)]
    assert 4 * sizes[-1] * len(sizes) >= num_tokens
    assert all(end % align == 0 for end in ends[:-1])


def test_small_tails_join_or_share() -> None:
    assert without_small_tail(0, [100, 200, 300, 310], 1, 110) == (100, 200, 310)
    assert without_small_tail(0, [100, 200, 300, 310], 10, 100) == (100, 200, 260, 310)
    assert without_small_tail(0, [100, 200, 300, 340], 1, 200) == (100, 200, 300, 340)
    assert without_small_tail(0, [7], 1, 200) == (7,)


def test_fixed_and_dynamic_follow_their_rules() -> None:
    assert fixed.cuts(0, 2000, chunk_tokens=512, align=64) == (512, 1024, 1536, 2000)
    cost = GroupCost((StageCost(0.0, 0.0, 0.0, 1e-9),))
    # With attention alone and no smoothing, chunk i of size C₀ ends at C₀·√i.
    ends = dynamic.cuts(0, 8192, cost=cost, chunk_tokens=4096, align=1, smoothing=1.0)
    assert ends[:3] == (4096, 4096 + 1696, 4096 + 1696 + 1301)
    assert dynamic.cuts(0, 8192, cost=cost, chunk_tokens=4096, align=1, smoothing=0.0) == (4096, 8192)
    # Not below a quarter of the first, but for the last.
    far = spans(0, dynamic.cuts(0, 1_000_000, cost=cost, chunk_tokens=4096, align=64, smoothing=1.0))
    assert {end - begin for begin, end in far[300:-1]} == {1024}


def test_optimal_gains_most_where_chunk_times_differ() -> None:
    cost = GroupCost((STAGE,) * 8)
    best = cost.makespan(0, optimal.cuts(0, 131_072, cost=cost, chunk_tokens=18_432, align=64))
    fixed_times = [
        cost.makespan(0, fixed.cuts(0, 131_072, chunk_tokens=size, align=64)) for size in range(1024, 18_432, 1024)
    ]
    assert best < 0.96 * min(fixed_times)
