"""The life of one request in the router: check, tokenise, pair, run both legs (or the only one).

Knows its groups and peers by small protocols, and the client by what it can be sent.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
import uuid
from collections.abc import Callable

from headwater.cluster import Deadlines
from headwater.errors import CapacityError, PeerError
from headwater.lifecycle import Event, Logger, get_logger
from headwater.v1 import router_pb2
from router import metrics, spans
from router.answer import Answer, ClientStream
from router.history import History
from router.leg import Groups, Peers
from router.legs import Legs
from router.one_leg import OneLeg
from router.pairing import Alone, Pair, Policies, Size, choose_pair, choose_route
from router.request import Job, ServedModel, prepare
from router.snapshot import Snapshot
from router.text_stream import TextStream
from router.ttft import Timeline
from router.waiting import PairQueue

_log = get_logger(__name__)


# Tries of one request that end in a failure of a group; being full is none.
_MOST_TRIES = 3
# Of retries: at once, and for each request.
_LARGEST_BUDGET, _EARNED = 10.0, 0.1


class RetryBudget:
    """What may be tried again: so many requests at once, and a tenth of all. When much fails, trying all of it again
    would be a load of its own.
    """

    def __init__(self) -> None:
        self._left = _LARGEST_BUDGET

    def earn(self) -> None:
        """A request has come."""
        self._left = min(_LARGEST_BUDGET, self._left + _EARNED)

    def spend(self) -> bool:
        """Whether a request may be tried again."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Flow:
    """Runs requests; holds nothing of them but the queue of those that wait for groups."""

    def __init__(
        self,
        model: ServedModel,
        groups: Groups,
        peers: Peers,
        deadlines: Deadlines,
        policies: Policies,
        history: History,
        *,
        max_waiting: int,
        local_prefill_tokens: int,
    ) -> None:
        self._model = model
        self._groups = groups
        self._peers = peers
        self._deadlines = deadlines
        self._policies = policies
        self._history = history
        self._local_prefill_tokens = local_prefill_tokens
        self._budget = RetryBudget()
        # Each router counts from elsewhere, so that routers do not do the same at the same time.
        self._turns = itertools.count(secrets.randbits(32))
        self._queue = PairQueue(groups.snapshot, self._choose, max_waiting, deadlines.pair)
        groups.listen(self._queue.changed)

    async def run(self, request: router_pb2.GenerateRequest, request_id: str, client: ClientStream) -> None:
        """Answers one request. Cancelling ends both legs.

        Raises:
            HeadwaterError: it was refused or failed, and the answer is not complete.
        """
        timeline = Timeline(received=time.monotonic())
        log = _log.bind(request=request_id)
        answer: Answer | None = None
        ended = "ok"
        with (
            metrics.IN_FLIGHT.track_inprogress(),
            self._history.follow(request_id) as record,
            spans.generate(request, request_id),
        ):
            log.event(Event.RECEIVED)
            try:
                job = await prepare(request, request_id, self._model)
                record.tokenized(job.num_tokens)
                log.event(Event.TOKENIZED, num_prompt_tokens=job.num_tokens)
                spans.tokenized(job.num_tokens)
                stream = TextStream(self._model.text.tokenizer, job.stop.stop)
                answer = Answer(client, job, stream, timeline, log, record)
                await self._try(job, answer, timeline, log)
            except asyncio.CancelledError:
                if answer is None or not answer.finished:
                    ended = "cancelled"
                    metrics.REQUESTS.labels("cancelled").inc()
                    log.event(Event.CANCELLED)
                raise
            except Exception as error:
                ended = "error"
                metrics.REQUESTS.labels(type(error).__name__).inc()
                log.event(Event.FAILED, error=type(error).__name__, message=str(error))
                raise
            finally:
                metrics.REQUEST_DURATION_SECONDS.labels(ended).observe(time.monotonic() - timeline.received)

    async def _try(self, job: Job, answer: Answer, timeline: Timeline, log: Logger) -> None:
        """On one pair after the other, as long as the client has no token: each time a new transfer, without the groups
        that have failed. Waits when no group can take it.
        """
        self._budget.earn()
        num_failed = 0
        size = Size(job.num_tokens, job.stop.max_tokens, is_short=job.num_tokens <= self._local_prefill_tokens)
        with self._queue.place(size, job.blocks) as place:
            for number in itertools.count(1):
                route = await place.pair()
                timeline.on_paired()
                request_id = job.request_id if number == 1 else f"{job.request_id}~{number}"
                legs = self._legs(route, place.taken, job, request_id, answer, timeline, log)
                try:
                    await legs.run()
                except (PeerError, CapacityError) as error:
                    if answer.has_first_token or not legs.lost:
                        raise
                    if isinstance(error, CapacityError):
                        place.refused(legs.lost, error)
                    else:
                        num_failed += 1
                        if num_failed == _MOST_TRIES or not self._budget.spend():
                            raise
                        place.failed(legs.lost, error)
                    metrics.RETRIES.inc()
                    log.event(Event.RETRIED, without=sorted(legs.lost), error=str(error))
                else:
                    return

    def _legs(
        self,
        route: Pair | Alone,
        on_admitted: Callable[[], None],
        job: Job,
        request_id: str,
        answer: Answer,
        timeline: Timeline,
        log: Logger,
    ) -> Legs | OneLeg:
        if isinstance(route, Alone):
            return OneLeg(
                self._peers,
                self._groups,
                self._deadlines,
                on_admitted,
                route.decode,
                job,
                request_id,
                answer,
                timeline,
                log,
            )
        transfer_id = uuid.uuid4().hex
        return Legs(
            self._peers,
            self._groups,
            self._deadlines,
            self._choose_pair,
            on_admitted,
            route,
            job,
            request_id,
            transfer_id,
            answer,
            timeline,
            log.bind(transfer=transfer_id),
        )

    def _choose(self, snapshot: Snapshot, size: Size, *, patient: bool) -> Pair | Alone:
        return choose_route(snapshot, size, self._policies, next(self._turns), patient=patient)

    def _choose_pair(self, snapshot: Snapshot, size: Size) -> Pair:
        return choose_pair(snapshot, size, self._policies, next(self._turns))
