"""Equal pieces of registered memory, each with one owner.

Landing slots on the receiver and send segments on the sender are both a `SlotArena`. A slot is free, held by
one owner, or quarantined: a write that nobody can vouch for may still land there, so it is not given out
again. free + held + quarantined = total.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Hashable

from headwater.errors import CapacityError, DeadlinePassed
from kv_transfer.engine import TransferEngine
from kv_transfer.memory import HostBuffer


class SlotArena:
    """`num_slots` slots of `slot_bytes` in one registered buffer. Used from one event loop only."""

    def __init__(self, engine: TransferEngine, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._buffer = HostBuffer(num_slots * slot_bytes)
        self._engine = engine
        engine.register(self._buffer.address, self._buffer.num_bytes)
        self._free = list(range(num_slots))
        self._held: dict[Hashable, set[int]] = {}
        self._quarantined: set[int] = set()
        self._waiting: collections.deque[tuple[int, Hashable, asyncio.Future[list[int]]]] = collections.deque()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return sum(len(slots) for slots in self._held.values())

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    def address(self, slot: int) -> int:
        return self._buffer.address + slot * self.slot_bytes

    def owns(self, owner: Hashable, slot: int) -> bool:
        return slot in self._held.get(owner, ())

    async def acquire(self, owner: Hashable, count: int, deadline_seconds: float) -> list[int]:
        """`count` slots for `owner`, in order of asking.

        Raises:
            CapacityError: the arena can never give that many.
            DeadlinePassed: nobody gave slots back in time.
        """
        if count > self.num_slots - self.quarantined:
            raise CapacityError(
                f"{count} transfer slots were asked for; of {self.num_slots}, {self.quarantined} are quarantined. "
                "Raise num_slots, or restart the node to clear the quarantine."
            )
        turn: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, owner, turn))
        self._serve()
        try:
            async with asyncio.timeout(deadline_seconds):
                return await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled():
                self.release(owner, turn.result())
            else:
                self._waiting = collections.deque(entry for entry in self._waiting if entry[2] is not turn)
                self._serve()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise DeadlinePassed(
                f"no transfer slots within {deadline_seconds:g} s (deadlines.acknowledge): {self.held} are held and "
                f"{self.quarantined} quarantined of {self.num_slots}. Raise num_slots or lower the load."
            ) from None

    def release(self, owner: Hashable, slots: list[int] | None = None) -> None:
        """Frees `slots` of `owner` (all of them when None): every write to them is known to be over."""
        self._free.extend(self._take(owner, slots))
        self._serve()

    def quarantine(self, owner: Hashable) -> None:
        """Takes the owner's slots out of use: a write may still land in them."""
        self._quarantined.update(self._take(owner, None))

    def check(self) -> None:
        """Raises AssertionError unless every slot has exactly one place."""
        places = [*self._free, *self._quarantined, *(slot for slots in self._held.values() for slot in slots)]
        if sorted(places) != list(range(self.num_slots)):
            raise AssertionError(f"slots do not balance: {sorted(places)} of {self.num_slots}")

    def close(self) -> None:
        self._engine.unregister(self._buffer.address)
        self._buffer.close()

    def _take(self, owner: Hashable, slots: list[int] | None) -> set[int]:
        held = self._held.get(owner, set())
        taken = set(held) if slots is None else set(slots)
        if not taken <= held:
            raise AssertionError(f"{owner} does not own slots {sorted(taken - held)}")
        held -= taken
        if not held:
            self._held.pop(owner, None)
        return taken

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= len(self._free):
            count, owner, turn = self._waiting.popleft()
            if turn.done():
                continue
            slots = [self._free.pop() for _ in range(count)]
            self._held.setdefault(owner, set()).update(slots)
            turn.set_result(slots)
