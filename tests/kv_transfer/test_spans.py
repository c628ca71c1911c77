"""A transfer's part of a trace: real gRPC on loopback, in-memory engine."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from headwater import tracing
from headwater.errors import TransferFailed
from kv_transfer.memory_engine import Faults
from kv_transfer.receiver import ReceiverOptions
from tests.kv_transfer.test_transfer import NUM_TOKENS, abort_all, chunks, send_all, start
from tests.kv_transfer.world import HEADS, KEY, LAYERS, VALUE, world
from tests.spans import named, paths, recorded

NUM_BYTES = NUM_TOKENS * LAYERS * HEADS * (KEY + VALUE) * 4


def test_every_rank_delivers_and_what_is_received_links_to_it() -> None:
    async def run() -> None:
        async with world() as made:
            with tracing.span("test", {}, current=True):
                transfer, outgoing = start(made)
            send_all(outgoing, chunks())
            await transfer.incoming[0].committed()
            for one in outgoing:
                assert (await one.ended()).error is None

    with recorded() as exporter:
        asyncio.run(run())
    spans = exporter.get_finished_spans()
    assert paths(spans) == ["test", *["test/deliver"] * 4, "test/receive"]
    deliveries = [span for span in spans if span.name == "deliver"]
    for span in deliveries:
        attributes = span.attributes or {}
        assert span.kind is SpanKind.CLIENT
        assert attributes["rpc.method"] == "headwater.v1.TransferService/Deliver"
        assert (attributes["headwater.transfer.id"], attributes["headwater.attempt"]) == ("t1", 1)
        assert attributes["headwater.state"] == "delivered"
        assert int(attributes["headwater.boxes"]) >= len(chunks())  # type: ignore[call-overload]
    assert sorted((span.attributes or {})["headwater.rank"] for span in deliveries) == [0, 1, 2, 3]  # type: ignore[type-var]
    assert sum(int((span.attributes or {})["headwater.bytes"]) for span in deliveries) == NUM_BYTES  # type: ignore[call-overload]
    receive = named(spans, "receive")
    assert dict(receive.attributes or {}) == {
        "headwater.transfer.id": "t1",
        "headwater.attempt": 1,
        "headwater.bytes": NUM_BYTES,
        "headwater.state": "committed",
    }
    assert {link.context.span_id for link in receive.links} == {span.context.span_id for span in deliveries}


def test_a_transfer_that_fails_says_so_on_both_sides() -> None:
    async def run() -> None:
        options = ReceiverOptions(resume_seconds=0)
        async with world(Faults(seed=1, drop=0.2), options=options) as made:
            with tracing.span("test", {}, current=True):
                transfer, outgoing = start(made)
            send_all(outgoing, chunks())
            with pytest.raises(TransferFailed):
                await transfer.incoming[0].committed()
            for one in outgoing:
                await one.ended()
            await abort_all(transfer)

    with recorded() as exporter:
        asyncio.run(run())
    spans = exporter.get_finished_spans()
    receive = named(spans, "receive")
    assert receive.status.status_code is StatusCode.ERROR
    attributes = receive.attributes or {}
    assert (attributes["error.type"], attributes["headwater.state"]) == ("TransferFailed", "failed")
    deliveries = [span for span in spans if span.name == "deliver"]
    assert {(span.attributes or {})["headwater.state"] for span in deliveries} <= {"failed", "aborted"}
    assert any(span.status.status_code is StatusCode.ERROR for span in deliveries)


def test_writers_that_are_aborted_are_cancelled() -> None:
    async def run() -> None:
        async with world() as made:
            with tracing.span("test", {}, current=True):
                transfer, outgoing = start(made)
            for one in outgoing:
                one.abort()
            for one in outgoing:
                await one.ended()
            await abort_all(transfer)

    with recorded() as exporter:
        asyncio.run(run())
    spans = exporter.get_finished_spans()
    deliveries = [span for span in spans if span.name == "deliver"]
    assert len(deliveries) == 4
    for span in deliveries:
        attributes = span.attributes or {}
        assert (attributes["headwater.cancelled"], attributes["headwater.state"]) == (True, "aborted")
        assert span.status.status_code is StatusCode.UNSET


def test_what_was_received_of_a_transfer_that_nobody_wants_any_more() -> None:
    async def run() -> None:
        async with world() as made:
            with tracing.span("test", {}, current=True):
                transfer, outgoing = start(made)
            outgoing[0].send(chunks()[0])
            # An acknowledged box has landed.
            outgoing[0].finish(None)
            assert (await outgoing[0].ended()).error is None
            await abort_all(transfer)
            for one in outgoing[1:]:
                one.finish(None)
                await one.ended()

    with recorded() as exporter:
        asyncio.run(run())
    receive = named(exporter.get_finished_spans(), "receive")
    attributes = receive.attributes or {}
    assert (attributes["headwater.cancelled"], attributes["headwater.state"]) == (True, "aborted")
    assert receive.status.status_code is StatusCode.UNSET
