"""The leader: takes requests, lets the scheduler plan, sends the plan, and tells callers what came of it.

Owns every decision of the group and no tensor. One event loop; nothing here blocks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Mapping, Sequence

import numpy as np

from headwater.cluster import Deadlines
from headwater.errors import (
    CapacityError,
    DeadlinePassed,
    HeadwaterError,
    InvalidRequest,
    PeerUnavailable,
    StalePeer,
    error_class,
)
from headwater.lifecycle import Event, Logger, get_logger
from headwater.tokens import TOKEN_BYTES
from headwater.v1 import common_pb2, prefill_pb2, worker_pb2
from prefill_node import leader_metrics as metrics
from prefill_node.costs import LearnedCost
from prefill_node.history import History, Sent, StageRun
from prefill_node.links import WorkerLinks
from prefill_node.scheduler import Entry, Request, Scheduler

log = get_logger(__name__)

# How much the newest box counts in `transfer_seconds`.
_NEWEST = 0.1
# A caller hears of chunks so often at most: a message of gRPC costs the leader a fifth of what a step of 32 ranks does.
_PROGRESS_SECONDS = 0.2


@dataclasses.dataclass
class _Caller:
    """A request as its caller sees it: what is sent back, and when things happened (monotonic seconds)."""

    request: Request
    queued_at: float
    events: asyncio.Queue[prefill_pb2.PrefillResponse | None] = dataclasses.field(default_factory=asyncio.Queue)
    # What earlier attempts delivered is being fetched, and is there.
    fetch_at: float = 0.0
    fetched_at: float = 0.0
    scheduled_at: float = 0.0
    # When the caller was last told of a chunk.
    told_at: float = float("-inf")
    error: HeadwaterError | None = None
    bytes_sent: int = 0
    num_receipts: int = 0
    # Until when the KV is kept for another decode group, after this one was lost.
    hold: asyncio.TimerHandle | None = None
    # Until when the request may wait for its first step.
    patience: asyncio.TimerHandle | None = None

    def tell(self, **event: object) -> None:
        self.events.put_nowait(prefill_pb2.PrefillResponse(**event))  # type: ignore[arg-type]


class Leader:
    """One prefill group's decisions.

    Args:
        geometry: of the group, with vocabulary and context size for checking requests.
        cost: what the stages take; refined by every step.
        deadlines: of the cluster file; `queue`, `step` and `resume` matter here.
        tp: ranks of each stage.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        geometry: common_pb2.Geometry,
        cost: LearnedCost,
        deadlines: Deadlines,
        *,
        tp: int,
    ) -> None:
        self.scheduler = scheduler
        self._tp = tp
        self.cost = cost
        self.history = History()
        self._geometry = geometry
        self._deadlines = deadlines
        self._callers: dict[str, _Caller] = {}
        # Set when there is no request, whether or not its caller has left.
        self.idle = asyncio.Event()
        self.idle.set()
        # Of a box of KV, lately.
        self.transfer_seconds = 0.0
        self._links: WorkerLinks | None = None
        # What each stage was given and has not reported, by (stage, sequence).
        self._given: dict[tuple[int, int], worker_pb2.Step] = {}
        # Looks whether a stage has finished a step since `_progress_at`.
        self._watch: asyncio.TimerHandle | None = None
        self._progress_at = 0.0
        # Looking a label up takes longer than counting.
        stages = range(self.num_stages)
        self._busy = [metrics.STAGE_SECONDS.labels(stage) for stage in stages]
        self._waiting = [metrics.STAGE_WAIT_SECONDS.labels(stage) for stage in stages]
        self._cost_error = [metrics.COST_ERROR.labels(stage) for stage in stages]
        self._chunk_seconds = [metrics.CHUNK_SECONDS.labels(stage) for stage in stages]
        # Why the group does not serve; empty when it does.
        self.not_serving = "starting"

    @property
    def num_stages(self) -> int:
        return len(self.cost.stages)

    def begin(self, links: WorkerLinks) -> None:
        """All ranks are ready."""
        self._links = links
        self.not_serving = ""
        scheduler = self.scheduler
        metrics.QUEUED.set_function(lambda: scheduler.num_queued)
        metrics.RUNNING.set_function(lambda: scheduler.num_running)
        metrics.OLDEST_SECONDS.set_function(lambda: scheduler.oldest_queued_seconds)
        pool = scheduler.pool
        metrics.PAGES.labels("free").set_function(lambda: pool.free_pages - pool.cached_pages)
        metrics.PAGES.labels("cached").set_function(lambda: pool.cached_pages)
        metrics.PAGES.labels("held").set_function(lambda: pool.num_pages - pool.free_pages)

    async def prefill(
        self, request: prefill_pb2.PrefillRequest, trace_context: Mapping[str, str]
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """Runs one request. Leaving the iterator early cancels it.

        Args:
            trace_context: as in OpenRequest.

        Raises:
            InvalidRequest, CapacityError, DuplicateTransfer: refused; nothing was started.
            PeerUnavailable: the group does not serve, or stopped serving.
            TransferFailed, PeerError: the KV could not be delivered.
        """
        # Every access copies them.
        tokens = request.tokens
        self._check(request, tokens)
        accepted = Request(
            request_id=request.request_id,
            tokens=tokens,
            sampling=request.sampling,
            grant=request.grant if request.HasField("grant") else None,
            priority=request.priority,
            trace_context=trace_context,
        )
        try:
            self.scheduler.submit(accepted)
        except CapacityError as error:
            # When the next of those that wait has gone, about.
            waiting = self.scheduler.num_queued + self.scheduler.num_running
            error.retry_after_seconds = max(1.0, self.scheduler.backlog_seconds / waiting)
            raise
        self.idle.clear()
        caller = _Caller(accepted, time.monotonic())
        self._callers[accepted.request_id] = caller
        self.history.begin(accepted.request_id, caller.queued_at)
        caller.patience = asyncio.get_running_loop().call_later(self._deadlines.queue, self._give_up, caller)
        self._log(accepted).event(Event.QUEUED, num_tokens=accepted.num_tokens)
        try:
            self._advance()
            while (event := await caller.events.get()) is not None:
                yield event
            if caller.error is not None:
                raise caller.error
        finally:
            self._leave(caller)

    def redirect(self, request_id: str, grant: common_pb2.Grant) -> None:
        """Sends a request's KV where another grant allows.

        Raises:
            StalePeer: there is nothing left to redirect.
        """
        caller = self._callers.get(request_id)
        if caller is None or caller.error is not None or self._links is None or self.not_serving:
            raise StalePeer(f"request {request_id} has no KV here that could be redirected: it is over.")
        self._append(self.scheduler.redirect(request_id, grant))
        if caller.hold is not None:
            caller.hold.cancel()
            caller.hold = None
        caller.bytes_sent = caller.num_receipts = 0
        self._log(caller.request).event(Event.REDIRECTED, attempt=grant.attempt)

    def on_report(self, rank: int, report: worker_pb2.Report) -> None:
        """A worker says something."""
        match report.WhichOneof("message"):
            case "step_done":
                self._stage_done(rank // self._tp, report.step_done)
            case "kv_sent":
                now = time.monotonic()
                for box in report.kv_sent.boxes:
                    self.transfer_seconds += _NEWEST * (box.seconds - self.transfer_seconds)
                    end = now - box.age_seconds
                    self.history.sent(Sent(rank, box, end - box.seconds, end))
            case "request_failed":
                self._request_failed(report.request_failed)
            case "fetched":
                self._fetched(report.fetched.request_id, rank)
            case "released":
                self._released(rank, report.released)

    def stop_serving(self, reason: str) -> None:
        """The group cannot go on: every request fails at once. Pages stay as they are; their ranks are gone."""
        if self.not_serving:
            return
        self.not_serving = reason
        if self._watch is not None:
            self._watch.cancel()
        for caller in list(self._callers.values()):
            caller.error = caller.error or PeerUnavailable(f"the prefill group stopped serving: {reason}.")
            caller.events.put_nowait(None)

    def _check(self, request: prefill_pb2.PrefillRequest, tokens: bytes) -> None:
        if self.not_serving:
            raise PeerUnavailable(f"the prefill group is not serving: {self.not_serving}.")
        if not request.request_id:
            raise InvalidRequest("request_id is empty; give each request its own.")
        num_tokens, beside = divmod(len(tokens), TOKEN_BYTES)
        if not tokens or beside:
            raise InvalidRequest(
                f"the prompt has {len(tokens)} bytes; give at least one token, each of {TOKEN_BYTES} bytes."
            )
        largest = int(np.frombuffer(tokens, "<u4").max())
        if largest >= self._geometry.vocab_size:
            raise InvalidRequest(
                f"token id {largest} is out of the vocabulary (0 to {self._geometry.vocab_size - 1}). "
                "Tokenise with this model's tokenizer."
            )
        if num_tokens > self._geometry.max_context_tokens:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens; the model's context is {self._geometry.max_context_tokens}."
            )

    def _advance(self) -> None:
        """Sends whatever the scheduler allows now."""
        if self._links is None or self.not_serving:
            return
        entries = self.scheduler.plan()
        self._append(entries)
        for entry in entries:
            if isinstance(entry.entry, worker_pb2.Step):
                assert entry.stage is not None
                if not self._given:
                    self._progress_at = time.monotonic()
                self._given[entry.stage, entry.entry.sequence] = entry.entry
                if entry.stage == 0:
                    self._step_begun(entry.entry)
            elif isinstance(entry.entry, worker_pb2.OpenRequest):
                if self.scheduler.pool.keeps_prefixes:
                    metrics.CACHE_QUERY_TOKENS.inc(entry.entry.num_tokens)
                    metrics.CACHE_HIT_TOKENS.inc(entry.entry.cached_tokens)
                if self.scheduler.is_fetching(entry.entry.request_id):
                    self._callers[entry.entry.request_id].fetch_at = time.monotonic()

    def _request_failed(self, failed: worker_pb2.RequestFailed) -> None:
        """A rank cannot deliver."""
        caller = self._callers.get(failed.request_id)
        if caller is None or caller.error is not None or failed.attempt != caller.request.attempt:
            return
        error = error_class(failed.error_class)(failed.error)
        lost = isinstance(error, PeerUnavailable | DeadlinePassed)
        if not lost or self.scheduler.is_fetching(failed.request_id):
            self._fail(caller, error)
        elif caller.hold is None:
            caller.hold = asyncio.get_running_loop().call_later(self._deadlines.resume, self._fail, caller, error)
            caller.tell(delivery_lost=prefill_pb2.DeliveryLost(attempt=failed.attempt, error=failed.error))
            self._log(caller.request).event(Event.DELIVERY_LOST, attempt=failed.attempt, error=failed.error)

    def _fail(self, caller: _Caller, error: HeadwaterError) -> None:
        if caller.error is None:
            caller.error = error
            self._cancel(caller.request.request_id)
            # The caller need not wait for the ranks; the pages do.
            caller.events.put_nowait(None)

    def _append(self, entries: Sequence[Entry]) -> None:
        if self._links is not None:
            for entry in entries:
                self._links.append(entry.entry, entry.stage)

    def _step_begun(self, step: worker_pb2.Step) -> None:
        metrics.STEPS.inc()
        if self._watch is None:
            self._expect_progress()
        for chunk in step.chunks:
            caller = self._callers.get(chunk.request_id)
            if caller is not None and chunk.start == caller.request.first_token and not caller.scheduled_at:
                self._scheduled(caller)

    def _expect_progress(self) -> None:
        """Some stage must finish a step in time, if there is any. A timer for each step would cost more than this."""
        self._watch = None
        if not self._given:
            return
        left = self._progress_at + self._deadlines.step - time.monotonic()
        if left > 0:
            self._watch = asyncio.get_running_loop().call_later(left, self._expect_progress)
            return
        stage = min(stage for stage, _ in self._given)
        if self._links is not None:
            self._links.lose(
                f"no stage finished a step within {self._deadlines.step:g} s (deadlines.step); stage {stage} is the "
                "first that has one. Its ranks' logs say what they do"
            )

    def _give_up(self, caller: _Caller) -> None:
        """Its first step did not come in time."""
        seconds = self._deadlines.queue
        self._fail(
            caller,
            DeadlinePassed(
                f"the request waited {seconds:g} s for pages and its turn (deadlines.queue): "
                f"{self.scheduler.num_running} requests run and {self.scheduler.num_queued} wait. Try again later, or "
                "add a group."
            ),
        )

    def _scheduled(self, caller: _Caller) -> None:
        if caller.patience is not None:
            caller.patience.cancel()
        caller.scheduled_at = time.monotonic()
        metrics.QUEUE_SECONDS.observe(caller.scheduled_at - caller.queued_at)
        num_chunks = caller.request.num_chunks
        caller.tell(scheduled=prefill_pb2.PrefillScheduled(num_chunks=num_chunks))
        self._log(caller.request).event(Event.SCHEDULED, num_chunks=num_chunks)

    def _stage_done(self, stage: int, done: worker_pb2.StepDone) -> None:
        now = time.monotonic()
        step = self._given.pop((stage, done.sequence))
        self._progress_at = now
        computed = tuple((chunk.request_id, chunk.start, chunk.end) for chunk in step.chunks if not chunk.void)
        if computed:
            self.cost.add(stage, [(start, end - start) for _, start, end in computed], done.compute_seconds)
            self.history.ran(StageRun(stage, done.sequence, computed, now - done.compute_seconds, now))
            self._busy[stage].inc(done.compute_seconds)
            self._chunk_seconds[stage].observe(done.compute_seconds)
            error = self.cost.stages[stage].error
            if error is not None:
                self._cost_error[stage].observe(error)
        self._waiting[stage].inc(done.wait_seconds)
        self._finish_chunks(self.scheduler.step_done(stage, done.sequence), done, now)
        self._advance()

    def _finish_chunks(self, chunks: Sequence[worker_pb2.Chunk], done: worker_pb2.StepDone, now: float) -> None:
        """The last stage has computed a step."""
        sampled = {token.request_id: token.token_id for token in done.sampled}
        for chunk in chunks:
            if chunk.void or (chunk.last and chunk.request_id not in sampled):
                # Cancelled before, or while, the last stage had it.
                continue
            metrics.TOKENS.inc(chunk.end - chunk.start)
            metrics.CHUNK_TOKENS.observe(chunk.end - chunk.start)
            caller = self._callers.get(chunk.request_id)
            if caller is None:
                continue
            if chunk.last:
                caller.tell(first_token=self._first_token(caller, sampled[chunk.request_id], now))
                metrics.PREFILL_SECONDS.observe(now - caller.scheduled_at)
                self._log(caller.request).event(Event.FIRST_TOKEN_SAMPLED, token=sampled[chunk.request_id])
            elif now >= caller.told_at + _PROGRESS_SECONDS:
                caller.told_at = now
                caller.tell(chunk_done=prefill_pb2.ChunkDone(token_end=chunk.end))

    def _first_token(self, caller: _Caller, token: int, now: float) -> prefill_pb2.FirstToken:
        """With where the time went: what the last stage did from the first step on, and what was before that."""
        own, others = self.history.computing(caller.request.request_id, self.num_stages - 1, caller.scheduled_at, now)
        fetching = caller.fetched_at - caller.fetch_at
        return prefill_pb2.FirstToken(
            token_id=token,
            queue_seconds=caller.scheduled_at - caller.queued_at - fetching + others,
            exposed_transfer_seconds=fetching,
            compute_seconds=own,
            bubble_seconds=now - caller.scheduled_at - own - others,
        )

    def _fetched(self, request_id: str, rank: int) -> None:
        self.scheduler.fetched(request_id, rank)
        caller = self._callers.get(request_id)
        if caller is not None and not self.scheduler.is_fetching(request_id):
            caller.fetched_at = time.monotonic()
            metrics.FETCH_SECONDS.observe(caller.fetched_at - caller.fetch_at)
        self._advance()

    def _released(self, rank: int, released: worker_pb2.Released) -> None:
        caller = self._callers.get(released.request_id)
        if caller is not None and released.attempt == caller.request.attempt:
            caller.bytes_sent += released.bytes_sent
            caller.num_receipts += released.num_receipts
        over = self.scheduler.released(released.request_id, rank, released.attempt)
        if not over:
            return
        self._append(over)
        if self.scheduler.num_running == 0:
            self.scheduler.pool.check_idle()
        if caller is not None:
            self._log(caller.request).event(Event.RELEASED, bytes_sent=caller.bytes_sent)
            if caller.error is None:
                caller.tell(
                    completed=prefill_pb2.PrefillCompleted(
                        bytes_sent=caller.bytes_sent, num_receipts=caller.num_receipts
                    )
                )
            caller.events.put_nowait(None)
        self._advance()
        self._note_idle()

    def _leave(self, caller: _Caller) -> None:
        """The caller is gone: answered, or cancelled while the request still runs."""
        request_id = caller.request.request_id
        self._callers.pop(request_id, None)
        self.history.end(request_id, time.monotonic())
        for timer in (caller.hold, caller.patience):
            if timer is not None:
                timer.cancel()
        if caller.error is not None:
            self._log(caller.request).event(Event.FAILED, error=str(caller.error))
            metrics.REQUESTS.labels(type(caller.error).__name__).inc()
        elif self._cancel(request_id):
            self._log(caller.request).event(Event.CANCELLED)
            metrics.REQUESTS.labels("cancelled").inc()
        else:
            metrics.REQUESTS.labels("completed").inc()
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._callers and not self.scheduler.num_running:
            self.idle.set()

    def _cancel(self, request_id: str) -> bool:
        """Ends a request on every rank. False when there was nothing left to end."""
        queued = self.scheduler.num_queued
        gone, entries = self.scheduler.cancel(request_id)
        self._append(entries)
        self._advance()
        return not gone or self.scheduler.num_queued < queued

    def _log(self, request: Request) -> Logger:
        transfer = request.grant.transfer_id if request.grant else None
        return log.bind(request=request.request_id, transfer=transfer)
