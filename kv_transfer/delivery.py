"""One prefill rank's share of one transfer, on its way to one decode rank.

A delivery is a conversation on one gRPC stream: open, receipts, close; slots, acknowledgements, closed. Either
side ends it at any time, and the end is told once.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
import numpy as np
from opentelemetry import trace

from headwater import tracing
from headwater.errors import DeadlinePassed, HeadwaterError, StalePeer, TransferFailed, from_rpc_error
from headwater.lifecycle import Event, Logger
from headwater.rpc import open_channel
from headwater.v1 import common_pb2, transfer_pb2, transfer_pb2_grpc
from kv_transfer import metrics
from kv_transfer.geometry import Box, PagedLayout, Span
from kv_transfer.landing import Region
from kv_transfer.pushing import Push, PushTarget
from kv_transfer.session import SenderEvent, sender_session
from kv_transfer.streams import end_of_saying, say
from kv_transfer.wire import WireFormat

if TYPE_CHECKING:
    from kv_transfer.sender import Sender

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Delivered:
    """What a delivery came to."""

    num_bytes: int
    num_receipts: int
    # None when everything was delivered.
    error: HeadwaterError | None
    # False when a write may still land.
    quiesced: bool


class Delivery:
    """All methods belong to the sender's event loop.

    Args:
        part: layers and heads that this rank sends to this target; None: nothing but the first token.
        pages: the request's page table; must stay as it is until `run` has returned.
        on_failure: called when the delivery fails by itself (not by `abort`).
        on_sent: as `sent` of `Push`.
    """

    def __init__(
        self,
        sender: Sender,
        grant: common_pb2.Grant,
        target: common_pb2.GrantTarget,
        part: tuple[Span, Span] | None,
        pages: list[int],
        log: Logger,
        on_failure: Callable[[HeadwaterError], None],
        on_sent: Callable[[Box, int, float], None] | None,
    ) -> None:
        self._sender = sender
        self._on_failure = on_failure
        self._on_sent = on_sent
        self._grant = grant
        self._target = target
        self._part = part
        self._pages = np.array(pages, dtype=np.int64)
        self._log = log
        self._key = common_pb2.TransferKey(transfer_id=grant.transfer_id, attempt=grant.attempt, epoch=target.epoch)
        self._session = sender_session(grant.transfer_id)
        self._wire = WireFormat.of(sender.geometry, grant.wire_dtype)
        self._spans: asyncio.Queue[Span | None] = asyncio.Queue()
        # What is to be said on the stream, in order.
        self._messages: asyncio.Queue[transfer_pb2.DeliverRequest | None] = asyncio.Queue()
        self._slots: asyncio.Future[dict[int, int]] = asyncio.get_running_loop().create_future()
        self._push: Push | None = None
        self._first_token: int | None = None
        # Set when this side, or the receiver (with a reason), ends the delivery early.
        self._aborted = asyncio.Event()
        self._refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._peer = f"decode node at {target.transfer_address}"

    def send(self, tokens: Span) -> None:
        """The KV of `tokens` is in the pages."""
        self._spans.put_nowait(tokens)

    def finish(self, first_token: int | None) -> None:
        """No more chunks come. `first_token` is given by the rank that sampled."""
        self._first_token = first_token
        self._spans.put_nowait(None)

    def abort(self) -> None:
        """Drops what has not been written."""
        self._aborted.set()

    async def run(self) -> Delivered:
        """From open to closed, and until nothing reads this rank's pages for it any more, which may be later."""
        attributes = tracing.rpc("TransferService/Deliver") | {
            "server.address": self._target.transfer_address,
            "headwater.transfer.id": self._key.transfer_id,
            "headwater.attempt": self._key.attempt,
            "headwater.rank": self._sender.rank,
        }
        with tracing.span("deliver", attributes, kind=trace.SpanKind.CLIENT) as span:
            delivered = await self._deliver(span)
            span.set_attribute("headwater.bytes", delivered.num_bytes)
            span.set_attribute("headwater.boxes", delivered.num_receipts)
            span.set_attribute("headwater.state", self._session.state.value)
            return delivered

    async def _deliver(self, span: trace.Span) -> Delivered:
        error: HeadwaterError | None
        try:
            async with open_channel(self._target.transfer_address) as channel:
                stub = transfer_pb2_grpc.TransferServiceStub(channel)
                error = await self._converse(stub.Deliver(metadata=tracing.metadata(span)))
        except grpc.RpcError as broken:
            error = from_rpc_error(broken, self._peer)
        except HeadwaterError as raised:
            error = raised
        if error is None:
            self._session.on(SenderEvent.DELIVERED)
        elif self._aborted.is_set():
            self._session.on(SenderEvent.ABORT)
            tracing.cancelled(span)
        else:
            self._session.on(SenderEvent.FAIL)
            tracing.failed(span, error)
            self._log.event(Event.FAILED, error=str(error))
            self._on_failure(error)
        metrics.DELIVERIES.labels(self._session.state.value).inc()
        push = self._push
        if error is None and push is not None and push.num_bytes:
            metrics.DELIVERY_SECONDS.observe(push.busy_seconds)
            metrics.DELIVERY_RATE.observe(push.num_bytes / push.busy_seconds)
        if push is None:
            return Delivered(0, 0, error, quiesced=True)
        quiesced = push.quiesced
        if push.reads_pages:
            # The engine reads this rank's pages themselves.
            await push.settled()
        return Delivered(push.num_bytes, push.num_receipts, error, quiesced)

    async def _converse(self, call: Any) -> HeadwaterError | None:
        """The delivery, from open to closed. Returns why it is incomplete, or None."""
        direct = self._goes_directly()
        opening = transfer_pb2.OpenDelivery(
            key=self._key,
            token=self._target.token,
            writer_epoch=self._sender.epoch,
            writer_rank=self._sender.rank,
            direct=direct,
        )
        await say(call, transfer_pb2.DeliverRequest(open=opening), self._peer)
        # One reader for the whole call: gRPC cancels a call whose read is cancelled.
        reader = asyncio.ensure_future(self._read(call))
        speaker = asyncio.ensure_future(self._speak(call))
        try:
            error = await self._pump_or_stop(reader, speaker, direct=direct)
            close = transfer_pb2.CloseDelivery(
                key=self._key,
                complete=error is None,
                quiesced=self._push is None or self._push.quiesced,
                first_token=self._first_token if error is None else None,
                error=str(error or ""),
            )
            try:
                self._messages.put_nowait(None)
                await self._within(speaker, "deadlines.reply", "take the last receipts")
                await say(call, transfer_pb2.DeliverRequest(close=close), self._peer)
                await end_of_saying(call, self._peer)
                await self._within(reader, "deadlines.reply", "confirm the end")
            except grpc.RpcError as broken:
                error = error or from_rpc_error(broken, self._peer)
            except HeadwaterError as late:
                error = error or late
        finally:
            for task in (reader, speaker):
                task.cancel()
            await asyncio.gather(reader, speaker, return_exceptions=True)
        return error

    async def _pump_or_stop(
        self, reader: asyncio.Future[str], speaker: asyncio.Future[None], *, direct: bool
    ) -> HeadwaterError | None:
        """Pumps until all is delivered, or this side aborts, or the receiver ends the call. Returns why not all."""
        pump = asyncio.ensure_future(self._pump(direct=direct))
        aborted = asyncio.ensure_future(self._aborted.wait())
        try:
            waits: set[asyncio.Future[Any]] = {pump, aborted, self._refused, reader, speaker}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if aborted.done():
                return TransferFailed("the prefill request was aborted.")
            if self._refused.done():
                return TransferFailed(f"{self._peer} ended the transfer: {self._refused.result()}")
            for task, what in ((reader, "ended the transfer"), (speaker, "takes no more")):
                if task.done() and not pump.done():
                    task.result()
                    return TransferFailed(f"{self._peer} {what}: {task.result() or 'without a reason'}")
            pump.result()
        except grpc.RpcError as broken:
            return from_rpc_error(broken, self._peer)
        except HeadwaterError as error:
            return error
        else:
            return None
        finally:
            aborted.cancel()
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            if self._push is not None:
                # A write under way is waited for, never abandoned.
                await self._push.stop()

    async def _pump(self, *, direct: bool) -> None:
        """Sends every span, then waits until all receipts are acknowledged."""
        sender = self._sender
        slots = await self._within(self._slots, "deadlines.acknowledge", "give landing slots")
        region = self._target.direct
        source = sender.source
        there = np.array(region.pages, dtype=np.int64)
        push = self._push = Push(
            sender.writer,
            sender.arena,
            sender.pool,
            lambda box, address: sender.source.pack(self._pages, box, address),
            PushTarget(
                session=self._target.engine_session,
                epoch=self._target.epoch,
                key=self._key,
                slot_bytes=self._target.slot_bytes,
                slots=slots,
                digests=self._grant.digests,
                peer=self._peer,
                direct=Region(self._target_layout(), there, region.address) if direct else None,
            ),
            self._wire,
            say=self._receipt,
            acknowledge_seconds=sender.acknowledge_seconds,
            in_place=Region(source.layout, self._pages, source.address) if source.address is not None else None,
            sent=self._on_sent,
        )
        # A write that fails is told at once, not with the next chunk.
        while (tokens := await push.unless_failed(self._spans.get())) is not None:
            if self._part is not None:
                await push.push(Box(*self._part, tokens))
        self._session.on(SenderEvent.CLOSE)
        await push.acknowledged_all()

    def _receipt(self, receipt: transfer_pb2.Receipt) -> None:
        self._messages.put_nowait(transfer_pb2.DeliverRequest(receipt=receipt))
        box = receipt.box
        self._log.event(
            Event.CHUNK_WRITTEN,
            layers=[box.layer_start, box.layer_end],
            tokens=[box.token_start, box.token_end],
            num_bytes=receipt.num_bytes,
        )

    async def _speak(self, call: Any) -> None:
        while (message := await self._messages.get()) is not None:
            await say(call, message, self._peer)

    async def _read(self, call: Any) -> str:
        """What the receiver says, until it ends the call. Returns how it ended."""
        while (response := await call.read()) is not grpc.aio.EOF:
            kind = response.WhichOneof("message")
            said = getattr(response, kind or "closed")
            if said.key != self._key:
                raise StalePeer(f"{self._peer} speaks of transfer {said.key.transfer_id}, attempt {said.key.attempt}.")
            if kind == "slots" and not self._slots.done():
                self._session.on(SenderEvent.OPENED)
                self._slots.set_result({slot.slot: slot.address for slot in said.slots})
            elif kind == "ack" and self._push is not None:
                self._push.acknowledged(said.sequence)
            elif kind == "abort":
                if not self._refused.done():
                    self._refused.set_result(said.reason)
            elif kind == "closed":
                return "closed"
        return await call.details() or "without a reason"

    def _goes_directly(self) -> bool:
        """Whether writing page to page is possible and pays."""
        if not self._target.HasField("direct") or self._part is None or self._wire.converts:
            return False
        return self._sender.source.address is not None and self._sender.writes_directly(
            self._target_layout(), self._part
        )

    def _target_layout(self) -> PagedLayout:
        target = self._target
        return PagedLayout(
            Span(target.layer_start, target.layer_end),
            Span(target.head_start, target.head_end),
            target.direct.page_size,
            target.direct.num_pages,
            self._wire.wire_cell,
        )

    async def _within(self, work: Awaitable[T], deadline: str, what: str) -> T:
        sender = self._sender
        seconds = {"deadlines.reply": sender.reply_seconds, "deadlines.acknowledge": sender.acknowledge_seconds}[
            deadline
        ]
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            raise DeadlinePassed(f"{self._peer} did not {what} within {seconds:g} s ({deadline}).") from None
