"""What makes a process export spans, and how they end."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.trace import StatusCode

from headwater import tracing
from headwater.errors import InvalidConfig, PeerUnavailable
from tests.collector import collector
from tests.spans import recorded

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("environment", "exporters"),
    [
        ({}, []),
        ({ENDPOINT: "http://here:4317"}, ["otlp_proto_grpc"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://here:4317"}, ["otlp_proto_grpc"]),
        ({ENDPOINT: "http://here:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, ["otlp_proto_http"]),
        ({ENDPOINT: "http://here:4317", "OTEL_TRACES_EXPORTER": "none"}, []),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ["console", "otlp_proto_grpc"]),
    ],
)
def test_exporters_are_named_by_the_standard_variables(environment: dict[str, str], exporters: list[str]) -> None:
    assert tracing._wanted_exporters(environment) == exporters


def test_an_exporter_that_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "pigeon")
    with pytest.raises(InvalidConfig, match="no exporter of traces is installed for pigeon; there are console, otlp_"):
        with tracing.exporting("router", "r0"):
            pass


def run(*environment: str) -> None:
    """A process that exports one span and ends."""
    program = """
from headwater import tracing
with tracing.exporting("worker", "p0", 3):
    with tracing.span("one", {}):
        pass
"""
    subprocess.run(["env", *environment, sys.executable, "-c", program], check=True, timeout=60)


def test_spans_are_exported_before_the_process_ends() -> None:
    with collector() as collected:
        run(f"{ENDPOINT}={collected.endpoint}")
        (span,) = collected.spans
        assert span.name == "one"
        assert span.resource["service.name"] == "headwater-worker"
        assert span.resource["service.instance.id"] == "p0/3"
        run(f"{ENDPOINT}={collected.endpoint}", "OTEL_SERVICE_NAME=mine", "OTEL_TRACES_SAMPLER=always_on")
        assert collected.spans[1].resource["service.name"] == "mine"
        run(f"{ENDPOINT}={collected.endpoint}", "OTEL_TRACES_SAMPLER=always_off")
        assert len(collected.spans) == 2


def test_a_collector_that_is_not_there_does_not_keep_a_process_from_ending() -> None:
    run(f"{ENDPOINT}=http://127.0.0.1:1")


def test_a_span_says_how_its_block_ended() -> None:
    with recorded() as exporter:
        with pytest.raises(PeerUnavailable):
            with tracing.span("failing", {}):
                raise PeerUnavailable("d0 is gone")
        with pytest.raises(GeneratorExit):
            with tracing.span("left", {}):
                raise GeneratorExit
        with tracing.span("done", {}):
            pass
    failing, left, done = exporter.get_finished_spans()
    assert (failing.status.status_code, failing.status.description) == (StatusCode.ERROR, "d0 is gone")
    assert dict(failing.attributes or {}) == {"error.type": "PeerUnavailable"}
    assert left.status.status_code is done.status.status_code is StatusCode.UNSET
    assert dict(left.attributes or {}) == {"headwater.cancelled": True}
    assert not done.attributes
