"""Equal pieces of registered memory, each with one owner.

Landing slots on the receiver and send segments on the sender are both a `SlotArena`. A slot is free, held by
one owner, or quarantined: a write that nobody can vouch for may still land in it, or read from it.
free + held + quarantined = total.

A quarantined slot comes back only through `replace`: its memory is fenced, which ends every write that has
begun, and then retired: the slot goes on with new memory, and nobody is ever given the old addresses again.
So a writer that was stopped before it began, and begins after the fence, finds no memory that matters.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Hashable, Iterable

from headwater.errors import CapacityError, DeadlinePassed, HeadwaterError
from headwater.lifecycle import get_logger
from kv_transfer import metrics
from kv_transfer.engine import TransferEngine
from kv_transfer.memory import HostBuffer

log = get_logger(__name__)


class SlotArena:
    """`num_slots` slots of `slot_bytes`, each registered by itself. Used from one event loop only."""

    def __init__(self, engine: TransferEngine, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._engine = engine
        self._buffers = [self._registered() for _ in range(num_slots)]
        # How many slots' worth of addresses were given up.
        self.retired = 0
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
        return self._buffers[slot].address

    def owns(self, owner: Hashable, slot: int) -> bool:
        return slot in self._held.get(owner, ())

    async def acquire(self, owner: Hashable, count: int, deadline_seconds: float) -> list[int]:
        """`count` slots for `owner`, in order of asking.

        Raises:
            CapacityError: the arena can never give that many.
            DeadlinePassed: nobody gave slots back in time.
        """
        if count > self.num_slots:
            raise CapacityError(
                f"{count} transfer slots were asked for and there are {self.num_slots}: raise num_slots."
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

    def release(self, owner: Hashable, slots: Iterable[int] | None = None) -> None:
        """Frees `slots` of `owner` (all of them when None): every write to them is known to be over."""
        self._free.extend(self._take(owner, slots))
        self._serve()

    def quarantine(self, owner: Hashable) -> set[int]:
        """Takes the owner's slots out of use: a write may still land in them. Returns them, for `replace`."""
        taken = self._take(owner, None)
        self._quarantined.update(taken)
        return taken

    async def replace(self, slots: Iterable[int]) -> None:
        """Fences quarantined slots, gives them new memory and frees them."""
        for slot in sorted(slots):
            old = self._buffers[slot]
            try:
                await asyncio.to_thread(self._engine.fence, old.address)
                self._buffers[slot] = self._registered()
            except HeadwaterError:
                log.exception("a slot cannot be fenced or replaced and stays in quarantine", slot=slot)
                continue
            old.give_back_memory()
            old.retire()
            self.retired += 1
            metrics.SLOTS_FENCED.inc()
            self._quarantined.remove(slot)
            self._free.append(slot)
            self._serve()

    def check(self) -> None:
        """Raises AssertionError unless every slot has exactly one place."""
        places = [*self._free, *self._quarantined, *(slot for slots in self._held.values() for slot in slots)]
        if sorted(places) != list(range(self.num_slots)):
            raise AssertionError(f"slots do not balance: {sorted(places)} of {self.num_slots}")

    def close(self) -> None:
        """Memory is given back; addresses that a late writer may know are not."""
        for slot, buffer in enumerate(self._buffers):
            self._engine.unregister(buffer.address)
            if slot not in self._free:
                buffer.give_back_memory()
                buffer.retire()

    def _registered(self) -> HostBuffer:
        buffer = HostBuffer(self.slot_bytes)
        self._engine.register(buffer.address, buffer.num_bytes)
        return buffer

    def _take(self, owner: Hashable, slots: Iterable[int] | None) -> set[int]:
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
