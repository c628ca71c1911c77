"""The life of one request in the router: check, tokenise, pair, run both legs.

Knows its groups and peers by small protocols, and the client by what it can be sent.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
import uuid

from headwater.cluster import Deadlines
from headwater.errors import HeadwaterError, PeerError
from headwater.lifecycle import Event, get_logger
from headwater.v1 import router_pb2
from router import metrics
from router.answer import Answer, ClientStream
from router.legs import Groups, Legs, Peers
from router.pairing import Pair, Policies, Size, choose_pair
from router.request import ServedModel, prepare
from router.snapshot import Snapshot
from router.text_stream import TextStream
from router.ttft import Timeline

_log = get_logger(__name__)


class Flow:
    """Runs requests; holds nothing of them."""

    def __init__(
        self, model: ServedModel, groups: Groups, peers: Peers, deadlines: Deadlines, policies: Policies
    ) -> None:
        self._model = model
        self._groups = groups
        self._peers = peers
        self._deadlines = deadlines
        self._policies = policies
        # Each router counts from elsewhere, so that routers do not do the same at the same time.
        self._turns = itertools.count(secrets.randbits(32))

    async def run(self, request: router_pb2.GenerateRequest, client: ClientStream) -> None:
        """Answers one request. Cancelling ends both legs.

        Raises:
            HeadwaterError: it was refused or failed, and the answer is not complete.
        """
        timeline = Timeline(received=time.monotonic())
        request_id = request.request_id or uuid.uuid4().hex
        transfer_id = uuid.uuid4().hex
        log = _log.bind(request=request_id, transfer=transfer_id)
        log.event(Event.RECEIVED)
        answer: Answer | None = None
        pair: Pair | None = None
        with metrics.IN_FLIGHT.track_inprogress():
            try:
                job = await prepare(request, request_id, self._model)
                timeline.tokenized = time.monotonic()
                log.event(Event.TOKENIZED, num_prompt_tokens=job.num_tokens)
                size = Size(job.num_tokens, job.stop.max_tokens)
                pair = self._choose(self._groups.snapshot(), size)
                stream = TextStream(self._model.text.tokenizer, job.stop.stop)
                answer = Answer(client, job, stream, timeline, log)
                await Legs(
                    self._peers,
                    self._groups,
                    self._deadlines,
                    self._choose,
                    pair,
                    job,
                    transfer_id,
                    answer,
                    timeline,
                    log,
                ).run()
            except asyncio.CancelledError:
                if answer is None or not answer.finished:
                    metrics.REQUESTS.labels("cancelled").inc()
                    log.event(Event.ABORTED)
                raise
            except HeadwaterError as error:
                metrics.REQUESTS.labels(type(error).__name__).inc()
                log.event(Event.FAILED, error=type(error).__name__, message=str(error))
                if isinstance(error, PeerError) and pair is not None:
                    self._refresh(pair)
                raise

    def _choose(self, snapshot: Snapshot, size: Size) -> Pair:
        return choose_pair(snapshot, size, self._policies, next(self._turns))

    def _refresh(self, pair: Pair) -> None:
        for group in (pair.prefill, pair.decode):
            if group is not None:
                self._groups.refresh(group.name)
