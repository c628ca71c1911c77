"""The decode side of transfers: grants, deliveries, verification.

A `Receiver` serves `TransferService` for one decode rank. Writers put packed boxes into landing slots with
the transfer engine and send receipts; each box is checked against its digest, unpacked into the destination
and acknowledged. What that amounts to is `incoming`'s business.

A writer that closed and says that it quiesced gives its slots back. One that was lost, or that cannot vouch
for its writes, leaves them in quarantine.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from headwater.errors import (
    DeadlinePassed,
    DuplicateTransfer,
    HeadwaterError,
    PeerUnavailable,
    StalePeer,
    TransferFailed,
)
from headwater.lifecycle import Event
from headwater.v1 import common_pb2, transfer_pb2, transfer_pb2_grpc
from kv_transfer import memory, metrics
from kv_transfer.engine import TransferEngine
from kv_transfer.geometry import Box, CellSize, Span
from kv_transfer.incoming import Destination, Incoming
from kv_transfer.planner import packed_bytes
from kv_transfer.slots import SlotArena


class Receiver:
    """Grants transfers and serves their deliveries.

    Args:
        engine: already running; `arena` is registered with it.
        epoch: this process's incarnation.
        address: "host:port" of the server that carries `TransferService`.
        geometry: of the decode group.
        slots_per_writer: landing slots that each writer of a transfer owns while it is open.
        reply_seconds, acknowledge_seconds, stop_seconds: `Deadlines` of the cluster file.
    """

    def __init__(
        self,
        engine: TransferEngine,
        arena: SlotArena,
        *,
        epoch: str,
        address: str,
        geometry: common_pb2.Geometry,
        slots_per_writer: int,
        reply_seconds: float,
        acknowledge_seconds: float,
        stop_seconds: float,
    ) -> None:
        self._engine = engine
        self._arena = arena
        self._epoch = epoch
        self._address = address
        self._cell = CellSize.of(geometry)
        self._layers = geometry.num_layers
        self._heads = geometry.num_kv_heads
        self._slots_per_writer = slots_per_writer
        self._reply_seconds = reply_seconds
        self._acknowledge_seconds = acknowledge_seconds
        self._stop_seconds = stop_seconds
        self._incoming: dict[str, Incoming] = {}
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="unpack")

    @property
    def open_transfers(self) -> int:
        return len(self._incoming)

    def expect(self, transfer_id: str, attempt: int, num_tokens: int, destination: Destination) -> Incoming:
        """Permission for one transfer of `num_tokens` tokens into `destination`.

        Raises:
            DuplicateTransfer: the id is in use.
        """
        if transfer_id in self._incoming:
            raise DuplicateTransfer(
                f"transfer {transfer_id} is already expected here. Transfer ids are minted once, by the router."
            )
        grant = common_pb2.Grant(
            transfer_id=transfer_id,
            attempt=attempt,
            epoch=self._epoch,
            token=secrets.token_bytes(16),
            transfer_address=self._address,
            engine_session=self._engine.session,
            slot_bytes=self._arena.slot_bytes,
        )
        whole = Box(Span(0, self._layers), Span(0, self._heads), Span(0, num_tokens))
        incoming = Incoming(grant, self._cell, whole, destination, self._forget)
        self._incoming[transfer_id] = incoming
        incoming.log.event(Event.GRANTED, num_tokens=num_tokens)
        return incoming

    def _forget(self, incoming: Incoming) -> None:
        self._incoming.pop(incoming.grant.transfer_id, None)

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    async def deliver(
        self, requests: AsyncIterator[transfer_pb2.DeliverRequest]
    ) -> AsyncIterator[transfer_pb2.DeliverResponse]:
        """One writer's delivery, from open to close."""
        opening = await self._opening(requests)
        incoming = self._find(opening)
        rank = opening.writer_rank
        owner = (opening.transfer_id, opening.attempt, rank)
        incoming.writer_opened(rank)
        # Before the slots are sent there is nothing that could still land.
        quiesced, closed = True, False
        try:
            slots = await self._arena.acquire(owner, self._slots_per_writer, self._acknowledge_seconds)
            landing = [transfer_pb2.LandingSlot(slot=slot, address=self._arena.address(slot)) for slot in slots]
            quiesced = False
            yield transfer_pb2.DeliverResponse(slots=transfer_pb2.Slots(slots=landing))
            async for message in _until_stopped(requests, incoming.stopped, self._stop_seconds):
                if message is None:
                    abort = transfer_pb2.AbortDelivery(reason=incoming.stop_reason)
                    yield transfer_pb2.DeliverResponse(abort=abort)
                elif message.HasField("close"):
                    quiesced, closed = message.close.quiesced, True
                    self._close(incoming, rank, message.close)
                    break
                elif message.HasField("receipt") and not incoming.stopped.is_set():
                    try:
                        ack = await self._receipt(incoming, owner, message.receipt)
                    except TransferFailed as error:
                        # The writer is told to stop, and then says itself that it quiesced.
                        incoming.fail(error)
                    else:
                        yield ack
        except HeadwaterError as error:
            incoming.fail(error)
            raise
        finally:
            if not closed and not incoming.session.terminal:
                incoming.fail(PeerUnavailable(f"transfer {opening.transfer_id}: rank {rank} was lost."))
            if quiesced:
                self._arena.release(owner)
            else:
                self._arena.quarantine(owner)
            incoming.writer_closed(rank)
        yield transfer_pb2.DeliverResponse(closed=transfer_pb2.DeliveryClosed())

    async def _opening(self, requests: AsyncIterator[transfer_pb2.DeliverRequest]) -> transfer_pb2.OpenDelivery:
        try:
            async with asyncio.timeout(self._reply_seconds):
                first = await anext(requests, None)
        except TimeoutError:
            raise DeadlinePassed(f"a writer sent nothing for {self._reply_seconds:g} s (deadlines.reply).") from None
        if first is None or not first.HasField("open"):
            raise StalePeer("a delivery must begin with `open`.")
        return first.open

    def _find(self, opening: transfer_pb2.OpenDelivery) -> Incoming:
        """The transfer that a writer names, if it names all of it right."""
        if opening.epoch != self._epoch:
            raise StalePeer(
                f"transfer {opening.transfer_id}: the grant is of epoch {opening.epoch}, this decode node is "
                f"{self._epoch}: it has restarted. Ask for a new grant."
            )
        incoming = self._incoming.get(opening.transfer_id)
        if incoming is None:
            raise StalePeer(f"transfer {opening.transfer_id} is not expected here: it has ended or was never granted.")
        if opening.attempt != incoming.grant.attempt:
            raise StalePeer(
                f"transfer {opening.transfer_id}: attempt {opening.attempt} is not the current one, "
                f"{incoming.grant.attempt}."
            )
        if not secrets.compare_digest(opening.token, incoming.grant.token):
            raise StalePeer(f"transfer {opening.transfer_id}: the grant's token does not match.")
        return incoming

    async def _receipt(
        self, incoming: Incoming, owner: tuple[str, int, int], receipt: transfer_pb2.Receipt
    ) -> transfer_pb2.DeliverResponse:
        where = f"transfer {incoming.grant.transfer_id}: receipt {receipt.sequence} of rank {owner[2]}"
        try:
            box = Box.from_proto(receipt.box)
        except ValueError as error:
            raise TransferFailed(f"{where}: {error}.") from error
        if not self._arena.owns(owner, receipt.slot):
            raise TransferFailed(f"{where}: slot {receipt.slot} is not this writer's.")
        if receipt.num_bytes != packed_bytes(box, incoming.cell) or receipt.num_bytes > self._arena.slot_bytes:
            raise TransferFailed(
                f"{where}: {receipt.num_bytes} bytes do not make {box} ({packed_bytes(box, incoming.cell)} bytes)."
            )
        try:
            incoming.arriving(box)
        except ValueError as error:
            raise TransferFailed(f"{where}: {error}.") from error
        address = self._arena.address(receipt.slot)

        def verify_and_unpack() -> bool:
            if memory.digest(address, receipt.num_bytes) != receipt.digest:
                return False
            incoming.destination.unpack(box, address)
            return True

        if not await asyncio.get_running_loop().run_in_executor(self._pool, verify_and_unpack):
            raise TransferFailed(
                f"{where}: the bytes in slot {receipt.slot} do not have the digest that the writer computed. "
                "They were damaged or overwritten on the way; nothing of this transfer is used."
            )
        metrics.BYTES_RECEIVED.inc(receipt.num_bytes)
        incoming.log.event(
            Event.RECEIPT,
            rank=owner[2],
            layers=[box.layers.start, box.layers.end],
            tokens=[box.tokens.start, box.tokens.end],
            num_bytes=receipt.num_bytes,
        )
        incoming.received(receipt.num_bytes)
        ack = transfer_pb2.ReceiptAck(sequence=receipt.sequence, slot=receipt.slot)
        return transfer_pb2.DeliverResponse(ack=ack)

    def _close(self, incoming: Incoming, rank: int, close: transfer_pb2.CloseDelivery) -> None:
        if not close.complete:
            incoming.fail(
                TransferFailed(
                    f"transfer {incoming.grant.transfer_id}: rank {rank} ended it: {close.error or 'no reason given'}"
                )
            )
        elif close.HasField("first_token"):
            incoming.first_token(close.first_token)


