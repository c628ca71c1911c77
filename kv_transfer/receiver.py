"""The receiving side of transfers: grants, deliveries, acknowledgements, quarantine, leases.

A writer (one prefill rank) opens a delivery and gets landing slots for as long as it is open, or writes page
to page where the destination allows that. It reports each box that has landed; the box is checked against its
digest, put in place and acknowledged. When a writer does not vouch for its writes, whatever it could still
write to is quarantined, and comes back only through a fence.

What a reaper does (leases, attempts that nobody takes over) needs no new work to happen.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headwater.errors import (
    DeadlinePassed,
    DuplicateTransfer,
    HeadwaterError,
    InvalidRequest,
    PeerUnavailable,
    StalePeer,
    TransferFailed,
)
from headwater.lifecycle import Event, get_logger
from headwater.v1 import common_pb2, transfer_pb2, transfer_pb2_grpc
from kv_transfer import metrics
from kv_transfer.engine import TransferEngine
from kv_transfer.geometry import Box, Span
from kv_transfer.incoming import Attempt, Destination, DirectDestination, Incoming
from kv_transfer.landing import Region, box_of, check_size, land, landing_slots
from kv_transfer.pushing import Push, PushTarget
from kv_transfer.slots import SlotArena
from kv_transfer.streams import to_its_end
from kv_transfer.wire import WireFormat, choose, exact
from kv_transfer.writer import Writer

log = get_logger(__name__)

_REAP_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class ReceiverOptions:
    """What the cluster file says about receiving. Seconds as in its `Deadlines`."""

    # Landing slots that each writer of a transfer owns while it is open.
    slots_per_writer: int = 4
    reply_seconds: float = 5.0
    acknowledge_seconds: float = 60.0
    stop_seconds: float = 10.0
    lease_seconds: float = 120.0
    # How long an attempt that was lost may be followed by another; 0 does not wait for one.
    resume_seconds: float = 0.0
    # "auto" or a type of `kv_transfer.wire`.
    wire_dtype: str = "auto"
    # Whether writers may write page to page into destinations that allow it.
    direct: bool = False
    digests: bool = True


class Receiver:
    """Grants transfers and serves their deliveries, for one decode rank. Used from one event loop.

    Args:
        engine: already running; `arena` is registered with it.
        writer: over the same engine; gives what is verified back to prefill ranks that take over.
        epoch: this process's incarnation.
        address: "host:port" of the server that carries `TransferService`.
        geometry: of the decode group.
        layers, heads: this rank's share; None: all of them.
    """

    def __init__(
        self,
        engine: TransferEngine,
        arena: SlotArena,
        writer: Writer,
        *,
        epoch: str,
        address: str,
        geometry: common_pb2.Geometry,
        layers: Span | None = None,
        heads: Span | None = None,
        options: ReceiverOptions = ReceiverOptions(),
    ) -> None:
        self._engine = engine
        self._arena = arena
        self._writer = writer
        self._epoch = epoch
        self._address = address
        self._geometry = geometry
        self._layers = layers or Span(0, geometry.num_layers)
        self._heads = heads or Span(0, geometry.num_kv_heads)
        self._options = options
        self._incoming: dict[str, Incoming] = {}
        # Regions that writers may write to, by transfer.
        self._regions: dict[str, Region] = {}
        # Of those, the ones that a lost writer may still write to.
        self._dirty: set[str] = set()
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="unpack")
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._reap())

    @property
    def open_transfers(self) -> int:
        return len(self._incoming)

    def expect(
        self, transfer_id: str, attempt: int, num_tokens: int, destination: Destination, *, source_dtype: str = ""
    ) -> Incoming:
        """Permission for one transfer of `num_tokens` tokens into `destination`; see `grant`.

        Args:
            source_dtype: element type of the writers' KV; empty: as the destination's.

        Raises:
            DuplicateTransfer: the id is in use.
            GeometryMismatch: the types cannot be converted.
        """
        if transfer_id in self._incoming:
            raise DuplicateTransfer(
                f"transfer {transfer_id} is already expected here. Transfer ids are minted once, by the router."
            )
        ours, theirs = self._geometry.dtype, source_dtype or self._geometry.dtype
        wire_dtype = choose(theirs, ours, self._options.wire_dtype)
        incoming = Incoming(
            transfer_id,
            attempt,
            Box(self._layers, self._heads, Span(0, num_tokens)),
            destination,
            WireFormat.of(self._geometry, wire_dtype),
            resumable=exact(theirs, wire_dtype, ours),
            lease_seconds=self._options.lease_seconds,
            resume_seconds=self._options.resume_seconds,
            on_over=self._on_over,
        )
        if self._options.direct and isinstance(destination, DirectDestination) and not incoming.wire.converts:
            self._engine.register(destination.address, destination.layout.total_bytes)
            self._regions[transfer_id] = Region(destination.layout, destination.pages, destination.address)
        self._incoming[transfer_id] = incoming
        incoming.log.event(Event.ADMITTED, num_tokens=num_tokens)
        return incoming

    def grant(self, incoming: Incoming) -> common_pb2.Grant:
        """The permission for the current attempt. Grants of a group's ranks are joined with `join_grants`."""
        target = common_pb2.GrantTarget(
            epoch=self._epoch,
            token=incoming.attempt.token,
            transfer_address=self._address,
            engine_session=self._engine.session,
            slot_bytes=self._arena.slot_bytes,
            layer_start=self._layers.start,
            layer_end=self._layers.end,
            head_start=self._heads.start,
            head_end=self._heads.end,
        )
        region = self._regions.get(incoming.transfer_id)
        if region is not None:
            target.direct.CopyFrom(
                common_pb2.DirectRegion(
                    address=region.address,
                    page_size=region.layout.page_size,
                    num_pages=region.layout.num_pages,
                    pages=[int(page) for page in region.pages],
                )
            )
        return common_pb2.Grant(
            transfer_id=incoming.transfer_id,
            attempt=incoming.attempt.number,
            verified_tokens=incoming.verified_tokens,
            wire_dtype=incoming.wire.wire,
            targets=[target],
            digests=self._options.digests,
        )

    async def regrant(self, transfer_id: str, attempt: int, at_most: int | None = None) -> common_pb2.Grant:
        """Begins the next attempt of a transfer with what is verified of the earlier ones.

        Args:
            attempt: one more than the current one.
            at_most: verified tokens that the other ranks of a decode group have too; None: this is the only rank.

        Raises:
            StalePeer: the transfer has ended, or the attempt does not follow the current one.
        """
        incoming = self._incoming.get(transfer_id)
        if incoming is None:
            raise StalePeer(f"transfer {transfer_id} is not expected here: it has ended or was never granted.")
        await incoming.regrant(attempt, at_most)
        region = self._regions.get(transfer_id)
        if region is not None and (transfer_id in self._dirty or not incoming.quiet):
            # A lost writer may still write to these pages. Once fenced they take staged deliveries only, and are
            # never registered again.
            del self._regions[transfer_id]
            self._dirty.add(transfer_id)
            await asyncio.to_thread(self._engine.fence, region.address)
        return self.grant(incoming)

    async def close(self) -> None:
        """Ends the reaper and the threads. Fences under way are waited for; the engine bounds them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pool.shutdown(wait=True)

    async def deliver(
        self, requests: AsyncIterator[transfer_pb2.DeliverRequest]
    ) -> AsyncIterator[transfer_pb2.DeliverResponse]:
        """One writer's delivery, from open to close."""
        first = await self._first(requests)
        if not first.HasField("open"):
            raise StalePeer("a delivery must begin with `open`.")
        opening = first.open
        incoming, attempt = self._find(opening.key, opening.token)
        if opening.direct and opening.key.transfer_id not in self._regions:
            raise StalePeer(f"transfer {incoming.transfer_id}: its memory may not be written to page to page.")
        incoming.writer_opened(attempt, opening.writer_rank)
        writer = _OpenDelivery(incoming, attempt, opening)
        try:
            if not opening.direct:
                slots = await self._slots(writer)
                writer.slots = {slot: self._arena.address(slot) for slot in slots}
            # From here on the writer may write.
            writer.quiesced = False
            yield transfer_pb2.DeliverResponse(slots=landing_slots(opening.key, writer.slots))
            async for message in _until_stopped(requests, attempt.stopped, self._options.stop_seconds):
                if message is None:
                    abort = transfer_pb2.AbortDelivery(key=opening.key, reason=attempt.stop_reason)
                    yield transfer_pb2.DeliverResponse(abort=abort)
                elif message.HasField("close"):
                    _check_key(message.close.key, opening.key)
                    self._close(writer, message.close)
                    break
                elif message.HasField("receipt"):
                    _check_key(message.receipt.key, opening.key)
                    if await self._receipt(writer, message.receipt):
                        ack = transfer_pb2.ReceiptAck(key=opening.key, sequence=message.receipt.sequence)
                        yield transfer_pb2.DeliverResponse(ack=ack)
                else:
                    raise StalePeer(f"{writer}: a delivery goes on with receipts and ends with `close`.")
        except HeadwaterError as error:
            incoming.suspend(attempt, error)
            raise
        finally:
            self._end(writer)
        yield transfer_pb2.DeliverResponse(closed=transfer_pb2.DeliveryClosed(key=opening.key))

    async def fetch(
        self, requests: AsyncIterator[transfer_pb2.FetchRequest]
    ) -> AsyncIterator[transfer_pb2.FetchResponse]:
        """Gives a prefill rank what is verified of its share."""
        first = await self._first(requests)
        if not first.HasField("open"):
            raise StalePeer("a fetch must begin with `open`.")
        opening = first.open
        incoming, attempt = self._find(opening.key, opening.token)
        where = f"transfer {incoming.transfer_id}: fetch by {opening.engine_session}"
        try:
            box = Box.from_proto(opening.box)
        except ValueError as error:
            raise InvalidRequest(f"{where}: {error}.") from error
        if not incoming.coverage.whole.contains(box) or box.tokens.end > incoming.verified_tokens:
            raise InvalidRequest(
                f"{where}: {box} is not within what is verified, {incoming.coverage.whole} to token "
                f"{incoming.verified_tokens}."
            )
        responses: asyncio.Queue[transfer_pb2.FetchResponse] = asyncio.Queue()
        push = Push(
            self._writer,
            self._arena,
            self._pool,
            incoming.destination.pack,
            PushTarget(
                session=opening.engine_session,
                epoch=opening.epoch,
                key=opening.key,
                slot_bytes=opening.slot_bytes,
                slots={landing.slot: landing.address for landing in opening.slots},
                digests=True,
                peer=f"prefill rank at {opening.engine_session}",
            ),
            incoming.wire,
            say=lambda receipt: responses.put_nowait(transfer_pb2.FetchResponse(receipt=receipt)),
            acknowledge_seconds=self._options.acknowledge_seconds,
        )
        pushing: asyncio.Future[Any] = asyncio.ensure_future(self._push_all(push, box))
        hearing: asyncio.Future[Any] = asyncio.ensure_future(_take_acks(requests, push, opening.key))
        stopped: asyncio.Future[Any] = asyncio.ensure_future(attempt.stopped.wait())
        taking: asyncio.Future[Any] = asyncio.ensure_future(responses.get())
        everything = {pushing, hearing, stopped, taking}
        try:
            while not (pushing.done() or hearing.done() or stopped.done()) or taking.done():
                if taking.done():
                    response = taking.result()
                    everything.discard(taking)
                    taking = asyncio.ensure_future(responses.get())
                    everything.add(taking)
                    yield response
                await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                raise StalePeer(f"{where}: the attempt is over: {attempt.stop_reason}.")
            if not pushing.done():
                # The other side left; what it said last is the reason.
                hearing.result()
                raise PeerUnavailable(f"{where}: the prefill rank left.")
            pushing.result()
            yield transfer_pb2.FetchResponse(close=transfer_pb2.CloseDelivery(key=opening.key, complete=True))
        finally:
            for waiting in everything:
                waiting.cancel()
            await asyncio.gather(*everything, return_exceptions=True)
            await push.stop()

    async def _push_all(self, push: Push, box: Box) -> None:
        await push.push(box)
        await push.acknowledged_all()

    async def _first(self, requests: AsyncIterator[Any]) -> Any:
        try:
            async with asyncio.timeout(self._options.reply_seconds):
                first = await anext(requests, None)
        except TimeoutError:
            seconds = self._options.reply_seconds
            raise DeadlinePassed(f"a writer sent nothing for {seconds:g} s (deadlines.reply).") from None
        if first is None:
            raise StalePeer("a delivery must begin with `open`.")
        return first

    def _find(self, key: common_pb2.TransferKey, token: bytes) -> tuple[Incoming, Attempt]:
        """The transfer that a writer names, if it names all of it right."""
        if key.epoch != self._epoch:
            raise StalePeer(
                f"transfer {key.transfer_id}: the grant is of epoch {key.epoch!r}, this decode node is "
                f"{self._epoch!r}: it has restarted. Ask for a new grant."
            )
        incoming = self._incoming.get(key.transfer_id)
        if incoming is None or incoming.session.terminal:
            raise StalePeer(f"transfer {key.transfer_id} is not expected here: it has ended or was never granted.")
        attempt = incoming.attempt
        if key.attempt != attempt.number:
            raise StalePeer(
                f"transfer {key.transfer_id}: attempt {key.attempt} is not the current one, {attempt.number}."
            )
        if not secrets.compare_digest(token, attempt.token):
            raise StalePeer(f"transfer {key.transfer_id}: the grant's token does not match.")
        return incoming, attempt

    async def _slots(self, writer: _OpenDelivery) -> list[int]:
        """Landing slots for a writer, unless its attempt ends first."""
        options = self._options
        asking = asyncio.ensure_future(
            self._arena.acquire(writer.owner, options.slots_per_writer, options.acknowledge_seconds)
        )
        stopped = asyncio.ensure_future(writer.attempt.stopped.wait())
        waits: set[asyncio.Future[Any]] = {asking, stopped}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise StalePeer(f"{writer}: the attempt is over: {writer.attempt.stop_reason}.")
        finally:
            for waiting in waits:
                waiting.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _receipt(self, writer: _OpenDelivery, receipt: transfer_pb2.Receipt) -> bool:
        """Puts a box in place. False when the attempt is over, and the writer is being told so."""
        incoming, attempt = writer.incoming, writer.attempt
        where = f"{writer}: receipt {receipt.sequence}"
        if not incoming.wants(attempt):
            # Whatever a writer of an earlier attempt says, it is nothing to the current one.
            metrics.RECEIPTS.labels("late").inc()
            return False
        try:
            box = box_of(receipt, where)
            at = self._checked_place(writer, receipt, box, where)
        except TransferFailed as error:
            # The writer is told to stop, and then says itself that it quiesced.
            metrics.RECEIPTS.labels("refused").inc()
            incoming.fail(error)
            return False
        try:
            incoming.landing(attempt, box)
        except StalePeer:
            metrics.RECEIPTS.labels("late").inc()
            return False
        except ValueError as error:
            metrics.RECEIPTS.labels("refused").inc()
            incoming.fail(TransferFailed(f"{where}: {error}."))
            return False
        work = asyncio.ensure_future(land(self._pool, receipt, box, incoming.wire, incoming.destination, at, where))
        try:
            # When the writer is lost meanwhile, the box still lands.
            await to_its_end(work)
        except TransferFailed as error:
            metrics.RECEIPTS.labels("refused").inc()
            incoming.not_landed(error)
            return False
        except BaseException:
            if work.cancelled() or work.exception() is not None:
                incoming.not_landed(TransferFailed(f"{where}: the destination did not take it."))
            else:
                incoming.landed(attempt, receipt.num_bytes)
            raise
        metrics.BYTES_RECEIVED.inc(receipt.num_bytes)
        metrics.RECEIPTS.labels("landed").inc()
        incoming.log.event(
            Event.CHUNK_LANDED,
            rank=writer.rank,
            layers=[box.layers.start, box.layers.end],
            tokens=[box.tokens.start, box.tokens.end],
            num_bytes=receipt.num_bytes,
        )
        incoming.landed(attempt, receipt.num_bytes)
        return True

    def _checked_place(
        self, writer: _OpenDelivery, receipt: transfer_pb2.Receipt, box: Box, where: str
    ) -> int | Region:
        """Where a box landed.

        Raises:
            TransferFailed: the receipt does not say what it must.
        """
        if self._options.digests and not receipt.digest:
            raise TransferFailed(f"{where}: it has no digest, and the grant asks for one.")
        wire = writer.incoming.wire
        if writer.opening.direct:
            check_size(receipt, box, wire, None, where)
            return self._regions[writer.incoming.transfer_id]
        if not receipt.HasField("slot") or receipt.slot not in writer.slots:
            raise TransferFailed(f"{where}: slot {receipt.slot} is not this writer's.")
        check_size(receipt, box, wire, self._arena.slot_bytes, where)
        return writer.slots[receipt.slot]

    def _close(self, writer: _OpenDelivery, close: transfer_pb2.CloseDelivery) -> None:
        writer.quiesced, writer.closed = close.quiesced, True
        if not close.complete:
            reason = close.error or "no reason given"
            writer.incoming.suspend(writer.attempt, TransferFailed(f"{writer} ended it: {reason}"))
        elif close.HasField("first_token"):
            writer.incoming.first_token(writer.attempt, close.first_token)

    def _end(self, writer: _OpenDelivery) -> None:
        """Settles what the writer leaves behind."""
        incoming = writer.incoming
        if not writer.closed:
            incoming.suspend(writer.attempt, PeerUnavailable(f"{writer} was lost."))
        if writer.quiesced:
            self._arena.release(writer.owner)
        elif writer.opening.direct:
            self._dirty.add(incoming.transfer_id)
        else:
            incoming.log.warning("a writer is not known to have stopped; fencing its slots", rank=writer.rank)
            self._spawn(self._arena.replace(self._arena.quarantine(writer.owner)))
        incoming.writer_closed(writer.attempt, writer.rank)

    def _on_over(self, incoming: Incoming) -> None:
        transfer_id = incoming.transfer_id
        self._incoming.pop(transfer_id, None)
        region = self._regions.pop(transfer_id, None)
        dirty = transfer_id in self._dirty
        self._dirty.discard(transfer_id)
        if dirty:
            self._spawn(self._retire(region, incoming.destination))
        elif region is not None:
            self._engine.unregister(region.address)

    async def _retire(self, region: Region | None, destination: Destination) -> None:
        assert isinstance(destination, DirectDestination)
        # Before anything else can fail: nobody is ever given these addresses again.
        destination.retire()
        if region is not None:
            await asyncio.to_thread(self._engine.fence, region.address)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(_REAP_SECONDS)
            for incoming in list(self._incoming.values()):
                incoming.reap(time.monotonic())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._settled)

    def _settled(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # What it was to clean up stays as it was.
            log.error("a background task failed", error=repr(error))


class _OpenDelivery:
    """One writer while its delivery is open."""

    def __init__(self, incoming: Incoming, attempt: Attempt, opening: transfer_pb2.OpenDelivery) -> None:
        self.incoming = incoming
        self.attempt = attempt
        self.opening = opening
        self.rank = opening.writer_rank
        self.owner = (incoming.transfer_id, attempt.number, opening.writer_rank)
        self.slots: dict[int, int] = {}
        # Before the slots are sent there is nothing that could still land.
        self.quiesced = True
        self.closed = False

    def __str__(self) -> str:
        return f"transfer {self.incoming.transfer_id}: rank {self.rank}"


def join_grants(grants: list[common_pb2.Grant]) -> common_pb2.Grant:
    """One grant for a decode group, from those of its ranks.

    Raises:
        StalePeer: they are not of one attempt.
    """
    joined = common_pb2.Grant()
    joined.CopyFrom(grants[0])
    for grant in grants[1:]:
        same = (grant.transfer_id, grant.attempt, grant.verified_tokens, grant.wire_dtype)
        if same != (joined.transfer_id, joined.attempt, joined.verified_tokens, joined.wire_dtype):
            raise StalePeer(f"the ranks of the decode group granted different attempts of {joined.transfer_id}.")
        joined.targets.extend(grant.targets)
    return joined


def _check_key(key: common_pb2.TransferKey, expected: common_pb2.TransferKey) -> None:
    if key != expected:
        raise StalePeer(
            f"a message of transfer {key.transfer_id}, attempt {key.attempt}, epoch {key.epoch!r} came in the delivery "
            f"of transfer {expected.transfer_id}, attempt {expected.attempt}, epoch {expected.epoch!r}."
        )


async def _take_acks(
    requests: AsyncIterator[transfer_pb2.FetchRequest], push: Push, key: common_pb2.TransferKey
) -> None:
    async for message in requests:
        if not message.HasField("ack"):
            raise StalePeer("a fetch goes on with acknowledgements.")
        _check_key(message.ack.key, key)
        push.acknowledged(message.ack.sequence)


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


class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):
    """`TransferService` over a `Receiver`."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Deliver(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[transfer_pb2.DeliverRequest], context: object
    ) -> AsyncIterator[transfer_pb2.DeliverResponse]:
        return self._receiver.deliver(request_iterator)

    def Fetch(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[transfer_pb2.FetchRequest], context: object
    ) -> AsyncIterator[transfer_pb2.FetchResponse]:
        return self._receiver.fetch(request_iterator)
