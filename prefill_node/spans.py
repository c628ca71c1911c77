"""The spans of one request in the leader: `prefill`, and below it `queue` and a `chunk` for each chunk on each stage.

All but the first are made when the request is over, from what the leader remembers anyway, so steps cost nothing more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind

from headwater import tracing
from headwater.tokens import TOKEN_BYTES
from headwater.v1 import prefill_pb2
from prefill_node.leader import Leader

# Chunk spans of one request, of all stages together: half of them from its beginning, half from its end.
_MOST_CHUNKS = 256


async def traced_prefill(
    leader: Leader, request: prefill_pb2.PrefillRequest, parent: Context
) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
    """`Leader.prefill` under a span of its own, which the workers know as theirs."""
    attributes = tracing.rpc("PrefillService/Prefill") | {
        "gen_ai.usage.input_tokens": len(request.tokens) // TOKEN_BYTES,
        "headwater.request.id": request.request_id,
    }
    if request.HasField("grant"):
        attributes |= {"headwater.transfer.id": request.grant.transfer_id, "headwater.attempt": request.grant.attempt}
    came_at = time.monotonic()
    scheduled_at: float | None = None
    with tracing.span("prefill", attributes, kind=SpanKind.SERVER, parent=parent) as span:
        try:
            events = leader.prefill(request, tracing.carrier(span))
            async with contextlib.aclosing(events):
                async for event in events:
                    if event.HasField("scheduled"):
                        scheduled_at = time.monotonic()
                    elif event.HasField("completed"):
                        span.set_attribute("headwater.bytes", event.completed.bytes_sent)
                        span.set_attribute("headwater.boxes", event.completed.num_receipts)
                    yield event
        finally:
            if span.is_recording():
                _record_parts(leader, request.request_id, span, came_at, scheduled_at)


def _record_parts(leader: Leader, request_id: str, span: Span, came_at: float, scheduled_at: float | None) -> None:
    queued_at = leader.history.queued_at(request_id)
    if queued_at is None or queued_at < came_at:
        # It was refused; an earlier one may have had the same id.
        return
    parent = tracing.context_of(span)
    tracing.record("queue", {}, queued_at, scheduled_at or time.monotonic(), parent=parent)
    chunks = leader.history.chunks(request_id, queued_at)
    left_out = max(0, len(chunks) - _MOST_CHUNKS)
    half = _MOST_CHUNKS // 2
    for run, start, end in [*chunks[:half], *chunks[half + left_out :]]:
        attributes = {
            "headwater.stage": run.stage,
            "headwater.step": run.sequence,
            "headwater.tokens.start": start,
            "headwater.tokens.end": end,
        }
        tracing.record("chunk", attributes, run.start, run.end, parent=parent)
    if left_out:
        span.set_attribute("headwater.chunks.left_out", left_out)
