"""What the router's spans say: `generate` for a request, and below it `prefill` and `decode` for each call to a group.

Lifecycle events reach the request's span by themselves (`headwater.lifecycle`).
"""

from __future__ import annotations

import contextlib

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind

from headwater import tracing
from headwater.v1 import router_pb2
from router.ttft import PARTS

_SERVICES = {"prefill": "PrefillService/Prefill", "decode": "DecodeService/Decode"}


def generate(request: router_pb2.GenerateRequest, request_id: str) -> contextlib.AbstractContextManager[Span]:
    """The span of a request, current while it lasts."""
    attributes = tracing.rpc("RouterService/Generate") | {
        "gen_ai.operation.name": "chat" if request.HasField("chat") else "text_completion",
        "gen_ai.provider.name": "headwater",
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.response.id": request_id,
        "headwater.request.id": request_id,
    }
    return tracing.span("generate", attributes, kind=SpanKind.SERVER, current=True)


def tokenized(num_tokens: int) -> None:
    """The prompt of the current request is known."""
    trace.get_current_span().set_attribute("gen_ai.usage.input_tokens", num_tokens)


def first_token_sent(ttft: router_pb2.TtftParts) -> None:
    """Where the time of the current request went, in seconds."""
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attribute("gen_ai.response.time_to_first_chunk", ttft.total)
        span.set_attributes({f"headwater.ttft.{name}": getattr(ttft, name) for name in ("total", *PARTS)})


def finished(reason: str, num_tokens: int) -> None:
    """The answer to the current request is complete."""
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attribute("gen_ai.response.finish_reasons", [reason])
        span.set_attribute("gen_ai.usage.output_tokens", num_tokens)


def leg(
    name: str, group: str, request_id: str, transfer_id: str, attempt: int
) -> contextlib.AbstractContextManager[Span]:
    """The span of one call to a group.

    Args:
        transfer_id: empty without one.
    """
    attributes = tracing.rpc(_SERVICES[name]) | {"headwater.group": group, "headwater.request.id": request_id}
    if transfer_id:
        attributes |= {"headwater.transfer.id": transfer_id, "headwater.attempt": attempt}
    return tracing.span(name, attributes, kind=SpanKind.CLIENT)