async def _until_stopped(
    requests: AsyncIterator[transfer_pb2.DeliverRequest], stopped: asyncio.Event, deadline_seconds: float
) -> AsyncIterator[transfer_pb2.DeliverRequest | None]:
    """The requests as they come, and None once, when `stopped` is set.

    Raises:
        DeadlinePassed: the writer went on for `deadline_seconds` after it was told to stop.
    """
    stop: asyncio.Task[bool] | None = asyncio.ensure_future(stopped.wait())
    following: asyncio.Future[transfer_pb2.DeliverRequest | None] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(anext(requests, None))
            waits: set[asyncio.Future[bool] | asyncio.Future[transfer_pb2.DeliverRequest | None]] = {following}
            if stop is not None:
                waits.add(stop)
            timeout = None if stop is not None else deadline_seconds
            done, _ = await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise DeadlinePassed(
                    f"a writer did not close within {deadline_seconds:g} s (deadlines.stop) of the end."
                )
            if following in done:
                message, following = following.result(), None
                if message is None:
                    return
                yield message
            else:
                stop = None
                yield None
    finally:
        for task in (stop, following):
            if task is not None:
                task.cancel()


class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):
    """`TransferService` over a `Receiver`."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Deliver(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[transfer_pb2.DeliverRequest], context: object
    ) -> AsyncIterator[transfer_pb2.DeliverResponse]:
        return self._receiver.deliver(request_iterator)
