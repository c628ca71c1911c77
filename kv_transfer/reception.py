"""One writer's delivery as the receiving side serves it: slots, receipts, the end.

The counterpart of `delivery`. What outlives the writer (transfers, memory, quarantine) is the receiver's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

from headwater.errors import DeadlinePassed, HeadwaterError, PeerUnavailable, StalePeer, TransferFailed
from headwater.lifecycle import Event
from headwater.v1 import common_pb2, transfer_pb2
from kv_transfer import metrics
from kv_transfer.incoming import Attempt, Incoming
from kv_transfer.landing import Region, box_of, check_size, land, landing_slots
from kv_transfer.streams import to_its_end

if TYPE_CHECKING:
    from kv_transfer.receiver import Receiver


class Reception:
    """One writer while its delivery is open.

    Args:
        region: the transfer's memory, when the writer is to write page to page.
    """

    def __init__(
        self,
        receiver: Receiver,
        incoming: Incoming,
        attempt: Attempt,
        opening: transfer_pb2.OpenDelivery,
        region: Region | None,
    ) -> None:
        self.incoming = incoming
        self.attempt = attempt
        self.rank = opening.writer_rank
        # Of the landing slots.
        self.owner = (incoming.transfer_id, attempt.number, opening.writer_rank)
        self.direct = region is not None
        # No write of this writer can still land. Before the slots are sent there is nothing that could.
        self.quiesced = True
        self._receiver = receiver
        self._key = opening.key
        self._region = region
        self._slots: dict[int, int] = {}
        self._closed = False

    def __str__(self) -> str:
        return f"transfer {self.incoming.transfer_id}: rank {self.rank}"

    async def serve(
        self, requests: AsyncIterator[transfer_pb2.DeliverRequest]
    ) -> AsyncGenerator[transfer_pb2.DeliverResponse, None]:
        """What the writer is told, from its slots to its close. What it leaves behind is settled when this ends."""
        receiver, attempt = self._receiver, self.attempt
        self.incoming.writer_opened(attempt, self.rank)
        try:
            if not self.direct:
                self._slots = {slot: receiver.arena.address(slot) for slot in await self._acquired()}
            # From here on the writer may write.
            self.quiesced = False
            yield transfer_pb2.DeliverResponse(slots=landing_slots(self._key, self._slots))
            async for message in _until_stopped(requests, attempt.stopped, receiver.options.stop_seconds):
                if message is None:
                    abort = transfer_pb2.AbortDelivery(key=self._key, reason=attempt.stop_reason)
                    yield transfer_pb2.DeliverResponse(abort=abort)
                elif message.HasField("close"):
                    check_key(message.close.key, self._key)
                    self._close(message.close)
                    break
                elif message.HasField("receipt"):
                    check_key(message.receipt.key, self._key)
                    if await self._receipt(message.receipt):
                        ack = transfer_pb2.ReceiptAck(key=self._key, sequence=message.receipt.sequence)
                        yield transfer_pb2.DeliverResponse(ack=ack)
                else:
                    raise StalePeer(f"{self}: a delivery goes on with receipts and ends with `close`.")
        except HeadwaterError as error:
            self.incoming.suspend(attempt, error)
            raise
        finally:
            if not self._closed:
                self.incoming.suspend(attempt, PeerUnavailable(f"{self} was lost."))
            receiver.settle(self)
            self.incoming.writer_closed(attempt, self.rank)
        yield transfer_pb2.DeliverResponse(closed=transfer_pb2.DeliveryClosed(key=self._key))

    async def _acquired(self) -> list[int]:
        """Landing slots, unless the attempt ends first."""
        options = self._receiver.options
        asking = asyncio.ensure_future(
            self._receiver.arena.acquire(self.owner, options.slots_per_writer, options.acknowledge_seconds)
        )
        stopped = asyncio.ensure_future(self.attempt.stopped.wait())
        waits: set[asyncio.Future[Any]] = {asking, stopped}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise StalePeer(f"{self}: the attempt is over: {self.attempt.stop_reason}.")
        finally:
            for waiting in waits:
                waiting.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _receipt(self, receipt: transfer_pb2.Receipt) -> bool:
        """Puts a box in place. False when the attempt is over, and the writer is being told so."""
        try:
            landed = await self._landed(receipt)
        except TransferFailed:
            metrics.RECEIPTS.labels("refused").inc()
            return False
        metrics.RECEIPTS.labels("landed" if landed else "late").inc()
        return landed

    async def _landed(self, receipt: transfer_pb2.Receipt) -> bool:
        """As `_receipt`.

        Raises:
            TransferFailed: the receipt or its bytes are wrong; the transfer has failed of it.
        """
        incoming, attempt = self.incoming, self.attempt
        where = f"{self}: receipt {receipt.sequence}"
        if not incoming.wants(attempt):
            # Whatever a writer of an earlier attempt says, it is nothing to the current one.
            return False
        try:
            box = box_of(receipt, where)
            at = self._checked_place(receipt, where)
            check_size(receipt, box, incoming.wire, None if self.direct else self._receiver.arena.slot_bytes, where)
            incoming.landing(attempt, box)
        except StalePeer:
            return False
        except (TransferFailed, ValueError) as raised:
            error = raised if isinstance(raised, TransferFailed) else TransferFailed(f"{where}: {raised}.")
            # The writer is told to stop, and then says itself that it quiesced.
            incoming.fail(error)
            raise error from None
        pool = self._receiver.pool
        work = asyncio.ensure_future(land(pool, receipt, box, incoming.wire, incoming.destination, at, where))
        try:
            # When the writer is lost meanwhile, the box still lands.
            await to_its_end(work)
        except TransferFailed as error:
            incoming.not_landed(error)
            raise
        except BaseException:
            if work.cancelled() or work.exception() is not None:
                incoming.not_landed(TransferFailed(f"{where}: the destination did not take it."))
            else:
                incoming.landed(attempt, receipt.num_bytes)
            raise
        metrics.BYTES_RECEIVED.inc(receipt.num_bytes)
        incoming.log.event(
            Event.CHUNK_LANDED,
            rank=self.rank,
            layers=[box.layers.start, box.layers.end],
            tokens=[box.tokens.start, box.tokens.end],
            num_bytes=receipt.num_bytes,
        )
        incoming.landed(attempt, receipt.num_bytes)
        return True

    def _checked_place(self, receipt: transfer_pb2.Receipt, where: str) -> int | Region:
        """Where a box landed.

        Raises:
            TransferFailed: the receipt does not say what it must.
        """
        if self._receiver.options.digests and not receipt.digest:
            raise TransferFailed(f"{where}: it has no digest, and the grant asks for one.")
        if self._region is not None:
            return self._region
        if not receipt.HasField("slot") or receipt.slot not in self._slots:
            raise TransferFailed(f"{where}: slot {receipt.slot} is not this writer's.")
        return self._slots[receipt.slot]

    def _close(self, close: transfer_pb2.CloseDelivery) -> None:
        self.quiesced, self._closed = close.quiesced, True
        if not close.complete:
            reason = close.error or "no reason given"
            self.incoming.suspend(self.attempt, TransferFailed(f"{self} ended it: {reason}"))
        elif close.HasField("first_token"):
            self.incoming.first_token(self.attempt, close.first_token)


def check_key(key: common_pb2.TransferKey, expected: common_pb2.TransferKey) -> None:
    """Raises StalePeer when a message is not of the transfer, attempt and epoch that its stream began with."""
    if key != expected:
        raise StalePeer(
            f"a message of transfer {key.transfer_id}, attempt {key.attempt}, epoch {key.epoch!r} came in the delivery "
            f"of transfer {expected.transfer_id}, attempt {expected.attempt}, epoch {expected.epoch!r}."
        )


async def _until_stopped(
    requests: AsyncIterator[transfer_pb2.DeliverRequest], stopped: asyncio.Event, deadline_seconds: float
) -> AsyncIterator[transfer_pb2.DeliverRequest | None]:
    """The requests as they come, and None once, when `stopped` is set.

    Raises:
        DeadlinePassed: the writer went on for `deadline_seconds` after it was told to stop.
    """
    stop: asyncio.Task[bool] | None = asyncio.ensure_future(stopped.wait())
    following: asyncio.Future[transfer_pb2.DeliverRequest | None] | None = None
    deadline: float | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(anext(requests, None))
            waits: set[asyncio.Future[bool] | asyncio.Future[transfer_pb2.DeliverRequest | None]] = {following}
            if stop is not None:
                waits.add(stop)
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
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
                deadline = time.monotonic() + deadline_seconds
                yield None
    finally:
        for task in (stop, following):
            if task is not None:
                task.cancel()
