"""The prefill side of transfers: one rank's share of one request's KV, chunk by chunk.

A chunk that has been computed is cut into boxes that fit a landing slot; each box is packed, written by the
transfer engine, and then receipted over `TransferService`. Bytes and statements about them take different
paths, and a receipt is sent only after its write returned.

A transfer that fails or is aborted starts no new write, waits for the one under way, and then says whether
all its writes are known to be over (it quiesced) or not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from headwater.errors import DeadlinePassed, HeadwaterError, TransferFailed, from_rpc_error, from_status
from headwater.lifecycle import Event, get_logger
from headwater.rpc import open_channel
from headwater.v1 import common_pb2, transfer_pb2, transfer_pb2_grpc
from kv_transfer import memory, metrics
from kv_transfer.engine import TransferEngine, WriteFailed
from kv_transfer.geometry import Box, PagedLayout, Span
from kv_transfer.planner import packed_bytes, plan, split
from kv_transfer.session import SenderEvent, sender_session
from kv_transfer.slots import SlotArena

log = get_logger(__name__)

# One packed box at most: large enough that TCP runs at full speed (it does from about 1 MiB).
SEGMENT_BYTES = 4 * 1024 * 1024

T = TypeVar("T")


class Source(Protocol):
    """Where a rank keeps its KV."""

    @property
    def layout(self) -> PagedLayout:
        """The shape of it."""

    def pack(self, pages: Sequence[int], box: Box, address: int) -> None:
        """Puts the packed `box` (form: `kv_transfer.planner`) at `address`. Called from worker threads."""


@dataclasses.dataclass(frozen=True)
class PagedSource:
    """Host memory in the form of a `PagedLayout`."""

    layout: PagedLayout
    address: int

    def pack(self, pages: Sequence[int], box: Box, address: int) -> None:
        memory.pack(plan(self.layout, pages, box), self.address, address)


@dataclasses.dataclass(frozen=True)
class Sent:
    """What a transfer of one rank came to."""

    num_bytes: int
    num_receipts: int
    # None when everything was delivered.
    error: HeadwaterError | None
    # False when a write failed, and may therefore still land.
    quiesced: bool


class Outgoing:
    """One rank's share of one transfer. All methods belong to the sender's event loop."""

    def __init__(
        self,
        sender: Sender,
        grant: common_pb2.Grant,
        pages: Sequence[int],
        on_failure: Callable[[HeadwaterError], None],
        request_id: str,
    ) -> None:
        self._sender = sender
        self._grant = grant
        self._pages = pages
        self._on_failure = on_failure
        self._log = log.bind(request=request_id, transfer=grant.transfer_id, attempt=grant.attempt)
        self._session = sender_session(grant.transfer_id)
        self._spans: asyncio.Queue[Span | None] = asyncio.Queue()
        self._slots: asyncio.Queue[int] = asyncio.Queue()
        self._addresses: dict[int, int] = {}
        self._granted = asyncio.Event()
        self._first_token: int | None = None
        self._write_failed = False
        self._closing = asyncio.Event()
        # Set when this side, or the receiver (with a reason), ends the transfer early.
        self._aborted = asyncio.Event()
        self._refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._num_bytes = 0
        self._num_receipts = 0
        self._peer = f"decode node at {grant.transfer_address}"
        self._task = asyncio.ensure_future(self._run())

    def send(self, tokens: Span) -> None:
        """The KV of `tokens` is in the pages."""
        self._spans.put_nowait(tokens)

    def finish(self, first_token: int | None) -> None:
        """No more chunks come. `first_token` is given by the rank that sampled."""
        self._first_token = first_token
        self._spans.put_nowait(None)
        self._closing.set()

    def abort(self) -> None:
        """Drops what has not been written."""
        self._aborted.set()
        self._closing.set()

    async def ended(self) -> Sent:
        """Waits until `finish` or `abort` was called and nothing of the transfer is under way any more."""
        error = await asyncio.shield(self._task)
        await self._closing.wait()
        return Sent(self._num_bytes, self._num_receipts, error, not self._write_failed)

    async def _run(self) -> HeadwaterError | None:
        error: HeadwaterError | None
        try:
            async with open_channel(self._grant.transfer_address) as channel:
                error = await self._converse(transfer_pb2_grpc.TransferServiceStub(channel).Deliver())
        except grpc.RpcError as broken:
            error = from_rpc_error(broken, self._peer)
        except HeadwaterError as raised:
            error = raised
        if error is None:
            self._session.on(SenderEvent.DELIVERED)
        elif self._aborted.is_set():
            self._session.on(SenderEvent.ABORT)
        else:
            self._session.on(SenderEvent.FAIL)
            self._log.event(Event.FAILED, error=str(error))
            self._on_failure(error)
        metrics.TRANSFERS_SENT.labels(self._session.state.value).inc()
        return error

    async def _converse(self, call: Any) -> HeadwaterError | None:
        """The delivery, from open to closed. Returns why it is incomplete, or None."""
        opening = transfer_pb2.OpenDelivery(
            transfer_id=self._grant.transfer_id,
            attempt=self._grant.attempt,
            epoch=self._grant.epoch,
            token=self._grant.token,
            writer_epoch=self._sender.epoch,
            writer_rank=self._sender.rank,
        )
        await self._say(call, transfer_pb2.DeliverRequest(open=opening))
        # One reader for the whole call: gRPC cancels a call whose read is cancelled.
        reader = asyncio.ensure_future(self._read(call))
        try:
            error = await self._pump_or_stop(call, reader)
            close = transfer_pb2.CloseDelivery(
                complete=error is None,
                quiesced=not self._write_failed,
                first_token=self._first_token if error is None else None,
                error=str(error or ""),
            )
            try:
                await self._say(call, transfer_pb2.DeliverRequest(close=close))
                await call.done_writing()
                await self._within(reader, self._sender.reply_seconds, "deadlines.reply", "confirm the end")
            except grpc.RpcError as broken:
                error = error or from_rpc_error(broken, self._peer)
            except HeadwaterError as late:
                error = error or late
        finally:
            reader.cancel()
        return error

    async def _pump_or_stop(self, call: Any, reader: asyncio.Future[str]) -> HeadwaterError | None:
        """Pumps until all is delivered, or this side aborts, or the receiver ends the call. Returns why not all."""
        pump = asyncio.ensure_future(self._pump(call))
        aborted = asyncio.ensure_future(self._aborted.wait())
        try:
            waits: set[asyncio.Future[Any]] = {pump, aborted, self._refused, reader}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if aborted.done():
                return TransferFailed("the prefill request was aborted.")
            if self._refused.done():
                return TransferFailed(f"{self._peer} ended the transfer: {self._refused.result()}")
            if reader.done():
                broken = reader.exception()
                if isinstance(broken, grpc.RpcError):
                    return from_rpc_error(broken, self._peer)
                return TransferFailed(f"{self._peer} ended the transfer: {reader.result()}")
            try:
                pump.result()
            except grpc.RpcError as broken_write:
                return from_rpc_error(broken_write, self._peer)
            except HeadwaterError as error:
                return error
            return None
        finally:
            aborted.cancel()
            pump.cancel()
            # A write under way is waited for, never abandoned.
            await asyncio.wait({pump})

    async def _say(self, call: Any, message: transfer_pb2.DeliverRequest) -> None:
        try:
            # gRPC cancels a call whose write is cancelled.
            await _to_its_end(asyncio.ensure_future(call.write(message)))
        except asyncio.InvalidStateError:
            # The call is over already.
            status = await call.code(), await call.details(), await call.trailing_metadata()
            raise from_status(*status, self._peer) from None

    async def _read(self, call: Any) -> str:
        """What the receiver says, until it ends the call. Returns how it ended."""
        while (response := await call.read()) is not grpc.aio.EOF:
            if response.HasField("slots"):
                self._session.on(SenderEvent.OPENED)
                for slot in response.slots.slots:
                    self._addresses[slot.slot] = slot.address
                    self._slots.put_nowait(slot.slot)
                self._granted.set()
            elif response.HasField("ack"):
                self._slots.put_nowait(response.ack.slot)
            elif response.HasField("abort"):
                if not self._refused.done():
                    self._refused.set_result(response.abort.reason)
            elif response.HasField("closed"):
                return "closed"
        return await call.details() or "without a reason"

    async def _slot(self) -> int:
        return int(
            await self._within(
                self._slots.get(), self._sender.acknowledge_seconds, "deadlines.acknowledge", "free a landing slot"
            )
        )

    async def _pump(self, call: Any) -> None:
        """Sends every span, then waits until all slots are back, which means: all receipts acknowledged."""
        layout = self._sender.layout
        largest = min(self._grant.slot_bytes, SEGMENT_BYTES)
        await self._within(
            self._granted.wait(), self._sender.acknowledge_seconds, "deadlines.acknowledge", "give landing slots"
        )
        while (tokens := await self._spans.get()) is not None:
            for box in split(Box(layout.layers, layout.heads, tokens), layout.cell, largest):
                slot = await self._slot()
                digest = await self._sender.write(
                    self._grant, self._pages, box, self._addresses[slot], self._mark_failed
                )
                receipt = transfer_pb2.Receipt(
                    sequence=self._num_receipts,
                    slot=slot,
                    box=box.to_proto(),
                    num_bytes=packed_bytes(box, layout.cell),
                    digest=digest,
                )
                await self._say(call, transfer_pb2.DeliverRequest(receipt=receipt))
                self._num_receipts += 1
                self._num_bytes += receipt.num_bytes
                metrics.BYTES_SENT.inc(receipt.num_bytes)
                self._log.event(
                    Event.KV_WRITTEN,
                    layers=[box.layers.start, box.layers.end],
                    tokens=[box.tokens.start, box.tokens.end],
                    num_bytes=receipt.num_bytes,
                )
        self._session.on(SenderEvent.CLOSE)
        for _ in self._addresses:
            await self._slot()

    def _mark_failed(self) -> None:
        self._write_failed = True

    async def _within(self, work: Any, seconds: float, deadline: str, what: str) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            raise DeadlinePassed(f"{self._peer} did not {what} within {seconds:g} s ({deadline}).") from None


class Sender:
    """Sends from one rank's pool.

    Args:
        engine: already running.
        arena: send segments of `SEGMENT_BYTES`, registered with the engine.
        source: where this rank keeps its KV.
        rank, epoch: who writes, for the receiver's logs.
        reply_seconds, acknowledge_seconds: `Deadlines` of the cluster file.
    """

    def __init__(
        self,
        engine: TransferEngine,
        arena: SlotArena,
        source: Source,
        *,
        rank: int,
        epoch: str,
        reply_seconds: float,
        acknowledge_seconds: float,
    ) -> None:
        self.layout = source.layout
        self.rank = rank
        self.epoch = epoch
        self.reply_seconds = reply_seconds
        self.acknowledge_seconds = acknowledge_seconds
        self._engine = engine
        self._arena = arena
        self._source = source
        # One thread per segment: a slow peer occupies its own segments only.
        self._threads = ThreadPoolExecutor(max_workers=arena.num_slots, thread_name_prefix="kv-write")

    def open(
        self,
        grant: common_pb2.Grant,
        pages: Sequence[int],
        on_failure: Callable[[HeadwaterError], None],
        request_id: str = "",
    ) -> Outgoing:
        """Starts a transfer. `pages` must stay as they are until it has ended.

        Args:
            on_failure: called once, on the event loop, when the transfer fails by itself (not by `abort`).
        """
        return Outgoing(self, grant, pages, on_failure, request_id)

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    async def write(
        self, grant: common_pb2.Grant, pages: Sequence[int], box: Box, address: int, mark_failed: Callable[[], None]
    ) -> bytes:
        """Packs `box` and writes it to `address` of the grant's peer. Returns the digest of its bytes.

        Raises:
            WriteFailed: the write may still land; `mark_failed` has been called.
        """
        owner = object()
        (segment,) = await self._arena.acquire(owner, 1, self.acknowledge_seconds)
        num_bytes = packed_bytes(box, self.layout.cell)
        packed_at = self._arena.address(segment)

        def pack_and_write() -> bytes:
            started = time.perf_counter()
            self._source.pack(pages, box, packed_at)
            digest = memory.digest(packed_at, num_bytes)
            packed = time.perf_counter()
            metrics.PACK_SECONDS.observe(packed - started)
            self._engine.write(grant.engine_session, packed_at, address, num_bytes)
            metrics.WRITE_SECONDS.observe(time.perf_counter() - packed)
            return digest

        writing = asyncio.get_running_loop().run_in_executor(self._threads, pack_and_write)
        try:
            # Bounded by the engine's own write deadline.
            return await _to_its_end(writing)
        except (WriteFailed, asyncio.CancelledError):
            if writing.exception() is not None:
                mark_failed()
            raise
        finally:
            # Even after a failed write: what may still be read from the segment would land in a slot that the
            # receiver has put into quarantine.
            self._arena.release(owner)


async def _to_its_end(work: asyncio.Future[T]) -> T:
    """Awaits `work`; when cancelled meanwhile, lets it end first."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
