"""Requests that no group can take now: a bounded queue, in the order of their coming.

Nobody polls. A place is looked at again when a group has news (`PairQueue.changed`): it serves again, is another
incarnation, has ended something, or its breaker lets requests through.

A request that waits holds up those behind it that want the same of the groups, so that a large one is not passed by
small ones for ever: one at a time is sent, and the next when the groups have it or it is back. Requests that want
something else (`Size.wants`) go past, and so does everybody where the one ahead must not use a group again.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from headwater.errors import CapacityError, HeadwaterError
from headwater.lifecycle import get_logger
from router import metrics
from router.pairing import Alone, Pair, Size, may_come
from router.snapshot import DecodeGroup, Loss, PrefillGroup, Snapshot

log = get_logger(__name__)


class Choose(Protocol):
    """Where a request goes; raises HeadwaterError when there is none."""

    def __call__(self, snapshot: Snapshot, size: Size, *, patient: bool) -> Pair | Alone: ...


class Place:
    """One request's way to a pair. Made by `PairQueue.place`."""

    def __init__(self, queue: PairQueue, number: int, size: Size, blocks: Sequence[int]) -> None:
        self._queue = queue
        # Places are served in the order of these.
        self.number = number
        self.size = size
        self.blocks = blocks
        # Why the last try did not work.
        self.failure: HeadwaterError | None = None
        # Groups that had no room, and the news that were known when they were asked.
        self.full: dict[str, int] = {}
        self.lost: dict[str, Loss] = {}
        # News known when the pair was chosen.
        self.asked_at = 0
        # Of the queue: takes the pair. Done: this request is being tried.
        self.turn: asyncio.Future[Pair | Alone] | None = None
        # When the queue gives up, on the loop's clock; None: the request has been nowhere, or was with groups since.
        self.until: float | None = None
        self.has_waited = False

    async def pair(self) -> Pair | Alone:
        """The groups to try next, as soon as there are some.

        Raises:
            CapacityError: too many wait already.
            HeadwaterError: no group that is known could ever take it, or none could within `deadlines.pair`.
        """
        return await self._queue.find(self)

    def refused(self, names: Iterable[str], error: CapacityError) -> None:
        """These groups have no room."""
        self.failure = error
        self._queue.start_clock(self)
        self.full |= dict.fromkeys(names, self.asked_at)

    def failed(self, losses: Mapping[str, Loss], error: HeadwaterError) -> None:
        """These incarnations of groups (by name) have failed the request and get it no more."""
        self.failure, self.until = error, None
        self.lost |= losses

    def taken(self) -> None:
        """The pair has the request; the next one may be tried."""
        self._queue.leave(self)


