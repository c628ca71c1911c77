"""Slots have one owner each, whatever happens."""

from __future__ import annotations

import asyncio

import pytest

from headwater.errors import CapacityError, DeadlinePassed
from kv_transfer import memory
from kv_transfer.memory_engine import MemoryFabric
from kv_transfer.slots import SlotArena


def test_slots_are_given_in_order_of_asking_and_balance() -> None:
    async def run() -> None:
        arena = SlotArena(MemoryFabric().engine("a"), 3, 64)
        first = await arena.acquire("a", 2, 1)
        waiting = asyncio.ensure_future(arena.acquire("b", 2, 60))
        behind = asyncio.ensure_future(arena.acquire("c", 1, 60))
        await asyncio.sleep(0)
        # "c" would fit, but "b" asked first.
        assert not waiting.done()
        assert not behind.done()
        arena.release("a", first[:1])
        assert len(await waiting) == 2
        arena.release("a")
        assert len(await behind) == 1
        assert (arena.free, arena.held, arena.quarantined) == (0, 3, 0)
        arena.quarantine("b")
        arena.release("c")
        assert (arena.free, arena.held, arena.quarantined) == (1, 0, 2)
        arena.check()
        with pytest.raises(CapacityError, match="4 transfer slots were asked for and there are 3"):
            await arena.acquire("d", 4, 1)
        arena.close()

    asyncio.run(run())


def test_a_quarantined_slot_comes_back_with_other_memory() -> None:
    async def run() -> None:
        engine = MemoryFabric().engine("a")
        arena = SlotArena(engine, 2, 4096)
        (slot,) = await arena.acquire("lost", 1, 1)
        old = arena.address(slot)
        memory.view(old, 4096)[:] = b"x" * 4096
        quarantined = arena.quarantine("lost")
        assert quarantined == {slot}
        waiting = asyncio.ensure_future(arena.acquire("next", 2, 60))
        await arena.replace(quarantined)
        assert slot in await waiting
        assert arena.address(slot) != old
        assert not engine.registered(old, 1)
        # A late write there does no harm: the addresses are nobody's, and their memory was given back.
        assert bytes(memory.view(old, 4096)) == bytes(4096)
        assert (arena.quarantined, arena.retired) == (0, 1)
        arena.release("next")
        arena.check()
        for _ in range(50):
            (slot,) = await arena.acquire("lost", 1, 1)
            await arena.replace(arena.quarantine("lost"))
            assert arena.address(slot) != old
        arena.close()

    asyncio.run(run())


def test_a_cancelled_or_late_asker_leaves_nothing_behind() -> None:
    async def run() -> None:
        arena = SlotArena(MemoryFabric().engine("a"), 2, 64)
        await arena.acquire("a", 2, 1)
        cancelled = asyncio.ensure_future(arena.acquire("b", 1, 60))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(DeadlinePassed, match="2 are held"):
            await arena.acquire("c", 1, 0.001)
        arena.release("a")
        assert (arena.free, arena.held) == (2, 0)
        arena.check()
        arena.close()

    asyncio.run(run())


def test_giving_back_what_is_not_owned_is_refused() -> None:
    async def run() -> None:
        arena = SlotArena(MemoryFabric().engine("a"), 2, 64)
        slots = await arena.acquire("a", 1, 1)
        with pytest.raises(AssertionError, match="does not own"):
            arena.release("b", slots)
        arena.check()
        arena.close()

    asyncio.run(run())
