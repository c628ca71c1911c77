"""OpenTelemetry traces: one for each request, through every process that works for it.

Decides how a trace's context crosses processes, what a span says of how its work ended, and whether spans are
exported. Without OpenTelemetry's SDK, or unless the standard OTEL_* variables ask for an exporter, spans record nothing
and cost next to nothing; the context of whoever called is still passed on. Sampling is the SDK's business.

Attributes have the names of OpenTelemetry's conventions where there is one, and else begin with `headwater.`; prompts
and answers are never among them. Every span carries the wall-clock time of its own host.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc.aio
from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from headwater.errors import InvalidConfig
from headwater.lifecycle import get_logger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = get_logger(__name__)

Attributes = Mapping[str, AttributeValue]

_tracer = trace.get_tracer("headwater")
_EXPORTERS = "opentelemetry_traces_exporter"
# For what is left to export when a process ends.
_FLUSH_SECONDS = 5.0


def rpc(method: str) -> dict[str, AttributeValue]:
    """Attributes of a span for one gRPC call, on either side.

    Args:
        method: "PrefillService/Prefill".
    """
    return {"rpc.system.name": "grpc", "rpc.method": f"headwater.v1.{method}"}


@contextlib.contextmanager
def span(
    name: str,
    attributes: Attributes,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    parent: Context | None = None,
    current: bool = False,
) -> Iterator[Span]:
    """A span over a block, which says how the block ended.

    Args:
        parent: None: the current context.
        current: whether spans and lifecycle events of the block belong to it; not for a block that yields.
    """
    started = _tracer.start_span(name, parent, kind, attributes)
    try:
        if current:
            with within(context_of(started)):
                yield started
        else:
            yield started
    except (asyncio.CancelledError, GeneratorExit):
        cancelled(started)
        raise
    except BaseException as error:
        failed(started, error)
        raise
    finally:
        started.end()


def record(
    name: str,
    attributes: Attributes,
    start: float,
    end: float,
    *,
    parent: Context,
    links: Sequence[Link] = (),
    error: BaseException | None = None,
    was_cancelled: bool = False,
) -> None:
    """A span of something that is over.

    Args:
        start, end: seconds of this host's monotonic clock.
    """
    ago = time.time() - time.monotonic()
    done = _tracer.start_span(name, parent, attributes=attributes, links=links, start_time=round(1e9 * (ago + start)))
    if error is not None:
        failed(done, error)
    if was_cancelled:
        cancelled(done)
    done.end(round(1e9 * (ago + end)))


def failed(span: Span, error: BaseException) -> None:
    """The span's work ended with `error`."""
    if span.is_recording():
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR, str(error)))


def cancelled(span: Span) -> None:
    """Nobody wanted the span's work any more, which is no error."""
    span.set_attribute("headwater.cancelled", value=True)


def context_of(span: Span) -> Context:
    """The context whose spans are children of `span`."""
    return trace.set_span_in_context(span)


@contextlib.contextmanager
def within(context: Context) -> Iterator[None]:
    """Makes `context` the current one, also for the tasks that the block starts. Not for a block that yields."""
    token = contexts.attach(context)
    try:
        yield
    finally:
        contexts.detach(token)


def carrier(span: Span | None = None) -> dict[str, str]:
    """What another process needs to go on with the trace of `span`, or of the current one; W3C Trace Context, unless
    OTEL_PROPAGATORS says otherwise.
    """
    carried: dict[str, str] = {}
    propagate.inject(carried, None if span is None else context_of(span))
    return carried


def carried(carrier: Mapping[str, str]) -> Context:
    """The inverse of `carrier`."""
    return propagate.extract(carrier)


def metadata(span: Span | None = None) -> tuple[tuple[str, str], ...]:
    """`carrier`, for a gRPC call."""
    return tuple(carrier(span).items())


def caller(context: grpc.aio.ServicerContext[Any, Any]) -> Context:
    """The context of whoever called."""
    sent = context.invocation_metadata() or ()
    return carried({key: value for key, value in sent if isinstance(value, str)})


@contextlib.contextmanager
def exporting(role: str, node: str, rank: int | None = None) -> Iterator[None]:
    """Exports this process's spans while the block lasts, if the OTEL_* variables ask for it.

    What is left at the end is exported within a few seconds, or dropped.

    Args:
        role: "router", "prefill", "worker" or "decode"; the service is called "headwater-…", unless OTEL_SERVICE_NAME
            says otherwise.
        node: the name in the cluster file; with the rank, the service's instance.

    Raises:
        InvalidConfig: the exporter is not installed.
    """
    provider = _provider(role, node if rank is None else f"{node}/{rank}")
    if provider is not None:
        trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        if provider is not None:
            # The SDK's own bound is half a minute, and an exporter may have another.
            ending = threading.Thread(target=provider.shutdown, name="end-of-traces", daemon=True)
            ending.start()
            ending.join(_FLUSH_SECONDS)


def _provider(role: str, instance: str) -> TracerProvider | None:
    names = _wanted_exporters(os.environ)
    if not names:
        return None
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415 - optional
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError:
        # The variables may be meant for other programs.
        log.warning("OTEL_* asks for traces, and the SDK is missing: pip install 'headwater[otel]'")
        return None
    installed = {entry.name: entry for entry in importlib.metadata.entry_points(group=_EXPORTERS)}
    unknown = [name for name in names if name not in installed]
    if unknown:
        raise InvalidConfig(
            f"no exporter of traces is installed for {', '.join(unknown)}; there are {', '.join(sorted(installed))}. "
            "See OTEL_TRACES_EXPORTER and OTEL_EXPORTER_OTLP_PROTOCOL, or pip install 'headwater[otel]'."
        )
    ours = {
        "service.namespace": "headwater",
        "service.name": f"headwater-{role}",
        "service.instance.id": instance,
    }
    resource = Resource.create({**ours, **OTELResourceDetector().detect().attributes})
    # Shut down by `exporting`, within a bound.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for name in names:
        provider.add_span_processor(BatchSpanProcessor(installed[name].load()()))
    return provider


def _wanted_exporters(environment: Mapping[str, str]) -> list[str]:
    """Entry points of exporters, by the OpenTelemetry specification's variables; exports only when asked to."""

    def otlp_setting(name: str) -> str:
        return environment.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environment.get(f"OTEL_EXPORTER_OTLP_{name}", "")

    asked = environment.get("OTEL_TRACES_EXPORTER") or ("otlp" if otlp_setting("ENDPOINT") else "none")
    protocol = otlp_setting("PROTOCOL") or "grpc"
    otlp = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    names = [name.strip() for name in asked.split(",")]
    return [otlp if name == "otlp" else name for name in names if name not in ("", "none")]
