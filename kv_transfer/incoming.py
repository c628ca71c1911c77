"""One transfer on the decode side: what has arrived of it, who writes it, how it ends.

It commits when every (layer, head, token) has arrived exactly once, is verified and unpacked, and the first
token is known; only then may anyone read the destination. Knows no streams and no slots; `receiver` does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from headwater.errors import HeadwaterError, StalePeer, TransferFailed
from headwater.lifecycle import Event, get_logger
from headwater.v1 import common_pb2
from kv_transfer import memory, metrics
from kv_transfer.coverage import Coverage
from kv_transfer.geometry import Box, CellSize, PagedLayout
from kv_transfer.planner import plan
from kv_transfer.session import ReceiverEvent, ReceiverState, receiver_session

log = get_logger(__name__)


class Destination(Protocol):
    """Where a decode engine wants the KV of one request."""

    def unpack(self, box: Box, address: int) -> None:
        """Takes the packed `box` at `address` (form: `kv_transfer.planner`). Called from worker threads, at
        most once per cell, possibly for several boxes at a time.
        """


@dataclasses.dataclass(frozen=True)
class PagedDestination:
    """Host memory in the form of a `PagedLayout`."""

    layout: PagedLayout
    pages: Sequence[int]
    address: int

    def unpack(self, box: Box, address: int) -> None:
        memory.unpack(plan(self.layout, self.pages, box), address, self.address)


@dataclasses.dataclass(frozen=True)
class Delivery:
    """What a committed transfer brought."""

    first_token: int
    num_bytes: int
    # From the first receipt to the commit.
    seconds: float


class Incoming:
    """One expected transfer.

    Args:
        cell, whole: what must arrive.
        on_over: called when the transfer has ended and no writer is left.
    """

    def __init__(
        self,
        grant: common_pb2.Grant,
        cell: CellSize,
        whole: Box,
        destination: Destination,
        on_over: Callable[[Incoming], None],
    ) -> None:
        self.grant = grant
        self.cell = cell
        self.destination = destination
        self.log = log.bind(transfer=grant.transfer_id, attempt=grant.attempt)
        self.coverage = Coverage(whole)
        self.session = receiver_session(grant.transfer_id)
        self.writers: set[int] = set()
        # Set when this side wants no more: each writer is then told to stop.
        self.stopped = asyncio.Event()
        self.stop_reason = ""
        self._on_over = on_over
        self._committed: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._committed.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._first_token: int | None = None
        self._first_receipt: float | None = None
        self._num_bytes = 0
        # Boxes that have a place in the coverage and are still being verified and unpacked.
        self._unpacking = 0

    async def committed(self) -> Delivery:
        """Waits for the commit.

        Raises:
            TransferFailed, PeerError: the transfer ended otherwise; nothing may be read.
        """
        return await asyncio.shield(self._committed)

    async def abort(self, reason: str, deadline_seconds: float) -> None:
        """Ends the transfer from this side and waits until every writer has closed (or the deadline passed,
        after which lost writers' slots are in quarantine).
        """
        if not self.session.terminal:
            self.session.on(ReceiverEvent.ABORT)
            self.log.event(Event.ABORTED, reason=reason)
            self._stop(reason, TransferFailed(f"transfer {self.grant.transfer_id} was aborted: {reason}."))
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._quiet.wait()
        except TimeoutError:
            self.log.warning("writers did not close in time", writers=sorted(self.writers))

    def fail(self, error: HeadwaterError) -> None:
        if self.session.terminal:
            self.log.warning("error after the end of the transfer", error=str(error))
            return
        self.session.on(ReceiverEvent.FAIL)
        self.log.event(Event.FAILED, error=str(error))
        self._stop(str(error), error)

    def writer_opened(self, rank: int) -> None:
        if rank in self.writers:
            raise StalePeer(f"transfer {self.grant.transfer_id}: rank {rank} already has a delivery open.")
        if not self.session.terminal:
            self.session.on(ReceiverEvent.OPEN)
        self.writers.add(rank)
        self._quiet.clear()

    def writer_closed(self, rank: int) -> None:
        self.writers.discard(rank)
        if not self.writers:
            self._quiet.set()
            if self.session.terminal:
                self._on_over(self)

    def arriving(self, box: Box) -> None:
        """`box` is about to be verified and unpacked.

        Raises:
            ValueError: it does not belong to the transfer, or overlaps what is already there; nothing changes.
        """
        self.coverage.add(box)
        self._unpacking += 1

    def received(self, num_bytes: int) -> None:
        """A box that was arriving is verified and unpacked."""
        self._unpacking -= 1
        if self.session.terminal:
            return
        self.session.on(ReceiverEvent.RECEIPT)
        self._first_receipt = self._first_receipt or time.monotonic()
        self._num_bytes += num_bytes
        self._commit_when_covered()

    def first_token(self, token: int) -> None:
        self._first_token = token
        if not self.session.terminal:
            self._commit_when_covered()

    def _commit_when_covered(self) -> None:
        if self._first_token is None or self._first_receipt is None:
            return
        if self._unpacking or not self.coverage.complete:
            return
        self.session.on(ReceiverEvent.COMMIT)
        seconds = time.monotonic() - self._first_receipt
        self._committed.set_result(Delivery(self._first_token, self._num_bytes, seconds))
        self.log.event(Event.COMMITTED, num_bytes=self._num_bytes, seconds=round(seconds, 6))
        metrics.TRANSFERS_RECEIVED.labels(ReceiverState.COMMITTED.value).inc()
        metrics.TRANSFER_SECONDS.observe(seconds)

    def _stop(self, reason: str, error: HeadwaterError) -> None:
        metrics.TRANSFERS_RECEIVED.labels(self.session.state.value).inc()
        self.stop_reason = reason
        self.stopped.set()
        self._committed.set_exception(error)
        if not self.writers:
            self._on_over(self)