class PairQueue:
    """The queue of one router.

    Args:
        snapshot: for a prompt with these blocks (`router.prefixes`).
        most: places; 0: nobody waits.
        seconds: `deadlines.pair`.
    """

    def __init__(
        self, snapshot: Callable[[Sequence[int]], Snapshot], choose: Choose, most: int, seconds: float
    ) -> None:
        self._snapshot = snapshot
        self._choose = choose
        self._most = most
        self._seconds = seconds
        self._numbers = itertools.count()
        # By number.
        self._waiting: list[Place] = []
        # Counts the news of groups; the newest of each.
        self._news = 0
        self._news_of: dict[str, int] = {}
        self._looking = False

    def changed(self, name: str) -> None:
        """A group may be able to take what it could not before."""
        self._news += 1
        self._news_of[name] = self._news
        self._look_soon()

    @contextlib.contextmanager
    def place(self, size: Size, blocks: Sequence[int]) -> Iterator[Place]:
        """A request's place, which is given up when the context ends."""
        place = Place(self, next(self._numbers), size, blocks)
        try:
            yield place
        finally:
            self.leave(place)

    async def find(self, place: Place) -> Pair | Alone:
        """See `Place.pair`."""
        loop = asyncio.get_running_loop()
        if place.until is not None and loop.time() >= place.until:
            raise self._over(place, place.failure)
        reason: HeadwaterError | None = None
        try:
            pair = self._pair_for(place)
        except HeadwaterError as error:
            if not self._most:
                return self._last_choice(place)
            reason = place.failure or error
            if not self._may_come(place):
                raise reason from None
        else:
            if not self._anybody_before(place):
                return pair
        turn = self._join(place, reason)
        try:
            async with asyncio.timeout_at(place.until):
                return await turn
        except TimeoutError:
            self.leave(place)
            return self._last_choice(place)

    def leave(self, place: Place) -> None:
        """Gives up a place, if it has one."""
        place.turn = None
        if place in self._waiting:
            self._waiting.remove(place)
            metrics.WAITING.set(len(self._waiting))
            self._look_soon()

    def start_clock(self, place: Place) -> None:
        """The groups do not have the request."""
        if place.until is None:
            place.until = asyncio.get_running_loop().time() + self._seconds

    def _join(self, place: Place, reason: HeadwaterError | None) -> asyncio.Future[Pair | Alone]:
        if place not in self._waiting:
            if len(self._waiting) >= self._most and not place.has_waited:
                raise CapacityError(
                    f"{self._most} requests wait for groups that can take them (max_waiting). Try again later, or add "
                    f"groups.{f' What this one met: {reason}' if reason else ''}"
                )
            bisect.insort(self._waiting, place, key=lambda other: other.number)
            metrics.WAITING.set(len(self._waiting))
        if not place.has_waited:
            place.has_waited = True
            log.info("a request waits for groups", reason=str(reason or "others came before"))
        self.start_clock(place)
        turn = place.turn = asyncio.get_running_loop().create_future()
        self._look_soon()
        return turn

    def _look_soon(self) -> None:
        if self._waiting and not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Sends whoever can be sent: the first of each kind at most."""
        self._looking = False
        held_up: set[tuple[bool, bool]] = set()
        for place in self._waiting:
            kind = place.size.wants
            if kind in held_up:
                continue
            if place.turn is None or place.turn.done():
                # It is being tried.
                held_up.add(kind)
                continue
            try:
                place.turn.set_result(self._pair_for(place))
                held_up.add(kind)
            except HeadwaterError as error:
                if not self._may_come(place):
                    place.turn.set_exception(place.failure or error)
                elif not place.lost:
                    held_up.add(kind)

    def _anybody_before(self, place: Place) -> bool:
        return any(
            other.number < place.number and not other.lost and other.size.wants == place.size.wants
            for other in self._waiting
        )

    def _pair_for(self, place: Place, *, patient: bool = True) -> Pair | Alone:
        """The groups that may take the request now, as far as is known."""
        snapshot = self._snapshot(place.blocks)
        out = {name for name, asked_at in place.full.items() if self._news_of.get(name, 0) <= asked_at}
        if place.lost:
            out |= {group.name for group in snapshot.groups if _is_lost(group, place)}
        place.asked_at = self._news
        return self._choose(snapshot.without(out), place.size, patient=patient)

    def _last_choice(self, place: Place) -> Pair | Alone:
        """When waiting is over, a group that has failed lately is better than none."""
        try:
            return self._pair_for(place, patient=False)
        except HeadwaterError as error:
            raise self._over(place, place.failure or error) from None

    def _over(self, place: Place, reason: HeadwaterError | None) -> HeadwaterError:
        assert reason is not None
        if not place.has_waited:
            return reason
        waited = copy.copy(reason)
        waited.args = (f"{reason} (The request has waited for deadlines.pair = {self._seconds:g} s.)",)
        return waited

    def _may_come(self, place: Place) -> bool:
        snapshot = self._snapshot(place.blocks)
        # A group that failed the request, and was heard of since as the same incarnation and serves, stays out.
        out = {
            group.name
            for group in snapshot.groups
            if _is_lost(group, place) and group.serving and group.described_at > place.lost[group.name].at
        }
        return may_come(snapshot.without(out), place.size)


def _is_lost(group: PrefillGroup | DecodeGroup, place: Place) -> bool:
    """Whether this incarnation of the group has failed the request."""
    loss = place.lost.get(group.name)
    return loss is not None and (group.description is None or group.description.epoch == loss.epoch)
