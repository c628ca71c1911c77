"""The receiving side of transfers: grants, deliveries, acknowledgements, quarantine, leases.

A writer (one prefill rank) opens a delivery and gets landing slots for as long as it is open, or writes page
to page where the destination allows that. It reports each box that has landed; the box is checked against its
digest, put in place and acknowledged. When a writer does not vouch for its writes, whatever it could still
write to is quarantined, and comes back only through a fence.

What a reaper does (leases, attempts that nobody takes over) needs no new work to happen.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc.aio
from opentelemetry.context import Context

from headwater import tracing
from headwater.errors import (
    DeadlinePassed,
    DuplicateTransfer,
    StalePeer,
)
from headwater.lifecycle import Event, get_logger
from headwater.v1 import common_pb2, transfer_pb2, transfer_pb2_grpc
from kv_transfer.engine import TransferEngine
from kv_transfer.geometry import Box, Span
from kv_transfer.giving import give
from kv_transfer.incoming import Attempt, Destination, DirectDestination, Incoming
from kv_transfer.landing import Region
from kv_transfer.reception import Reception
from kv_transfer.slots import SlotArena
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
        self.arena = arena
        self.writer = writer
        self._epoch = epoch
        self._address = address
        self._geometry = geometry
        self._layers = layers or Span(0, geometry.num_layers)
        self._heads = heads or Span(0, geometry.num_kv_heads)
        self.options = options
        self._incoming: dict[str, Incoming] = {}
        # Regions that writers may write to, by transfer.
        self._regions: dict[str, Region] = {}
        # Of those, the ones that a lost writer may still write to.
        self._dirty: set[str] = set()
        self.pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="unpack")
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._reap())

    @property
    def open_transfers(self) -> int:
        return len(self._incoming)

    def expect(
        self, transfer_id: str, attempt: int, num_tokens: int, destination: Destination, *, source_dtype: str = ""
    ) -> Incoming:
        """Permission for one transfer of `num_tokens` tokens into `destination`; see `grant`. Its span is part of the
        current trace.

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
        wire_dtype = choose(theirs, ours, self.options.wire_dtype)
        incoming = Incoming(
            transfer_id,
            attempt,
            Box(self._layers, self._heads, Span(0, num_tokens)),
            destination,
            WireFormat.of(self._geometry, wire_dtype),
            resumable=exact(theirs, wire_dtype, ours),
            lease_seconds=self.options.lease_seconds,
            resume_seconds=self.options.resume_seconds,
            on_over=self._on_over,
        )
        if self.options.direct and isinstance(destination, DirectDestination) and not incoming.wire.converts:
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
            slot_bytes=self.arena.slot_bytes,
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
            digests=self.options.digests,
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
        self.pool.shutdown(wait=True)

    async def deliver(
        self, requests: AsyncIterator[transfer_pb2.DeliverRequest], context: Context
    ) -> AsyncIterator[transfer_pb2.DeliverResponse]:
        """One writer's delivery, from open to close.

        Args:
            context: of the writer's span.
        """
        first = await self._first(requests)
        if not first.HasField("open"):
            raise StalePeer("a delivery must begin with `open`.")
        opening = first.open
        incoming, attempt = self._find(opening.key, opening.token)
        region = self._regions.get(incoming.transfer_id) if opening.direct else None
        if opening.direct and region is None:
            raise StalePeer(f"transfer {incoming.transfer_id}: its memory may not be written to page to page.")
        incoming.link(context)
        reception = Reception(self, incoming, attempt, opening, region)
        async with contextlib.aclosing(reception.serve(requests)) as responses:
            async for response in responses:
                yield response

    async def fetch(
        self, requests: AsyncIterator[transfer_pb2.FetchRequest]
    ) -> AsyncIterator[transfer_pb2.FetchResponse]:
        """Gives a prefill rank what is verified of its share."""
        first = await self._first(requests)
        if not first.HasField("open"):
            raise StalePeer("a fetch must begin with `open`.")
        incoming, attempt = self._find(first.open.key, first.open.token)
        async with contextlib.aclosing(give(self, incoming, attempt, first.open, requests)) as responses:
            async for response in responses:
                yield response

    def settle(self, reception: Reception) -> None:
        """A writer is gone. What it could still write to is quarantined."""
        incoming = reception.incoming
        if reception.quiesced:
            self.arena.release(reception.owner)
        elif reception.direct:
            self._dirty.add(incoming.transfer_id)
        else:
            incoming.log.warning("a writer is not known to have stopped; fencing its slots", rank=reception.rank)
            self._spawn(self.arena.replace(self.arena.quarantine(reception.owner)))

    async def _first(self, requests: AsyncIterator[Any]) -> Any:
        try:
            async with asyncio.timeout(self.options.reply_seconds):
                first = await anext(requests, None)
        except TimeoutError:
            seconds = self.options.reply_seconds
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


class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):
    """`TransferService` over a `Receiver`."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Deliver(  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[transfer_pb2.DeliverRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[transfer_pb2.DeliverResponse]:
        return self._receiver.deliver(request_iterator, tracing.caller(context))

    def Fetch(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[transfer_pb2.FetchRequest], context: object
    ) -> AsyncIterator[transfer_pb2.FetchResponse]:
        return self._receiver.fetch(request_iterator)
