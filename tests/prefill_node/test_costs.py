"""The cost of a step: its fit, what it learns while serving, and what it does not."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_node.costs import GroupCost, LearnedCost, OnlineCost, StageCost, assumed_cost, fit, relative_error

TRUE = StageCost(0.02, 1e-8, 2e-5, 1.5e-10)
POINTS = [(prefix, count) for prefix in (0, 1000, 30_000, 200_000) for count in (512, 1024, 4096)]


def measured(cost: StageCost, noise: float = 0.0, seed: int = 0) -> list[tuple[list[tuple[int, int]], float]]:
    draw = random.Random(seed)
    return [([point], cost.seconds(*point) * (1 + draw.uniform(-noise, noise))) for point in POINTS]


def test_a_step_costs_its_base_once() -> None:
    assert TRUE.seconds(1000, 512) == pytest.approx(0.02 + 1e-5 + 512 * 2e-5 + 1.5e-10 * (2 * 1000 * 512 + 512 * 512))
    both = TRUE.seconds(0, 512) + TRUE.seconds(1000, 100) - TRUE.base
    assert TRUE.step_seconds([(0, 512), (1000, 100)]) == pytest.approx(both)


@given(
    st.builds(StageCost, st.floats(1e-3, 1), st.floats(0, 1e-6), st.floats(1e-7, 1e-3), st.floats(0, 1e-8)),
)
@settings(max_examples=50, deadline=None)
def test_the_fit_finds_what_made_the_samples(cost: StageCost) -> None:
    assert relative_error(fit(measured(cost)), measured(cost)) < 1e-6


def test_the_fit_never_gives_negative_times() -> None:
    odd = [([(0, 100)], 1.0), ([(0, 200)], 0.5), ([(1000, 100)], 0.1)]
    found = fit(odd)
    assert min(found.base, found.per_prefix_token, found.per_token, found.per_pair) >= 0
    with pytest.raises(ValueError, match="no samples"):
        fit([])


def test_serving_refines_the_cost_and_an_outlier_does_not() -> None:
    online = OnlineCost(measured(TRUE))
    slower = TRUE.scaled(1.3)
    for number in range(300):
        prefix, count = POINTS[number % len(POINTS)]
        # One step in twenty was disturbed by something else.
        factor = 8.0 if number % 20 == 7 else 1.0
        online.add([(prefix, count)], slower.seconds(prefix, count) * factor)
    assert online.cost is not None
    assert relative_error(online.cost, measured(slower)) < 0.02
    assert online.error == pytest.approx(0.0, abs=0.02)


def test_a_group_is_as_slow_as_its_slowest_stage_and_its_makespan_is_that_of_a_flow_shop() -> None:
    slow = TRUE.scaled(2.0)
    cost = GroupCost((TRUE, slow, TRUE))
    assert cost.seconds(1000, 512) == slow.seconds(1000, 512)
    # One chunk passes all stages; of two, the second waits for the slow stage.
    one, two = TRUE.seconds(0, 512), TRUE.seconds(512, 512)
    assert cost.makespan(0, [512]) == pytest.approx(4 * one)
    assert cost.makespan(0, [512, 1024]) == pytest.approx(one + 2 * one + 2 * two + two)
    same = GroupCost((TRUE,) * 4)
    ends = (512, 2048, 4096)
    times = [TRUE.seconds(start, end - start) for start, end in itertools.pairwise((0, *ends))]
    assert same.makespan(0, ends) == pytest.approx(sum(times) + 3 * max(times))


def test_a_group_is_measured_when_every_stage_is() -> None:
    learned = LearnedCost(2)
    assert learned.group == assumed_cost(2)
    learned.add(0, [(0, 512)], 0.1)
    assert not learned.measured
    learned.add(1, [(0, 512)], 0.2)
    assert learned.measured
    assert learned.seconds(0, 512) == pytest.approx(0.2)
    learned.learn([measured(TRUE), measured(TRUE.scaled(2.0))])
    assert learned.seconds(0, 512) == pytest.approx(TRUE.scaled(2.0).seconds(0, 512), rel=1e-6)
