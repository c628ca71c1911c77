"""One transfer on one decode rank: what has arrived of it, who writes it, how it ends.

It commits when every (layer, head, token) has arrived exactly once, is verified and in place, and the first
token is known; only then may anyone read the destination. Tries of a transfer follow each other: when one is
lost, what it brought stays, and `regrant` begins the next. Knows no streams and no slots; `receiver` does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Protocol, runtime_checkable

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context

from headwater import tracing
from headwater.errors import DeadlinePassed, HeadwaterError, StalePeer, TransferFailed
from headwater.lifecycle import Event, Logger, get_logger
from kv_transfer import memory, metrics
from kv_transfer.coverage import Coverage
from kv_transfer.geometry import Box, PagedLayout, PageTable
from kv_transfer.planner import plan
from kv_transfer.session import ReceiverEvent, ReceiverState, receiver_session
from kv_transfer.wire import WireFormat

_log = get_logger(__name__)


class Destination(Protocol):
    """Where a decode rank wants its share of the KV of one request."""

    def unpack(self, box: Box, address: int) -> None:
        """Takes the packed `box` (form: `kv_transfer.planner`, of the destination's own element type) at `address`.
        Called from worker threads, at most once per cell and attempt, possibly for several boxes at a time.
        """

    def digest(self, box: Box) -> bytes:
        """xxh3-128 of the packed `box`, from what `unpack` has put in place. Called from worker threads."""

    def pack(self, box: Box, address: int) -> None:
        """The inverse, for an attempt that takes over from another. Called from worker threads."""


@runtime_checkable
class DirectDestination(Destination, Protocol):
    """A destination whose memory writers may write to themselves: host memory of its own, that nobody else uses."""

    @property
    def layout(self) -> PagedLayout:
        """The shape of it."""

    @property
    def pages(self) -> PageTable:
        """The request's page table."""

    @property
    def address(self) -> int:
        """Of the layout's first byte; [address, address + layout.total_bytes) may be registered."""

    def retire(self) -> None:
        """A writer may still know the addresses: give the memory back, and keep them from being used again."""


@dataclasses.dataclass(frozen=True)
class PagedDestination:
    """Host memory in the form of a `PagedLayout`."""

    layout: PagedLayout
    pages: PageTable
    address: int

    def unpack(self, box: Box, address: int) -> None:
        memory.unpack(plan(self.layout, self.pages, box).copies(), address, self.address)

    def digest(self, box: Box) -> bytes:
        return memory.digest_in_place(plan(self.layout, self.pages, box).copies(), self.address)

    def pack(self, box: Box, address: int) -> None:
        memory.pack(plan(self.layout, self.pages, box).copies(), self.address, address)


@dataclasses.dataclass(frozen=True)
class Delivery:
    """What a committed transfer brought."""

    first_token: int
    num_bytes: int
    # From the first receipt to the commit.
    seconds: float


@dataclasses.dataclass(frozen=True)
class Suspension:
    """An attempt is over, and another one may go on from `verified_tokens`."""

    attempt: int
    verified_tokens: int
    reason: str


class Attempt:
    """One try of a transfer."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.token = secrets.token_bytes(16)
        self.writers: set[int] = set()
        # Ranks that have closed; each writes once.
        self.finished: set[int] = set()
        # Set when no more is wanted of this attempt: each writer is then told to stop.
        self.stopped = asyncio.Event()
        self.stop_reason = ""
        # Monotonic seconds; renewed by every receipt, so it starts with the first chunk.
        self.lease_until: float | None = None


class Incoming:
    """One expected transfer.

    Args:
        whole: what must arrive here.
        wire: form of the boxes.
        resumable: whether the destination could give back, bit for bit, what it took.
        lease_seconds: after this long without a receipt, once there was one, the attempt is over.
        resume_seconds: how long an attempt that is over may be followed by another; 0 fails the transfer at once.
        on_over: called when the transfer has ended and nothing touches the destination any more.
    """

    def __init__(
        self,
        transfer_id: str,
        attempt: int,
        whole: Box,
        destination: Destination,
        wire: WireFormat,
        *,
        resumable: bool,
        lease_seconds: float,
        resume_seconds: float,
        on_over: Callable[[Incoming], None],
    ) -> None:
        self.transfer_id = transfer_id
        self.attempt = Attempt(attempt)
        self.destination = destination
        self.wire = wire
        self.coverage = Coverage(whole)
        self.session = receiver_session(transfer_id)
        # Tokens that the current attempt need not send.
        self.verified_tokens = 0
        self._resumable = resumable
        self._lease_seconds = lease_seconds
        self._resume_seconds = resume_seconds
        self._resume_until = 0.0
        self._on_over = on_over
        self._committed: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._committed.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._suspensions: asyncio.Queue[Suspension] = asyncio.Queue()
        # Writers of all attempts that have not closed, and boxes that have a place in the coverage and are still
        # being verified and put in place.
        self._num_writers = 0
        self._num_landing = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._nothing_landing = asyncio.Event()
        self._nothing_landing.set()
        self._over = False
        self._first_token: int | None = None
        self._first_receipt: float | None = None
        self._num_bytes = 0
        # Of whoever expects the transfer, and the spans of its writers.
        self._context = contexts.get_current()
        self._links: list[trace.Link] = []

    @property
    def log(self) -> Logger:
        return _log.bind(transfer=self.transfer_id, attempt=self.attempt.number)

    @property
    def quiet(self) -> bool:
        """No writer of any attempt has an open delivery."""
        return self._quiet.is_set()

    async def committed(self) -> Delivery:
        """Waits for the commit, over as many attempts as it takes.

        Raises:
            TransferFailed, PeerError: the transfer ended otherwise; nothing may be read.
        """
        return await asyncio.shield(self._committed)

    async def changes(self) -> AsyncGenerator[Suspension | Delivery, None]:
        """Every attempt that is over, and the commit at last.

        Raises:
            TransferFailed, PeerError: as `committed`.
        """
        ended = asyncio.ensure_future(self.committed())
        notice = asyncio.ensure_future(self._suspensions.get())
        try:
            while not ended.done():
                waits: set[asyncio.Future[Delivery] | asyncio.Future[Suspension]] = {ended, notice}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if notice.done():
                    yield notice.result()
                    notice = asyncio.ensure_future(self._suspensions.get())
            yield ended.result()
        finally:
            for waiting in (ended, notice):
                waiting.cancel()
            await asyncio.gather(ended, notice, return_exceptions=True)

    async def abort(self, reason: str, deadline_seconds: float) -> None:
        """Ends the transfer from this side and waits until every writer has closed (or the deadline passed; lost
        writers' slots are then in quarantine) and nothing is being put in place.
        """
        if not self.session.terminal:
            self.session.on(ReceiverEvent.ABORT)
            self.log.event(Event.CANCELLED, reason=reason)
            self._end(reason, TransferFailed(f"transfer {self.transfer_id} was aborted: {reason}."))
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._quiet.wait()
        except TimeoutError:
            self.log.warning("writers did not close in time", writers=self._num_writers)
        await self._nothing_landing.wait()

    def wants(self, attempt: Attempt) -> bool:
        """Whether this attempt is the current one, and not over."""
        return not self.session.terminal and attempt is self.attempt and not attempt.stopped.is_set()

    def fail(self, error: HeadwaterError) -> None:
        """Ends the transfer: no other attempt could do better."""
        if self.session.terminal:
            self.log.warning("error after the end of the transfer", error=str(error))
            return
        self.session.on(ReceiverEvent.FAIL)
        self._failed(error)

    def suspend(self, attempt: Attempt, error: HeadwaterError) -> None:
        """The attempt is lost. Its writers are told to stop, and another attempt may follow."""
        if not self.wants(attempt):
            return
        if self._resume_seconds == 0 or self.session.state is ReceiverState.GRANTED:
            self.fail(error)
            return
        self.session.on(ReceiverEvent.SUSPEND)
        self._resume_until = time.monotonic() + self._resume_seconds
        verified = self._verified_prefix()
        self.log.event(Event.SUSPENDED, error=str(error), verified_tokens=verified)
        self._stop(attempt, str(error))
        self._suspensions.put_nowait(Suspension(attempt.number, verified, str(error)))

    async def regrant(self, number: int, at_most: int | None = None) -> None:
        """Begins attempt `number` with what is verified of the earlier ones, or with the tokens before `at_most`.

        Raises:
            StalePeer: the transfer has ended, or `number` does not follow the current attempt.
        """
        if self.session.terminal or number != self.attempt.number + 1:
            raise StalePeer(
                f"transfer {self.transfer_id} is {self.session.state.value} in attempt {self.attempt.number}; "
                f"attempt {number} cannot begin."
            )
        self.session.on(ReceiverEvent.REGRANT)
        self._stop(self.attempt, f"attempt {number} has begun")
        self.attempt = Attempt(number)
        await self._nothing_landing.wait()
        if self.session.terminal:
            raise StalePeer(f"transfer {self.transfer_id} ended ({self.session.state.value}) while it was regranted.")
        verified = self._verified_prefix()
        self.verified_tokens = verified if at_most is None else min(verified, at_most)
        self.coverage.cut(self.verified_tokens)
        metrics.RESUMES.inc()
        self.log.event(Event.ADMITTED, verified_tokens=self.verified_tokens)

    def reap(self, now: float) -> None:
        """Ends what has waited for too long. Called now and then, whatever else happens.

        Args:
            now: monotonic seconds.
        """
        lease = self.attempt.lease_until
        if self.session.state is ReceiverState.RECEIVING and lease is not None and now > lease:
            metrics.LEASES_EXPIRED.inc()
            self.suspend(
                self.attempt,
                DeadlinePassed(
                    f"transfer {self.transfer_id}: no chunk came for {self._lease_seconds:g} s (deadlines.lease), and "
                    f"{self.coverage.missing} of {self.coverage.whole.volume} cells or the first token are missing."
                ),
            )
        elif self.session.state is ReceiverState.SUSPENDED and now > self._resume_until:
            self.session.on(ReceiverEvent.EXPIRE)
            self._failed(
                TransferFailed(
                    f"transfer {self.transfer_id}: attempt {self.attempt.number} was lost "
                    f"({self.attempt.stop_reason}) and no other began within {self._resume_seconds:g} s "
                    "(deadlines.resume)."
                )
            )

    def writer_opened(self, attempt: Attempt, rank: int) -> None:
        """Raises StalePeer when this rank may not write (any more)."""
        if not self.wants(attempt):
            raise StalePeer(f"transfer {self.transfer_id}: attempt {attempt.number} is over: {attempt.stop_reason}.")
        if rank in attempt.writers or rank in attempt.finished:
            raise StalePeer(f"transfer {self.transfer_id}: rank {rank} has already opened a delivery.")
        self.session.on(ReceiverEvent.OPEN)
        attempt.writers.add(rank)
        self._num_writers += 1
        self._quiet.clear()

    def writer_closed(self, attempt: Attempt, rank: int) -> None:
        attempt.writers.discard(rank)
        attempt.finished.add(rank)
        self._num_writers -= 1
        if not self._num_writers:
            self._quiet.set()
        self._tell_if_over()

    def link(self, context: Context) -> None:
        """A writer's span is in `context`."""
        span = trace.get_current_span(context).get_span_context()
        if span.is_valid:
            self._links.append(trace.Link(span))

    def landing(self, attempt: Attempt, box: Box) -> None:
        """`box` is about to be verified and put in place. `landed` or `not_landed` must follow.

        Raises:
            StalePeer: the attempt is over; nothing changes.
            ValueError: it does not belong to the transfer, or overlaps what is already there; nothing changes.
        """
        if not self.wants(attempt):
            raise StalePeer(f"transfer {self.transfer_id}: attempt {attempt.number} is over: {attempt.stop_reason}.")
        self.coverage.add(box)
        self._num_landing += 1
        self._nothing_landing.clear()

    def landed(self, attempt: Attempt, num_bytes: int) -> None:
        """A box is verified and in place."""
        self._one_less_landing()
        self._num_bytes += num_bytes
        self._first_receipt = self._first_receipt or time.monotonic()
        # An attempt that has just been stopped may have its last boxes land; the next one need not send them.
        if attempt is self.attempt and self.session.state is ReceiverState.RECEIVING:
            attempt.lease_until = time.monotonic() + self._lease_seconds
            self.session.on(ReceiverEvent.RECEIPT)
            self._commit_when_covered()

    def not_landed(self, error: HeadwaterError) -> None:
        """A box did not prove to be what was sent: its cells are covered by nothing, so the transfer is over."""
        self.fail(error)
        self._one_less_landing()

    def first_token(self, attempt: Attempt, token: int) -> None:
        """The rank that sampled has said what it sampled."""
        if attempt is self.attempt and self.session.state is ReceiverState.RECEIVING:
            self._first_token = token
            self._commit_when_covered()

    def _verified_prefix(self) -> int:
        # The last token is always computed again: the first answer token is sampled from it.
        return min(self.coverage.prefix(), self.coverage.whole.tokens.end - 1) if self._resumable else 0

    def _one_less_landing(self) -> None:
        self._num_landing -= 1
        if not self._num_landing:
            self._nothing_landing.set()
        self._tell_if_over()

    def _commit_when_covered(self) -> None:
        if self._first_token is None or self._first_receipt is None:
            return
        if self._num_landing or not self.coverage.complete:
            return
        self.session.on(ReceiverEvent.COMMIT)
        seconds = time.monotonic() - self._first_receipt
        self._committed.set_result(Delivery(self._first_token, self._num_bytes, seconds))
        self.log.event(Event.COMMITTED, num_bytes=self._num_bytes, seconds=round(seconds, 6))
        metrics.TRANSFERS.labels(ReceiverState.COMMITTED.value).inc()
        metrics.TRANSFER_SECONDS.observe(seconds)
        metrics.TRANSFER_BYTES.observe(self._num_bytes)
        self._trace(None)

    def _failed(self, error: HeadwaterError) -> None:
        self.log.event(Event.FAILED, error=str(error))
        self._end(str(error), error)

    def _end(self, reason: str, error: HeadwaterError) -> None:
        metrics.TRANSFERS.labels(self.session.state.value).inc()
        self._trace(error)
        self._stop(self.attempt, reason)
        self._committed.set_exception(error)
        self._tell_if_over()

    def _trace(self, error: HeadwaterError | None) -> None:
        """The transfer has ended: its span is from the first receipt on."""
        aborted = self.session.state is ReceiverState.ABORTED
        if aborted and self._first_receipt is None:
            return
        now = time.monotonic()
        attributes: tracing.Attributes = {
            "headwater.transfer.id": self.transfer_id,
            "headwater.attempt": self.attempt.number,
            "headwater.bytes": self._num_bytes,
            "headwater.state": self.session.state.value,
        }
        tracing.record(
            "receive",
            attributes,
            self._first_receipt or now,
            now,
            parent=self._context,
            links=self._links,
            error=None if aborted else error,
            was_cancelled=aborted,
        )

    @staticmethod
    def _stop(attempt: Attempt, reason: str) -> None:
        if not attempt.stopped.is_set():
            attempt.stop_reason = reason
            attempt.stopped.set()

    def _tell_if_over(self) -> None:
        if self.session.terminal and not self._num_writers and not self._num_landing and not self._over:
            self._over = True
            self._on_over(self)
