"""A worker's share of each request's KV: fetched where an earlier attempt has delivered it, delivered as it is
computed, redirected, closed, released, forgotten.

Lives on the control loop; the compute thread only hands over what has been computed. A share is kept until the
leader says to forget it, because until then it may be redirected.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from opentelemetry.context import Context

from headwater import tracing
from headwater.errors import HeadwaterError
from headwater.lifecycle import Event, get_logger
from headwater.v1 import common_pb2, worker_pb2
from kv_transfer.fetching import fetch_verified
from kv_transfer.geometry import Box, Span
from kv_transfer.landing import Unpacks
from kv_transfer.sender import Outgoing, Sender

log = get_logger(__name__)

# How long the leader may wait to hear of acknowledged boxes.
_TELL_SECONDS = 0.5


@dataclasses.dataclass
class _Share:
    """What this rank has of one request."""

    pages: list[int]
    # Of the request's trace.
    context: Context
    # Of the grant; 0 without one.
    attempt: int = 0
    # Tokens whose KV is in the pages: [0, computed).
    computed: int = 0
    # One for each grant so far; the last one counts.
    outgoing: list[Outgoing] = dataclasses.field(default_factory=list)
    fetching: asyncio.Task[None] | None = None
    closed: bool = False
    aborted: bool = False
    first_token: int | None = None
    # The attempt that was reported as released.
    released: int = -1


class Deliveries:
    """What this rank still owes each request.

    Args:
        destination: this rank's memory behind a request's page table, for what is fetched.
        report: sends a report to the leader.
    """

    def __init__(
        self,
        sender: Sender,
        destination: Callable[[Sequence[int]], Unpacks],
        report: Callable[[worker_pb2.Report], None],
    ) -> None:
        self._sender = sender
        self._destination = destination
        self._report = report
        self._shares: dict[str, _Share] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # What the leader has not been told of, and when it was acknowledged.
        self._boxes: list[tuple[worker_pb2.SentBox, float]] = []

    def open(self, request: worker_pb2.OpenRequest) -> None:
        """A request begins, maybe with pages that others have computed. Without a grant there is nothing to send."""
        share = self._shares[request.request_id] = _Share(
            list(request.pages), tracing.carried(request.trace_context), computed=request.cached_tokens
        )
        if not request.HasField("grant"):
            return
        if request.grant.verified_tokens > request.cached_tokens:
            share.fetching = self._spawn(self._fetch(request.request_id, share, request.grant))
        self._deliver(request.request_id, share, request.grant)

    def computed(self, request_id: str, tokens: Span) -> None:
        """The KV of `tokens` is complete in this rank's pool."""
        share = self._shares[request_id]
        share.computed = tokens.end
        if share.outgoing:
            share.outgoing[-1].send(tokens)

    def redirect(self, redirect: worker_pb2.RedirectDelivery) -> None:
        """All KV of the request, what has been sent included, goes elsewhere."""
        share = self._shares[redirect.request_id]
        if share.aborted:
            return
        share.outgoing[-1].abort()
        self._deliver(redirect.request_id, share, redirect.grant)

    def close(self, request_id: str, first_token: int | None, *, abort: bool) -> None:
        """All has been computed, or the request was cancelled; the second may follow the first."""
        share = self._shares.get(request_id)
        if share is None:
            return
        if not share.closed:
            share.first_token = first_token
        share.closed = True
        share.aborted |= abort
        self._close(request_id, share)

    def forget(self, request_id: str) -> None:
        """The request is over on every rank."""
        del self._shares[request_id]

    def _deliver(self, request_id: str, share: _Share, grant: common_pb2.Grant) -> None:
        attempt = share.attempt = grant.attempt
        with tracing.within(share.context):
            outgoing = self._sender.open(
                grant,
                share.pages,
                lambda error: self._failed(request_id, attempt, error),
                request_id,
                lambda box, num_bytes, seconds: self._sent(request_id, box, num_bytes, seconds),
            )
        share.outgoing.append(outgoing)
        if share.computed > grant.verified_tokens:
            outgoing.send(Span(grant.verified_tokens, share.computed))
        if share.closed:
            self._close(request_id, share)

    def _close(self, request_id: str, share: _Share) -> None:
        if share.aborted and share.fetching is not None:
            share.fetching.cancel()
        if share.outgoing and share.aborted:
            share.outgoing[-1].abort()
        elif share.outgoing:
            share.outgoing[-1].finish(share.first_token)
        self._spawn(self._release(request_id, share, share.attempt))

    async def _release(self, request_id: str, share: _Share, attempt: int) -> None:
        """Reports when nothing of the share is under way, unless it failed and may still be redirected."""
        if share.fetching is not None:
            await asyncio.wait({share.fetching})
        released = worker_pb2.Released(request_id=request_id, attempt=attempt)
        lost = False
        for outgoing in list(share.outgoing):
            sent = await outgoing.ended()
            released.bytes_sent, released.num_receipts = sent.num_bytes, sent.num_receipts
            lost = sent.error is not None
        if share.attempt != attempt or share.released == attempt:
            # Redirected meanwhile, or a second close was faster.
            return
        if lost and not share.aborted:
            return
        share.released = attempt
        self._tell_sent()
        self._report(worker_pb2.Report(released=released))

    async def _fetch(self, request_id: str, share: _Share, grant: common_pb2.Grant) -> None:
        try:
            num_bytes = await fetch_verified(self._sender, grant, self._destination(share.pages))
        except HeadwaterError as error:
            self._failed(request_id, grant.attempt, error)
            return
        share.computed = grant.verified_tokens
        log.event(
            Event.FETCHED,
            request=request_id,
            transfer=grant.transfer_id,
            tokens=[0, grant.verified_tokens],
            num_bytes=num_bytes,
        )
        self._report(worker_pb2.Report(fetched=worker_pb2.Fetched(request_id=request_id)))

    def _failed(self, request_id: str, attempt: int, error: HeadwaterError) -> None:
        failure = worker_pb2.RequestFailed(
            request_id=request_id, error=str(error), error_class=type(error).__name__, attempt=attempt
        )
        self._report(worker_pb2.Report(request_failed=failure))

    def _sent(self, request_id: str, box: Box, num_bytes: int, seconds: float) -> None:
        """A box was acknowledged. The leader is told of many at once."""
        loop = asyncio.get_running_loop()
        if not self._boxes:
            loop.call_later(_TELL_SECONDS, self._tell_sent)
        sent = worker_pb2.SentBox(
            request_id=request_id,
            token_start=box.tokens.start,
            token_end=box.tokens.end,
            num_bytes=num_bytes,
            seconds=seconds,
        )
        self._boxes.append((sent, loop.time()))

    def _tell_sent(self) -> None:
        now = asyncio.get_running_loop().time()
        for sent, acknowledged_at in self._boxes:
            sent.age_seconds = now - acknowledged_at
        if self._boxes:
            boxes = [sent for sent, _ in self._boxes]
            self._report(worker_pb2.Report(kv_sent=worker_pb2.KvSent(boxes=boxes)))
        self._boxes.clear()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
