"""Layers over stages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_node.partition import partition

SECONDS = st.floats(0.1, 10)


def slowest(layer_seconds: list[float], boundaries: list[int], first: float, last: float) -> float:
    stages = [sum(layer_seconds[start:end]) for start, end in itertools.pairwise(boundaries)]
    stages[0] += first
    stages[-1] += last
    return max(stages)


@given(st.lists(SECONDS, min_size=1, max_size=9), st.integers(1, 9), st.floats(0, 20), st.floats(0, 20))
def test_no_split_has_a_faster_slowest_stage(
    layer_seconds: list[float], num_stages: int, first: float, last: float
) -> None:
    num_layers = len(layer_seconds)
    num_stages = min(num_stages, num_layers)
    found = partition(layer_seconds, num_stages, first=first, last=last)
    assert len(found) == num_stages + 1
    assert found[0] == 0
    assert found[-1] == num_layers
    assert all(start < end for start, end in itertools.pairwise(found))
    best = min(
        slowest(layer_seconds, [0, *inner, num_layers], first, last)
        for inner in itertools.combinations(range(1, num_layers), num_stages - 1)
    )
    assert slowest(layer_seconds, found, first, last) == pytest.approx(best)


def test_equal_layers_put_the_larger_share_last() -> None:
    assert partition([1.0] * 61, 4) == [0, 15, 30, 45, 61]
    assert partition([1.0] * 7, 3) == [0, 2, 4, 7]


def test_embedding_and_head_count() -> None:
    # A head as heavy as three layers takes three layers off the last stage.
    assert partition([1.0] * 15, 3, last=3.0) == [0, 6, 12, 15]
    assert partition([1.0] * 15, 3, first=3.0) == [0, 3, 9, 15]


def test_uneven_layers() -> None:
    assert partition([4.0, 1.0, 1.0, 1.0, 1.0], 2) == [0, 1, 5]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers cannot be spread over 3 stages"):
        partition([1.0, 1.0], 3)
