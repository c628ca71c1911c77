"""The writing half of a delivery, whichever way it goes: boxes are packed, written into the other side's landing
slots (or page to page), and stated in receipts.

Packing, writing and waiting for acknowledgements overlap as far as there are slots. Source memory is let go
only when the engine reads it no more.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

import numpy as np

from headwater.errors import DeadlinePassed, HeadwaterError, StalePeer, TransferFailed
from headwater.lifecycle import get_logger
from headwater.v1 import common_pb2, transfer_pb2
from kv_transfer import memory, metrics
from kv_transfer.engine import WriteFailed, WriteState
from kv_transfer.geometry import Box
from kv_transfer.landing import Region
from kv_transfer.memory import HostBuffer
from kv_transfer.planner import IN_PLACE_MIN_BYTES, Pieces, packed_bytes, pair, plan, split
from kv_transfer.slots import SlotArena
from kv_transfer.streams import to_its_end
from kv_transfer.wire import WireFormat
from kv_transfer.writer import Entry, Job, Writer

log = get_logger(__name__)

T = TypeVar("T")

# Boxes of a direct delivery that may be under way at a time.
_DIRECT_BOXES = 4
# By how much a lane may be late in saying that a write is late.
_LANE_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class PushTarget:
    """Where boxes go.

    Attributes:
        session, epoch: of the other side's transfer engine.
        key: what every receipt carries.
        slots: landing slots, number → address in the other process; empty for a direct delivery.
        direct: the other side's pages, to write to page to page.
        peer: for messages.
    """

    session: str
    epoch: str
    key: common_pb2.TransferKey
    slot_bytes: int
    slots: dict[int, int]
    digests: bool
    peer: str
    direct: Region | None = None


class Push:
    """One stream of boxes. Used from one event loop.

    Args:
        arena: send segments, registered with the writer's engine.
        pool: threads for packing.
        pack: puts a packed box of the local element type at an address; called from the pool.
        say: takes each receipt, in order of its sequence.
        sent: told of each box that the other side has acknowledged: the box, its bytes, and the seconds since it was
            begun.
        in_place: this side's pages, where the engine may read them; None: boxes are always packed.
    """

    def __init__(
        self,
        writer: Writer,
        arena: SlotArena,
        pool: Executor,
        pack: Callable[[Box, int], None],
        target: PushTarget,
        wire: WireFormat,
        *,
        say: Callable[[transfer_pb2.Receipt], None],
        acknowledge_seconds: float,
        in_place: Region | None = None,
        sent: Callable[[Box, int, float], None] | None = None,
    ) -> None:
        self.num_bytes = 0
        self.num_receipts = 0
        # In which any box was under way: from when it was begun until it was acknowledged.
        self.busy_seconds = 0.0
        self._busy_since = 0.0
        self._writer = writer
        self._arena = arena
        self._pool = pool
        self._pack = pack
        self._target = target
        self._wire = wire
        self._say = say
        self._sent = sent
        self._acknowledge_seconds = acknowledge_seconds
        self._in_place = in_place if not wire.converts else None
        self.reads_pages = False
        places = range(_DIRECT_BOXES) if self.direct else target.slots
        self._num_places = len(places)
        self._places = collections.deque(places)
        # Set when a place is freed, or something fails.
        self._changed = asyncio.Event()
        # By sequence: the place that a box holds, and what `sent` is told.
        self._unacknowledged: dict[int, tuple[int, Box, int, float]] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failed.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._tasks: set[asyncio.Task[None]] = set()
        # Of those, the ones whose write may be under way.
        self._writing: set[asyncio.Task[None]] = set()
        self._jobs: list[Job] = []
        self._unvouched = False

    @property
    def direct(self) -> bool:
        """Boxes are written page to page."""
        return self._target.direct is not None

    @property
    def quiesced(self) -> bool:
        """No write of this stream can still land. Ask after `stop`."""
        return not self._unvouched and not self._jobs

    async def push(self, box: Box) -> None:
        """Sends `box`; returns when its last piece has been begun.

        Raises:
            WriteFailed, PeerUnavailable, DeadlinePassed: of this box or an earlier one.
        """
        if self.direct:
            pieces = [box]
        else:
            limit = min(self._target.slot_bytes, self._arena.slot_bytes)
            room = self._wire.room(limit, len(box.layers), len(box.heads))
            pieces = split(box, self._wire.wire_cell, room)
        for piece in pieces:
            place = await self._place()
            if len(self._places) == self._num_places - 1:
                self._busy_since = time.monotonic()
            work = self._write_direct(piece, place) if self.direct else self._write_staged(piece, place)
            task = asyncio.ensure_future(work)
            self._tasks.add(task)
            task.add_done_callback(self._task_ended)

    def acknowledged(self, sequence: int) -> None:
        """The other side has put a box in place.

        Raises:
            StalePeer: it was not waiting for that.
        """
        outstanding = self._unacknowledged.pop(sequence, None)
        if outstanding is None:
            raise StalePeer(f"{self._target.peer} acknowledged receipt {sequence}, which is not outstanding.")
        place, box, num_bytes, began = outstanding
        now = time.monotonic()
        self._places.append(place)
        if len(self._places) == self._num_places:
            self.busy_seconds += now - self._busy_since
        self._changed.set()
        if self._sent is not None:
            self._sent(box, num_bytes, now - began)

    async def acknowledged_all(self) -> None:
        """Waits until every box has been acknowledged.

        Raises:
            As `push`.
        """
        while (free := len(self._places)) < self._num_places:
            await self._more_places(free)

    async def stop(self) -> None:
        """Begins nothing more and waits until nothing of this stream packs or writes, or is late at it."""
        for task in self._tasks - self._writing:
            task.cancel()
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def settled(self) -> None:
        """Waits until the engine reads none of this side's memory any more."""
        await asyncio.gather(*(asyncio.wrap_future(job.settled) for job in self._jobs))

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`, which may be cancelled, unless something of this stream fails first.

        Raises:
            WriteFailed, PeerUnavailable, DeadlinePassed: what has failed.
        """
        working = asyncio.ensure_future(work)
        waits: set[asyncio.Future[Any]] = {working, self._failed}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return working.result()
        finally:
            working.cancel()

    async def _place(self) -> int:
        """A slot that may be written to."""
        await self._more_places(0)
        return self._places.popleft()

    async def _more_places(self, free: int) -> None:
        """Waits until more than `free` slots are free."""
        try:
            async with asyncio.timeout(self._acknowledge_seconds):
                while len(self._places) <= free and not self._failed.done():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise DeadlinePassed(
                f"{self._target.peer} did not free a landing slot within {self._acknowledge_seconds:g} s "
                "(deadlines.acknowledge)."
            ) from None
        if self._failed.done():
            self._failed.result()

    async def _write_staged(self, box: Box, slot: int) -> None:
        """Into a landing slot: straight from the pages where they make long pieces, else packed first."""
        pieces = self._pieces(box)
        if pieces is not None:
            await self._write_in_place(box, slot, pieces, self._target.slots[slot], slot=slot)
            return
        began = time.monotonic()
        owner = object()
        (segment,) = await self._arena.acquire(owner, 1, self._acknowledge_seconds)
        at = self._arena.address(segment)
        job: Job | None = None
        try:
            digest = await self._in_pool(lambda: self._pack_and_digest(box, at))
            entry = Entry(at, self._target.slots[slot], self._wire.num_bytes(box))
            job = self._job([entry])
            await self._done(job, box)
        finally:
            self._release_when_settled(owner, job)
        self._receipt(box, slot, digest, slot=slot, began=began)

    async def _write_direct(self, box: Box, place: int) -> None:
        source, target = self._in_place, self._target.direct
        assert source is not None
        assert target is not None
        pieces = pair(source.layout, source.pages, target.layout, target.pages, box)
        await self._write_in_place(box, place, pieces, target.address, slot=None)

    async def _write_in_place(self, box: Box, place: int, pieces: Pieces, target: int, slot: int | None) -> None:
        """Pieces of this side's pages to `target` and the offsets from there that they name."""
        assert self._in_place is not None
        began = time.monotonic()
        source = self._in_place.address
        self.reads_pages = True
        entries = [
            Entry(source + here, target + there, length)
            for here, there, length in zip(
                pieces.source.tolist(), pieces.target.tolist(), pieces.length.tolist(), strict=True
            )
        ]
        job = self._job(entries)
        digest = b""
        try:
            if self._target.digests:
                digest = await self._in_pool(lambda: _digest(source, pieces))
            await self._done(job, box)
        finally:
            self._release_when_settled(None, job)
        self._receipt(box, place, digest, slot=slot, began=began)

    def _pieces(self, box: Box) -> Pieces | None:
        """Pieces of the pages that make the packed box, when they are long enough to be written one by one."""
        if self._in_place is None:
            return None
        copies = list(plan(self._in_place.layout, self._in_place.pages, box).copies())
        shortest = min(copy.length for copy in copies)
        if shortest < IN_PLACE_MIN_BYTES[self._writer.engine.transport]:
            return None
        return Pieces(
            *(
                np.array(offsets, dtype=np.int64)
                for offsets in zip(*((c.paged, c.packed, c.length) for c in copies), strict=True)
            )
        )

    def _pack_and_digest(self, box: Box, at: int) -> bytes:
        started = time.perf_counter()
        if self._wire.converts:
            scratch = HostBuffer(packed_bytes(box, self._wire.local_cell))
            self._pack(box, scratch.address)
            self._wire.encode(box, scratch.address, at)
        else:
            self._pack(box, at)
        digest = memory.digest(at, self._wire.num_bytes(box)) if self._target.digests else b""
        metrics.PACK_SECONDS.observe(time.perf_counter() - started)
        return digest

    async def _in_pool(self, work: Callable[[], bytes]) -> bytes:
        return await to_its_end(asyncio.get_running_loop().run_in_executor(self._pool, work))

    def _job(self, entries: list[Entry]) -> Job:
        task = asyncio.current_task()
        assert task is not None
        self._writing.add(task)
        job = self._writer.write(self._target.session, self._target.epoch, entries)
        self._jobs.append(job)
        return job

    async def _done(self, job: Job, box: Box) -> None:
        """Waits until all of a job has arrived."""
        result = asyncio.wrap_future(job.result)
        # The lane reports by the deadline, unless it is held up itself: by the peer's first answer, or by the engine.
        await asyncio.wait({result}, timeout=self._writer.write_seconds + _LANE_SECONDS)
        if not result.done():
            job.cancel()
            seconds = f"{self._writer.write_seconds:g} s (deadlines.write)"
            if job.result.cancelled():
                raise DeadlinePassed(f"{self._target.peer}: its transfer engine did not answer within {seconds}.")
            raise WriteFailed(f"a write of {box} to {self._target.peer} was not done within {seconds}.")
        written = result.result()
        if not written.done:
            late = written.states.count(WriteState.PENDING)
            failed = len(written.states) - late - written.states.count(WriteState.DONE)
            raise WriteFailed(
                f"{len(written.states)} writes of {box} to {self._target.peer}: {failed} failed and {late} were not "
                f"done within {self._writer.write_seconds:g} s (deadlines.write). Is it alive, and does the network "
                "let its ports through?"
            )

    def _release_when_settled(self, owner: object | None, job: Job | None) -> None:
        """Gives a segment back once nothing reads it; remembers writes that nobody can vouch for."""
        loop = asyncio.get_running_loop()

        def settle() -> None:
            if job is not None:
                self._jobs.remove(job)
                self._unvouched |= not job.settled.result()
            if owner is not None:
                self._arena.release(owner)

        if job is None or job.settled.done():
            settle()
        else:
            job.settled.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(settle))

    def _receipt(self, box: Box, place: int, digest: bytes, *, slot: int | None, began: float) -> None:
        receipt = transfer_pb2.Receipt(
            key=self._target.key,
            sequence=self.num_receipts,
            slot=slot,
            box=box.to_proto(),
            num_bytes=self._wire.num_bytes(box),
            digest=digest,
        )
        self._unacknowledged[receipt.sequence] = place, box, receipt.num_bytes, began
        self.num_receipts += 1
        self.num_bytes += receipt.num_bytes
        metrics.BYTES_SENT.inc(receipt.num_bytes)
        self._say(receipt)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._writing.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None or self._failed.done():
            return
        self._changed.set()
        if isinstance(error, HeadwaterError):
            self._failed.set_exception(error)
        else:
            log.error("packing failed", error=repr(error))
            self._failed.set_exception(TransferFailed(f"the KV could not be packed: {error}"))


def _digest(address: int, pieces: Pieces) -> bytes:
    state = memory.Digest()
    for offset, length in zip(pieces.source.tolist(), pieces.length.tolist(), strict=True):
        state.add(address + offset, length)
    return state.value()
