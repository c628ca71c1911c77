"""Transfers as a state machine under random faults, for Hypothesis.

Prefill and decode groups of different layouts, real senders, receivers and gRPC; the engine fails, hangs, drops,
duplicates and lands late; either side aborts; groups die and others take over; leases run out; slots and pages
are few. Whatever happens: every transfer has exactly one end on each side, everything balances, and no byte
that was committed differs from what was sent.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from headwater.errors import DuplicateTransfer, HeadwaterError
from headwater.v1 import common_pb2
from kv_transfer.geometry import Span
from kv_transfer.memory_engine import Faults, MemoryFabric
from kv_transfer.receiver import ReceiverOptions, join_grants
from kv_transfer.sender import Outgoing
from kv_transfer.session import ReceiverState
from tests.kv_transfer.world import DecodeGroup, PrefillGroup, Shape, Transfer, assert_landed, until

NUM_PAGES, PAGE, SLOT_BYTES = 14, 4, 1500
OPTIONS = ReceiverOptions(
    slots_per_writer=2,
    reply_seconds=20,
    acknowledge_seconds=20,
    stop_seconds=0.3,
    lease_seconds=1000,
    resume_seconds=1000,
)
SOURCES = [Shape(2, 1, PAGE), Shape(1, 2, PAGE), Shape(2, 8, PAGE, boundaries=(0, 1, 5))]
TARGETS = [Shape(1, 1, 7), Shape(2, 2, 3), Shape(1, 8, 4)]
PICK = st.integers(0, 5)
SIZES = st.sampled_from([1, 3, 4, 5, 11, 17, 24])
# A rule that would otherwise end everything before it begins.
RARELY = st.integers(0, 4).map(lambda number: number == 4)
FAULTS = {
    "none": Faults(),
    "slow": Faults(overtaken_by=8),
    "fail": Faults(fail=0.03),
    "late": Faults(late=0.05),
    "hang": Faults(hang=0.02),
    "drop": Faults(drop=0.02),
    "duplicate": Faults(duplicate=0.4),
    "refuse": Faults(refuse=0.03),
}


T = TypeVar("T")


def one_of(candidates: Sequence[T], pick: int) -> T:
    return candidates[pick % len(candidates)]


@dataclasses.dataclass
class Try:
    """One attempt of one transfer by one prefill group."""

    group: PrefillGroup
    outgoing: list[Outgoing]
    pages: list[int]
    # Tokens that have been sent.
    done: int
    finished: bool = False


@dataclasses.dataclass
class Run:
    """One transfer."""

    transfer: Transfer
    decode: DecodeGroup
    attempt: int = 1
    current: Try | None = None
    aborted: bool = False

    @property
    def name(self) -> str:
        return self.transfer.name

    @property
    def over(self) -> bool:
        return any(incoming.session.terminal for incoming in self.transfer.incoming)


class TransferMachine(RuleBasedStateMachine):
    """See the module."""

    # What has happened in all runs so far: shows that the machine gets anywhere.
    happened: ClassVar[collections.Counter[str]] = collections.Counter()

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.fabric = MemoryFabric()
        self.number = 0
        self.runs: list[Run] = []
        self.ending: list[asyncio.Task[None]] = []
        self.free: dict[int, list[int]] = {}
        self.prefill: list[PrefillGroup] = []
        self.decode: list[DecodeGroup] = []
        self.dead: list[PrefillGroup] = []

    def go(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def pause(self) -> None:
        """Lets everybody work for a moment."""
        self.go(asyncio.sleep(0.01))

    # What a rule draws never depends on how far the transfers are, which no seed decides; what it does may.

    @initialize(
        prefill=st.sampled_from(SOURCES),
        decode=st.sampled_from(TARGETS),
        name=st.sampled_from(sorted(FAULTS)),
        seed=st.integers(0, 1000),
        num_tokens=SIZES,
    )
    def there_is_something_to_do(self, prefill: Shape, decode: Shape, name: str, seed: int, num_tokens: int) -> None:
        self.weather(name, seed)
        self.prefill_starts(prefill)
        self.decode_starts(decode)
        self.submit(0, num_tokens)

    # --- groups come and go

    @rule(shape=st.sampled_from(SOURCES))
    def prefill_starts(self, shape: Shape) -> None:
        if len(self.prefill) == 2:
            return
        self.number += 1

        async def start() -> PrefillGroup:
            return PrefillGroup(
                self.fabric,
                shape,
                f"p{self.number}",
                num_pages=NUM_PAGES,
                write_seconds=0.1,
                segment_bytes=SLOT_BYTES,
            )

        group = self.go(start())
        self.prefill.append(group)
        self.free[id(group)] = list(range(NUM_PAGES))

    @rule(shape=st.sampled_from(TARGETS))
    def decode_starts(self, shape: Shape) -> None:
        if self.decode:
            return
        self.number += 1

        async def start() -> DecodeGroup:
            group = DecodeGroup(self.fabric, shape, f"d{self.number}", OPTIONS, num_slots=20, slot_bytes=SLOT_BYTES)
            await group.start()
            return group

        self.decode.append(self.go(start()))

    @rule(pick=PICK, chance=RARELY)
    def prefill_dies(self, pick: int, chance: bool) -> None:
        if chance and self.prefill:
            self.kill(one_of(self.prefill, pick))

    @rule(chance=RARELY)
    def decode_dies(self, chance: bool) -> None:
        """The process is gone: its streams break, and its grants are worth nothing."""
        if not chance or not self.decode:
            return
        group = self.decode.pop()
        lost = [run for run in self.runs if run.decode is group]
        for run in lost:
            self.end(run)

        async def die() -> None:
            for rank in group.ranks:
                self.fabric.remove(rank.engine.session)
                await rank.server.stop(0)

        self.go(die())
        self.go(self.settle(lost))
        self.runs = [run for run in self.runs if run not in lost]
        # Writes of its own that hang end with it.
        self.fabric.land_late()
        self.go(group.close())

    @rule(pick=PICK, shape=st.sampled_from(SOURCES))
    def prefill_dies_half_way_and_another_goes_on(self, pick: int, shape: Shape) -> None:
        candidates = [run for run in self.runs if run.current is not None and not run.current.finished]
        if not candidates:
            return
        run = one_of(candidates, pick)
        assert run.current is not None
        if run.current.done == 0:
            self.go(self.send(run, max(1, run.transfer.num_tokens // 2)))
        for _ in range(20):
            if min(incoming.coverage.prefix() for incoming in run.transfer.incoming) or run.over:
                break
            self.pause()
        self.kill(run.current.group)
        self.prefill_starts(shape)
        self.take_over_by(run, self.prefill[-1])

    # --- transfers

    @rule(pick=PICK, num_tokens=SIZES)
    def submit(self, pick: int, num_tokens: int) -> None:
        if not self.prefill or not self.decode or len(self.runs) == 3:
            return
        group = one_of(self.prefill, pick)
        pages = self.take(group, num_tokens)
        if pages is not None:
            self.number += 1
            run = self.go(self.expect(f"t{self.number}", num_tokens))
            self.go(self.open(run, group, run.transfer.grant, pages))
            self.runs.append(run)

    @rule(pick=PICK, count=st.integers(1, 9))
    def chunk_done(self, pick: int, count: int) -> None:
        if self.runs and (run := one_of(self.runs, pick)).current is not None:
            self.go(self.send(run, count))
            self.pause()

    @rule(pick=PICK)
    def rest(self, pick: int) -> None:
        self.chunk_done(pick, 1000)

    @rule(pick=PICK, side=st.sampled_from(["prefill", "decode"]), chance=RARELY)
    def abort(self, pick: int, side: str, chance: bool) -> None:
        if not chance or not self.runs:
            return
        run = one_of(self.runs, pick)
        run.aborted = True
        if side == "prefill" and run.current is not None:
            for one in run.current.outgoing:
                one.abort()
            run.current.finished = True
        elif side == "decode":
            self.end(run)
        self.pause()

    @rule(pick=PICK, chance=RARELY)
    def lease_runs_out(self, pick: int, chance: bool) -> None:
        if not chance or not self.runs:
            return

        async def reap() -> None:
            for incoming in one_of(self.runs, pick).transfer.incoming:
                incoming.reap(time.monotonic() + 900 + OPTIONS.lease_seconds)

        self.go(reap())
        self.pause()

    @rule(pick=PICK, other=PICK)
    def another_group_takes_over(self, pick: int, other: int) -> None:
        if self.runs and self.prefill:
            self.take_over_by(one_of(self.runs, pick), one_of(self.prefill, other))

    @rule(name=st.sampled_from(sorted(FAULTS)), seed=st.integers(0, 1000))
    def weather(self, name: str, seed: int) -> None:
        self.fabric.faults = FAULTS[name]
        self.fabric._random.seed(seed)

    @rule()
    def time_passes(self) -> None:
        """Long enough for a chunk to arrive; and what is over makes room."""
        self.go(asyncio.sleep(0.05))
        over = [run for run in self.runs if run.over]
        self.go(self.settle(over))
        self.runs = [run for run in self.runs if run not in over]

    @rule()
    def late_writes_land(self) -> None:
        self.fabric.land_late()
        self.pause()

    @rule(pick=PICK)
    def the_same_id_again(self, pick: int) -> None:
        if not self.runs:
            return
        run = one_of(self.runs, pick)

        async def again() -> None:
            # Only here: the transfer may end while the loop begins to run.
            if run.over:
                return
            with pytest.raises(DuplicateTransfer):
                run.decode.expect(run.name, run.transfer.num_tokens)

        self.go(again())

    # --- how

    def kill(self, group: PrefillGroup) -> None:
        """Its streams break, and its engine is gone; what is on its way may still land."""
        self.prefill.remove(group)
        self.dead.append(group)
        for run in self.runs:
            if run.current is not None and run.current.group is group:
                for one in run.current.outgoing:
                    for task in one._tasks:
                        task.cancel()
                run.current = None
        for rank in group.ranks:
            self.fabric.remove(rank.engine.session)
        self.pause()

    def take_over_by(self, run: Run, group: PrefillGroup) -> None:
        pages = self.take(group, run.transfer.num_tokens)
        if pages is not None:
            self.go(self.take_over(run, group, pages))

    def take(self, group: PrefillGroup, num_tokens: int) -> list[int] | None:
        """Pages of a group's pool, in no particular order; None when there are not enough."""
        free, count = self.free[id(group)], -(-num_tokens // PAGE)
        if count > len(free):
            return None
        taken, self.free[id(group)] = free[:count], free[count:]
        return taken[::-1]

    async def expect(self, name: str, num_tokens: int) -> Run:
        decode = self.decode[0]
        return Run(decode.expect(name, num_tokens), decode)

    async def open(self, run: Run, group: PrefillGroup, grant: common_pb2.Grant, pages: list[int]) -> None:
        run.current = Try(group, group.open(grant, pages), pages, grant.verified_tokens)

    async def send(self, run: Run, count: int) -> None:
        current, total = run.current, run.transfer.num_tokens
        assert current is not None
        if current.finished:
            return
        if current.done < total:
            end = min(current.done + count, total)
            current.group.compute(run.name, total, current.pages, range(current.done, end))
            for one in current.outgoing:
                one.send(Span(current.done, end))
            current.done = end
        if current.done == total:
            current.finished = True
            for one in current.outgoing:
                one.finish(7 if one is current.outgoing[-1] else None)

    async def take_over(self, run: Run, group: PrefillGroup, pages: list[int]) -> None:
        """The next attempt, by `group`, if the transfer still allows one."""
        old, run.current = run.current, None
        if old is not None:
            self.retire(old)
        try:
            verified = min(incoming.coverage.prefix() for incoming in run.transfer.incoming)
            attempt = run.attempt = run.attempt + 1
            grants = [await rank.receiver.regrant(run.name, attempt, at_most=verified) for rank in run.decode.ranks]
            grant = join_grants(grants)
            for rank in group.ranks:
                rank.scribble(pages)
                if grant.verified_tokens:
                    await rank.fetch(grant, pages)
        except HeadwaterError:
            # Over on some rank, or the fetch failed: nobody can deliver it any more.
            self.end(run)
            self.free[id(group)] += pages
            return
        self.happened["taken over"] += 1
        self.happened["taken over half way"] += grant.verified_tokens > 0
        await self.open(run, group, grant, pages)

    def retire(self, current: Try) -> None:
        """The attempt is over on the prefill side: waits for its writers, then somebody else gets the pages."""

        async def finish() -> None:
            for one in current.outgoing:
                one.abort()
                await one.ended()
            for rank in current.group.ranks:
                rank.scribble(current.pages)
            self.free[id(current.group)] += current.pages

        self.ending.append(self.loop.create_task(finish()))

    def end(self, run: Run) -> None:
        """The decode side no longer wants it."""
        run.aborted = True
        for incoming in run.transfer.incoming:
            self.ending.append(self.loop.create_task(incoming.abort("told to", 5)))

    async def settle(self, runs: list[Run]) -> None:
        """Waits for the end of these transfers and checks it."""
        for run in runs:
            if run.current is not None and not run.over and not run.aborted:
                await self.send(run, run.transfer.num_tokens)
        for run in runs:
            for incoming in run.transfer.incoming:
                if run.current is None or run.aborted:
                    await incoming.abort("nobody delivers it", 5)
            outcomes = await asyncio.gather(
                *(asyncio.wait_for(self.outcome(run, incoming), 30) for incoming in run.transfer.incoming)
            )
            if all(outcomes):
                assert_landed(run.transfer, "float32")
            if run.current is not None:
                self.retire(run.current)
                run.current = None
        await self.ends()

    async def ends(self) -> None:
        """Waits for what is ending."""
        ending, self.ending = set(self.ending), []
        while ending:
            done, ending = await asyncio.wait(ending, timeout=1)
            for task in done:
                task.result()
            if ending:
                # A write that hangs keeps its pages until it ends.
                self.fabric.land_late()

    async def outcome(self, run: Run, incoming: Any) -> bool:
        """Whether it was committed. An attempt that is lost is not taken over any more."""
        ending = asyncio.ensure_future(incoming.committed())
        while not ending.done():
            await asyncio.wait({ending}, timeout=0.05)
            if incoming.session.state is ReceiverState.SUSPENDED:
                incoming.reap(time.monotonic() + 10_000)
        assert incoming.session.terminal
        self.happened[incoming.session.state.value] += 1
        return ending.exception() is None

    def teardown(self) -> None:
        self.fabric.faults = Faults()
        self.fabric.land_late()

        async def finish() -> None:
            await self.settle(self.runs)
            self.fabric.land_late()
            for run in self.runs:
                if all(incoming.session.state is ReceiverState.COMMITTED for incoming in run.transfer.incoming):
                    assert_landed(run.transfer, "float32")
            for decode in self.decode:
                await decode.close()
                self.happened["fenced"] += sum(rank.arena.retired for rank in decode.ranks)
            for group in [*self.prefill, *self.dead]:
                for rank in group.ranks:
                    rank.writer.close()
                    if group in self.prefill:
                        await until(lambda rank=rank: rank.arena.held == 0)
                    rank.sender.close()
                    rank.arena.check()
            for group in self.prefill:
                assert sorted(self.free[id(group)]) == list(range(NUM_PAGES)), "pages do not balance"

        try:
            self.go(finish())
            self.happened["runs"] += 1
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.go(asyncio.sleep(0))
            self.loop.close()
