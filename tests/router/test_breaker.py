"""The breaker's table, with a clock that stands still."""

from __future__ import annotations

import pytest

from headwater.errors import (
    CapacityError,
    DeadlinePassed,
    GeometryMismatch,
    HeadwaterError,
    InvalidRequest,
    PeerUnavailable,
    StalePeer,
    TransferFailed,
)
from router.breaker import Breaker, BreakerState
from router.flow import RetryBudget

GONE = PeerUnavailable("gone")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened() -> tuple[Breaker, Clock]:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(3):
        breaker.begin()
        breaker.failed(GONE)
    return breaker, clock


def test_three_faults_in_a_row_open_it() -> None:
    breaker = Breaker(Clock())
    for error in (GONE, DeadlinePassed("late")):
        breaker.failed(error)
    breaker.succeeded()
    for _ in range(2):
        breaker.failed(GONE)
        assert (breaker.state, breaker.admits) == (BreakerState.CLOSED, True)
    breaker.failed(GONE)
    assert (breaker.state, breaker.admits) == (BreakerState.OPEN, False)


@pytest.mark.parametrize(
    "error",
    [
        CapacityError("full"),
        InvalidRequest("bad"),
        GeometryMismatch("other"),
        StalePeer("old"),
        TransferFailed("which side?"),
    ],
)
def test_what_is_not_the_group_s_fault_does_not_count(error: HeadwaterError) -> None:
    breaker = Breaker(Clock())
    for _ in range(10):
        breaker.failed(error)
    assert breaker.state is BreakerState.CLOSED


def test_after_its_pause_one_request_is_let_through() -> None:
    breaker, clock = opened()
    clock.now += 0.9
    breaker.begin()
    assert (breaker.state, breaker.admits) == (BreakerState.OPEN, False)
    clock.now += 0.1
    assert breaker.admits
    breaker.begin()
    assert (breaker.state, breaker.admits) == (BreakerState.HALF_OPEN, False)
    breaker.succeeded()
    assert (breaker.state, breaker.admits) == (BreakerState.CLOSED, True)


def test_each_fault_of_a_request_that_was_let_through_doubles_the_pause_up_to_a_minute() -> None:
    breaker, clock = opened()
    pause = 1.0
    for _ in range(8):
        clock.now += pause
        breaker.begin()
        breaker.failed(GONE)
        pause = min(60.0, 2 * pause)
        clock.now += pause - 0.01
        assert not breaker.admits
        clock.now += 0.01
        assert breaker.admits
        clock.now -= pause
    assert pause == 60.0


def test_a_refusal_shows_that_the_group_is_back() -> None:
    breaker, clock = opened()
    clock.now += 1.0
    breaker.begin()
    breaker.failed(CapacityError("full"))
    assert breaker.state is BreakerState.CLOSED


def test_retries_are_ten_and_then_a_tenth_of_the_requests() -> None:
    budget = RetryBudget()
    assert [budget.spend() for _ in range(11)] == [True] * 10 + [False]
    spent = 0
    for _ in range(100):
        budget.earn()
        spent += budget.spend()
    assert spent in (9, 10)
