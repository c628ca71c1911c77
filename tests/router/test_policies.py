"""Policies by table and by property."""

from __future__ import annotations

import collections
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies import Candidate
from router.policies.least_loaded import load
from router.policies.named import POLICIES

SECONDS = st.none() | st.floats(0, 100)
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        st.integers(0, 9),
        st.integers(0, 99),
        st.integers(-9, 99),
        SECONDS,
        SECONDS,
        st.integers(0, 99),
        st.floats(0, 100),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(candidates=CANDIDATES, turn=st.integers(0, 2**33))
def test_a_choice_is_one_of_the_candidates_and_the_same_every_time(
    name: str, candidates: list[Candidate], turn: int
) -> None:
    chosen = POLICIES[name](candidates, turn)
    assert 0 <= chosen < len(candidates)
    assert POLICIES[name](candidates, turn) == chosen


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"power_of_two"}))
def test_equals_take_turns(name: str) -> None:
    equals = [Candidate(1, 10, 5, 1.0, 2.0)] * 3
    assert [POLICIES[name](equals, turn) for turn in range(6)] == [0, 1, 2, 0, 1, 2]


@given(candidates=CANDIDATES, turn=st.integers(0, 2**33))
def test_nobody_is_less_loaded_than_the_least_loaded(candidates: list[Candidate], turn: int) -> None:
    chosen = POLICIES["least_loaded"](candidates, turn)
    assert load(candidates[chosen]) == min(load(candidate) for candidate in candidates)


def test_the_order_of_load_is_requests_then_tokens_ahead_then_room() -> None:
    choose = POLICIES["least_loaded"]
    assert choose([Candidate(2, 0, 99), Candidate(1, 50, 0)], 0) == 1
    assert choose([Candidate(1, 9, 99), Candidate(1, 8, 0)], 0) == 1
    assert choose([Candidate(1, 8, 10), Candidate(1, 8, 11)], 0) == 1


@given(candidates=CANDIDATES.filter(lambda them: len(them) > 1), turn=st.integers(0, 2**33))
def test_of_two_that_are_drawn_the_less_loaded_is_taken(candidates: list[Candidate], turn: int) -> None:
    place = POLICIES["power_of_two"](candidates, turn)
    loads = [load(candidate) for candidate in candidates]
    assert any(loads[place] <= other for other in loads[:place] + loads[place + 1 :])


def test_draws_reach_everybody_about_as_often() -> None:
    equals = [Candidate(1, 1, 1)] * 4
    drawn = collections.Counter(POLICIES["power_of_two"](equals, turn) for turn in range(4000))
    assert set(drawn) == {0, 1, 2, 3}
    assert min(drawn.values()) > 800


@given(candidates=CANDIDATES, turn=st.integers(0, 2**33))
def test_predicted_ttft_is_least_or_load_decides(candidates: list[Candidate], turn: int) -> None:
    chosen = POLICIES["predicted_ttft"](candidates, turn)
    known = [
        candidate.seconds_ahead + candidate.own_seconds
        for candidate in candidates
        if candidate.seconds_ahead is not None and candidate.own_seconds is not None
    ]
    if len(known) == len(candidates):
        assert known[chosen] == min(known)
    else:
        assert chosen == POLICIES["least_loaded"](candidates, turn)


@given(candidates=CANDIDATES, turn=st.integers(0, 2**33))
def test_prefix_affinity_waits_for_a_prefix_no_longer_than_twice_what_it_saves(
    candidates: list[Candidate], turn: int
) -> None:
    chosen = candidates[POLICIES["prefix_affinity"](candidates, turn)]
    for other in candidates:
        if any(one.seconds_ahead is None or one.own_seconds is None for one in candidates):
            assert chosen.tokens_ahead - other.tokens_ahead <= 2 * (chosen.cached_tokens - other.cached_tokens)
        else:
            assert chosen.seconds_ahead is not None
            assert chosen.own_seconds is not None
            assert other.seconds_ahead is not None
            assert other.own_seconds is not None
            ahead = (chosen.seconds_ahead + chosen.own_seconds) - (other.seconds_ahead + other.own_seconds)
            assert ahead <= chosen.saved_seconds - other.saved_seconds + 1e-9


def idle_or_busy(seconds_ahead: float, saved: float = 0.0) -> Candidate:
    """A group where this prompt takes ten seconds, less what is cached."""
    return Candidate(0, int(100 * seconds_ahead), 0, seconds_ahead, 10 - saved, int(100 * saved), saved)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        # The longest prefix of groups that are equally busy, also where all are.
        ([idle_or_busy(0), idle_or_busy(0, 2), idle_or_busy(0, 3)], 2),
        ([idle_or_busy(7), idle_or_busy(7, 2), idle_or_busy(7, 1)], 1),
        # Three seconds are saved for this prompt and for those after it.
        ([idle_or_busy(0), idle_or_busy(5.9, 3)], 1),
        ([idle_or_busy(0), idle_or_busy(6.1, 3)], 0),
        # A shorter prefix and a shorter queue.
        ([idle_or_busy(0, 2), idle_or_busy(5, 4)], 0),
        ([idle_or_busy(0, 2), idle_or_busy(3, 4)], 1),
        # Without a prefix, the least busy.
        ([idle_or_busy(2), idle_or_busy(1)], 1),
    ],
)
def test_prefix_affinity_by_table_with_costs_and_by_tokens_without(candidates: list[Candidate], chosen: int) -> None:
    choose = POLICIES["prefix_affinity"]
    assert choose(candidates, 0) == chosen
    assert choose([dataclasses.replace(one, seconds_ahead=None, own_seconds=None) for one in candidates], 0) == chosen


def test_predicted_ttft_counts_once_what_is_cached() -> None:
    choose = POLICIES["predicted_ttft"]
    assert choose([idle_or_busy(0), idle_or_busy(2.9, 3)], 0) == 1
    assert choose([idle_or_busy(0), idle_or_busy(3.1, 3)], 0) == 0
