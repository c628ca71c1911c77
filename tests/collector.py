"""A collector of traces, as every process exports them: OTLP over gRPC."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


@dataclasses.dataclass(frozen=True)
class CollectedSpan:
    """A span as it came, ids in hexadecimal."""

    name: str
    trace_id: str
    span_id: str
    # Empty for the first of a trace.
    parent_id: str
    attributes: dict[str, object]
    # What is known of the process.
    resource: dict[str, object]
    # Ids of spans.
    links: list[str]
    # Unix nanoseconds.
    start: int
    end: int


def _value(value: AnyValue) -> object:
    return getattr(value, value.WhichOneof("value") or "string_value")


def _attributes(pairs: list[KeyValue]) -> dict[str, object]:
    return {pair.key: _value(pair.value) for pair in pairs}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[CollectedSpan] = []
        self._changed = threading.Condition()

    def Export(  # noqa: N802 - gRPC's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._changed:
            self.spans += [
                CollectedSpan(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    _attributes(span.attributes),
                    _attributes(of_process.resource.attributes),
                    [link.span_id.hex() for link in span.links],
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                )
                for of_process in request.resource_spans
                for scope in of_process.scope_spans
                for span in scope.spans
            ]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait(self, enough: Callable[[list[CollectedSpan]], bool], seconds: float = 30) -> list[CollectedSpan]:
        """All spans, as soon as there are enough."""
        with self._changed:
            assert self._changed.wait_for(lambda: enough(self.spans), seconds), [span.name for span in self.spans]
            return list(self.spans)


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """A running one, on a free port."""
    collected = Collector()
    with ThreadPoolExecutor(max_workers=1) as pool:
        # Its thread is there from the beginning, so nobody takes it for a leak.
        pool.submit(int).result()
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collected, server)
        collected.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield collected
        finally:
            server.stop(0).wait()
