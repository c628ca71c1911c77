"""What this process's spans say, for tests."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator, Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headwater import tracing


@contextlib.contextmanager
def recorded() -> Iterator[InMemorySpanExporter]:
    """Takes all spans that begin in the block, and after it those that have ended."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with unittest.mock.patch.object(tracing, "_tracer", provider.get_tracer("headwater")):
        yield exporter


def traceparent(span: ReadableSpan) -> str:
    """The header that makes another span this one's child."""
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"


def paths(spans: Sequence[ReadableSpan]) -> list[str]:
    """Each span's name behind those of its parents, sorted."""
    by_id = {span.context.span_id: span for span in spans}

    def path(span: ReadableSpan) -> str:
        parent = by_id.get(span.parent.span_id) if span.parent else None
        return span.name if parent is None else f"{path(parent)}/{span.name}"

    return sorted(path(span) for span in spans)


def named(spans: Sequence[ReadableSpan], name: str) -> ReadableSpan:
    """The only span of that name."""
    (found,) = (span for span in spans if span.name == name)
    return found
