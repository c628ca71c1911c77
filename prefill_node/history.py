"""What the group did lately, for whoever asks where a request's time went.

Everything is on the leader's clock: a worker reports how long something took and how long ago it ended, and that is
counted back from the moment its report comes, so clocks of different hosts are never compared.
"""

from __future__ import annotations

import collections
import dataclasses

from headwater.v1 import prefill_pb2, worker_pb2

# Requests that ended and are still remembered, steps of all stages together, and boxes of one request.
_REMEMBERED, _MAX_RUNS, _MAX_SENT = 64, 100_000, 20_000


@dataclasses.dataclass(frozen=True, slots=True)
class StageRun:
    """One step on one stage; seconds on the leader's clock.

    Attributes:
        chunks: (request, first token, end) of what was computed.
    """

    stage: int
    sequence: int
    chunks: tuple[tuple[str, int, int], ...]
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """One box of KV, from when it was begun until it was acknowledged."""

    rank: int
    kv: worker_pb2.SentBox
    start: float
    end: float


@dataclasses.dataclass
class _Record:
    queued_at: float
    ended_at: float = float("inf")
    sent: list[Sent] = dataclasses.field(default_factory=list)


class History:
    """Spans by request. Bounded, whatever the number and the length of requests."""

    def __init__(self) -> None:
        self._runs: collections.deque[StageRun] = collections.deque(maxlen=_MAX_RUNS)
        self._running: dict[str, _Record] = {}
        self._ended: collections.OrderedDict[str, _Record] = collections.OrderedDict()

    def begin(self, request_id: str, now: float) -> None:
        self._ended.pop(request_id, None)
        self._running[request_id] = _Record(now)

    def ran(self, run: StageRun) -> None:
        self._runs.append(run)

    def computing(self, request_id: str, stage: int, start: float, end: float) -> tuple[float, float]:
        """Seconds of [start, end] in which a stage computed steps with the request's chunks, and other steps.

        Runs are known by when they were reported; where two seem to overlap, the time is counted once.
        """
        own = others = 0.0
        until = end
        for run in reversed(self._runs):
            if run.end <= start:
                break
            if run.stage == stage:
                seconds = max(0.0, min(run.end, until) - max(run.start, start))
                until = min(until, run.start)
                if any(owner == request_id for owner, _, _ in run.chunks):
                    own += seconds
                else:
                    others += seconds
        return own, others

    def queued_at(self, request_id: str) -> float | None:
        """When a request came; None when it is not known (any more)."""
        record = self._running.get(request_id) or self._ended.get(request_id)
        return None if record is None else record.queued_at

    def chunks(self, request_id: str, queued_at: float) -> list[tuple[StageRun, int, int]]:
        """A request's chunks on all stages, as they ended: each with the run that it was part of, its first token and
        its end.
        """
        found = []
        for run in reversed(self._runs):
            if run.end < queued_at:
                break
            found += [(run, start, end) for owner, start, end in run.chunks if owner == request_id]
        return found[::-1]

    def sent(self, sent: Sent) -> None:
        record = self._running.get(sent.kv.request_id) or self._ended.get(sent.kv.request_id)
        if record is not None and len(record.sent) < _MAX_SENT:
            record.sent.append(sent)

    def end(self, request_id: str, now: float) -> None:
        record = self._running.pop(request_id, None)
        if record is not None:
            record.ended_at = now
            self._ended[request_id] = record
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    def trace(self, request_id: str, num_stages: int) -> prefill_pb2.TracePrefillResponse | None:
        """What is known of a request, with what the stages computed of others meanwhile; None when nothing is."""
        record = self._running.get(request_id) or self._ended.get(request_id)
        if record is None:
            return None
        zero = record.queued_at
        stages = [
            prefill_pb2.StageSpan(
                stage=run.stage,
                sequence=run.sequence,
                start=run.start - zero,
                end=run.end - zero,
                request_id=owner,
                token_start=start,
                token_end=end,
            )
            for run in self._runs
            if run.end >= record.queued_at and run.start <= record.ended_at
            for owner, start, end in run.chunks
        ]
        transfers = [
            prefill_pb2.TransferSpan(
                rank=sent.rank,
                start=sent.start - zero,
                end=sent.end - zero,
                token_start=sent.kv.token_start,
                token_end=sent.kv.token_end,
                num_bytes=sent.kv.num_bytes,
            )
            for sent in record.sent
        ]
        return prefill_pb2.TracePrefillResponse(num_stages=num_stages, stages=stages, transfers=transfers)
