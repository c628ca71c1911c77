"""Keeps requests away from a group that fails them, and finds out when it no longer does. Pure.

| state | after | becomes |
| --- | --- | --- |
| closed | so many faults in a row | open, for a first pause |
| open | its pause, and a request that is let through | half open |
| half open | a success | closed |
| half open | a fault | open, for twice the pause before |

Only the group's own faults count: it is gone, or silent beyond a deadline. That it is full, or was asked for something
impossible, says nothing against it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from headwater.errors import DeadlinePassed, HeadwaterError, PeerUnavailable

_FAULTS = 3
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0


class BreakerState(enum.StrEnum):
    """See the module's table."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Of one incarnation of one group.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._faults = 0
        self._pause = _FIRST_PAUSE_SECONDS
        self._until = 0.0
        self.state = BreakerState.CLOSED

    @property
    def admits(self) -> bool:
        """Whether the group may be given a request now. Half open, one is under way and none is let through."""
        if self.state is BreakerState.OPEN:
            return self._clock() >= self._until
        return self.state is BreakerState.CLOSED

    def begin(self) -> None:
        """A request is sent to the group."""
        if self.state is BreakerState.OPEN and self.admits:
            self.state = BreakerState.HALF_OPEN

    def succeeded(self) -> None:
        self._faults, self._pause, self.state = 0, _FIRST_PAUSE_SECONDS, BreakerState.CLOSED

    def failed(self, error: HeadwaterError) -> None:
        """A request ended with `error`, which the group raised or is."""
        if not isinstance(error, PeerUnavailable | DeadlinePassed):
            if self.state is BreakerState.HALF_OPEN:
                # It answers.
                self.succeeded()
            return
        self._faults += 1
        if self.state is BreakerState.HALF_OPEN:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        if self.state is BreakerState.HALF_OPEN or self._faults >= _FAULTS:
            self.state, self._until = BreakerState.OPEN, self._clock() + self._pause
