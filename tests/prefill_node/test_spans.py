"""The leader's part of a trace, with ranks that compute nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import cast

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from headwater import tracing
from headwater.cluster import Deadlines
from headwater.errors import InvalidRequest
from headwater.tokens import pack
from headwater.v1 import common_pb2, prefill_pb2, worker_pb2
from prefill_node import spans as leader_spans
from prefill_node.chunking import fixed
from prefill_node.costs import LearnedCost
from prefill_node.leader import Leader
from prefill_node.links import WorkerLinks
from prefill_node.pages import PagePool
from prefill_node.scheduler import Limits, LogEntry, Scheduler
from prefill_node.spans import traced_prefill
from tests.spans import named, paths, recorded, traceparent

CHUNK, STAGES, SECONDS = 8, 2, 0.001
CALLER = {"traceparent": f"00-{7:032x}-{9:016x}-01"}


class Ranks:
    """Both ranks of a group: whatever the log says, they say at once that it is done."""

    def __init__(self, leader: Leader, *, computes: bool = True) -> None:
        self.leader = leader
        self.computes = computes
        self.opened: list[worker_pb2.OpenRequest] = []

    def append(self, entry: LogEntry, stage: int | None) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(entry, worker_pb2.OpenRequest):
            self.opened.append(entry)
        elif isinstance(entry, worker_pb2.Step) and self.computes:
            assert stage is not None
            loop.call_soon(self._computed, entry, stage)
        elif isinstance(entry, worker_pb2.AbortRequest):
            for rank in range(STAGES):
                loop.call_soon(self._released, entry.request_id, rank)

    def _computed(self, step: worker_pb2.Step, stage: int) -> None:
        last = [chunk.request_id for chunk in step.chunks if chunk.last]
        sampled = [worker_pb2.SampledToken(request_id=name, token_id=5) for name in last if stage == STAGES - 1]
        done = worker_pb2.StepDone(sequence=step.sequence, compute_seconds=SECONDS, sampled=sampled)
        self.leader.on_report(stage, worker_pb2.Report(step_done=done))
        for name in last:
            self._released(name, stage)

    def _released(self, name: str, rank: int) -> None:
        released = worker_pb2.Released(request_id=name, bytes_sent=100, num_receipts=2)
        self.leader.on_report(rank, worker_pb2.Report(released=released))


def make(*, computes: bool = True) -> tuple[Leader, Ranks]:
    cost = LearnedCost(STAGES)
    scheduler = Scheduler(
        PagePool(64, CHUNK),
        num_stages=STAGES,
        world_size=STAGES,
        limits=Limits(CHUNK, 1, max_running=4, max_queued=4, max_wait_seconds=20.0),
        cuts=lambda start, end, sharing: fixed.cuts(start, end, chunk_tokens=CHUNK, align=1),
        seconds=cost.seconds,
        clock=time.monotonic,
    )
    geometry = common_pb2.Geometry(vocab_size=100, max_context_tokens=512)
    leader = Leader(scheduler, geometry, cost, Deadlines(), tp=1)
    ranks = Ranks(leader, computes=computes)
    leader.begin(cast("WorkerLinks", ranks))
    return leader, ranks


def request(num_tokens: int) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(request_id="r", tokens=pack([3] * num_tokens))


async def answer(leader: Leader, num_tokens: int) -> list[str | None]:
    events = traced_prefill(leader, request(num_tokens), tracing.carried(CALLER))
    return [event.WhichOneof("event") async for event in events]


@pytest.mark.parametrize(("seconds", "told"), [(0.0, 2), (1e9, 1)])
def test_callers_hear_of_the_first_chunk_then_now_and_then_and_not_of_the_last(
    monkeypatch: pytest.MonkeyPatch, seconds: float, told: int
) -> None:
    monkeypatch.setattr("prefill_node.leader._PROGRESS_SECONDS", seconds)
    leader, _ = make()
    events = asyncio.run(answer(leader, 20))
    assert events == ["scheduled", *["chunk_done"] * told, "first_token", "completed"]


def test_the_span_of_a_request_its_queueing_and_every_chunk_of_every_stage() -> None:
    leader, ranks = make()
    with recorded() as exporter:
        events = asyncio.run(answer(leader, 20))
    assert (events[0], *events[-2:]) == ("scheduled", "first_token", "completed")
    spans = exporter.get_finished_spans()
    assert paths(spans) == ["prefill", *["prefill/chunk"] * 6, "prefill/queue"]
    prefill, queue = named(spans, "prefill"), named(spans, "queue")
    assert prefill.parent is not None
    assert (prefill.parent.trace_id, prefill.parent.span_id, prefill.kind) == (7, 9, SpanKind.SERVER)
    assert dict(prefill.attributes or {}) == {
        "rpc.system.name": "grpc",
        "rpc.method": "headwater.v1.PrefillService/Prefill",
        "gen_ai.usage.input_tokens": 20,
        "headwater.request.id": "r",
        "headwater.bytes": 200,
        "headwater.boxes": 4,
    }
    # The ranks know whose children their spans are.
    assert [dict(opened.trace_context) for opened in ranks.opened] == [{"traceparent": traceparent(prefill)}]
    chunks = [span for span in spans if span.name == "chunk"]
    for stage in range(STAGES):
        of_stage = [
            dict(span.attributes or {}) for span in chunks if (span.attributes or {})["headwater.stage"] == stage
        ]
        assert of_stage == [
            {
                "headwater.stage": stage,
                "headwater.step": step,
                "headwater.tokens.start": start,
                "headwater.tokens.end": end,
            }
            for step, (start, end) in enumerate(((0, 8), (8, 16), (16, 20)))
        ]
    assert {round((span.end_time - span.start_time) / 1e9, 5) for span in chunks} == {SECONDS}
    assert queue.start_time < queue.end_time < max(span.end_time for span in chunks)


def test_a_very_long_prompt_has_chunks_of_its_beginning_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_spans, "_MOST_CHUNKS", 4)
    leader, _ = make()
    with recorded() as exporter:
        asyncio.run(answer(leader, 10 * CHUNK))
    spans = exporter.get_finished_spans()
    steps = [(span.attributes or {})["headwater.step"] for span in spans if span.name == "chunk"]
    assert len(steps) == 4
    assert steps[0] == 0
    assert steps[-1] == 9
    assert (named(spans, "prefill").attributes or {})["headwater.chunks.left_out"] == 16


def test_a_caller_that_leaves_and_a_request_that_is_refused() -> None:
    async def leave(leader: Leader) -> None:
        async with contextlib.aclosing(traced_prefill(leader, request(20), tracing.carried({}))) as events:
            async for event in events:
                assert event.HasField("scheduled")
                break
        await leader.idle.wait()

    leader, _ = make(computes=False)
    with recorded() as exporter:
        asyncio.run(leave(leader))
        with pytest.raises(InvalidRequest):
            asyncio.run(answer(leader, 513))
    spans = exporter.get_finished_spans()
    # Nothing was computed, and the refused one did not queue.
    assert paths(spans) == ["prefill", "prefill", "prefill/queue"]
    left, refused = (span for span in spans if span.name == "prefill")
    assert (left.attributes or {})["headwater.cancelled"] is True
    assert left.status.status_code is StatusCode.UNSET
    assert refused.status.status_code is StatusCode.ERROR
    assert (refused.attributes or {})["error.type"] == "InvalidRequest"


def test_without_an_exporter_the_ranks_get_the_callers_context() -> None:
    leader, ranks = make()
    asyncio.run(answer(leader, 20))
    assert [dict(opened.trace_context) for opened in ranks.opened] == [CALLER]
