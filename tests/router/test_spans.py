"""The router's part of a trace: real gRPC, groups that follow a script."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from headwater import tracing
from headwater.errors import CapacityError, TransferFailed
from headwater.v1 import decode_pb2, prefill_pb2
from router.ttft import PARTS
from tests.router.fakes import FakeDecode, never, rig, site, text_request, tiny_tokenizer
from tests.spans import named, paths, recorded, traceparent

ANSWER = [70, 80, 90, 100]


def test_one_trace_from_the_client_through_the_router_to_both_groups() -> None:
    async def run() -> None:
        request = text_request()
        request.request_id = "mine"
        with recorded() as exporter:
            async with rig(ANSWER) as it:
                with tracing.span("client", {}, current=True):
                    responses = await it.answer(request)
        spans = exporter.get_finished_spans()
        assert paths(spans) == ["client", "client/generate", "client/generate/decode", "client/generate/prefill"]
        assert len({span.context.trace_id for span in spans}) == 1
        generate, prefill, decode = (named(spans, name) for name in ("generate", "prefill", "decode"))
        assert it.prefill.traceparents == [traceparent(prefill)]
        assert it.decode.traceparents == [traceparent(decode)]

        assert generate.kind is SpanKind.SERVER
        ttft = responses[-1].finished.ttft
        assert dict(generate.attributes or {}) == {
            "rpc.system.name": "grpc",
            "rpc.method": "headwater.v1.RouterService/Generate",
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "headwater",
            "gen_ai.request.max_tokens": 4,
            "gen_ai.response.id": "mine",
            "headwater.request.id": "mine",
            "gen_ai.usage.input_tokens": len(tiny_tokenizer().encode(request.text).ids),
            "gen_ai.usage.output_tokens": 4,
            "gen_ai.response.finish_reasons": ("length",),
            "gen_ai.response.time_to_first_chunk": ttft.total,
            "headwater.ttft.total": ttft.total,
            **{f"headwater.ttft.{part}": getattr(ttft, part) for part in PARTS},
        }
        events = [event.name for event in generate.events]
        assert events[:4] == ["received", "tokenized", "paired", "admitted"]
        # The groups report on two paths.
        assert sorted(events[4:6]) == ["committed", "first_token_sent"]
        assert events[6:] == ["finished"]
        assert dict(generate.events[2].attributes or {}) == {"headwater.prefill": "p0", "headwater.decode": "d0"}
        transfer = {"headwater.transfer.id": responses[0].accepted.transfer_id, "headwater.attempt": 1}
        for span, group, method in (
            (prefill, "p0", "PrefillService/Prefill"),
            (decode, "d0", "DecodeService/Decode"),
        ):
            assert span.kind is SpanKind.CLIENT
            assert dict(span.attributes or {}) == {
                "rpc.system.name": "grpc",
                "rpc.method": f"headwater.v1.{method}",
                "headwater.group": group,
                "headwater.request.id": "mine",
                **transfer,
            }
        assert {span.status.status_code for span in spans} == {StatusCode.UNSET}

    asyncio.run(run())


def test_a_leg_that_fails_is_an_error_and_the_other_is_cancelled() -> None:
    async def run() -> None:
        with recorded() as exporter:
            async with rig(ANSWER) as it:

                async def hang(
                    request: prefill_pb2.PrefillRequest,
                ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
                    async for response in it.prefill.until_first_token(request):
                        yield response
                    it.prefill.delivered.set()
                    await never()

                async def die(request: decode_pb2.DecodeRequest) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
                    yield FakeDecode.grant(request)
                    await it.prefill.delivered.wait()
                    raise TransferFailed("d0 lost its KV")

                it.prefill.script, it.decode.script = hang, die
                with pytest.raises(TransferFailed):
                    await it.answer(text_request())
        spans = exporter.get_finished_spans()
        assert paths(spans) == ["generate", "generate/decode", "generate/prefill"]
        for name in ("generate", "decode"):
            span = named(spans, name)
            assert span.status.status_code is StatusCode.ERROR
            assert "d0 lost its KV" in (span.status.description or "")
            assert (span.attributes or {})["error.type"] == "TransferFailed"
        prefill = named(spans, "prefill")
        assert prefill.status.status_code is StatusCode.UNSET
        assert (prefill.attributes or {})["headwater.cancelled"] is True
        assert named(spans, "generate").events[-1].name == "failed"

    asyncio.run(run())


def test_a_client_that_leaves_cancels_and_that_is_no_error() -> None:
    async def run() -> None:
        with recorded() as exporter:
            async with rig(ANSWER) as it:

                async def hang(
                    request: prefill_pb2.PrefillRequest,
                ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
                    yield prefill_pb2.PrefillResponse(chunk_done=prefill_pb2.ChunkDone(token_end=1))
                    await never()

                it.prefill.script = hang
                async with contextlib.aclosing(it.client.generate(text_request())) as responses:
                    async for response in responses:
                        if response.HasField("progress"):
                            break
                await it.prefill.cancelled.wait()
        spans = exporter.get_finished_spans()
        assert paths(spans) == ["generate", "generate/decode", "generate/prefill"]
        assert [(span.attributes or {})["headwater.cancelled"] for span in spans] == [True] * 3
        assert {span.status.status_code for span in spans} == {StatusCode.UNSET}
        assert named(spans, "generate").events[-1].name == "cancelled"

    asyncio.run(run())


def test_every_try_has_its_own_legs() -> None:
    async def run() -> None:
        with recorded() as exporter:
            async with site(ANSWER, 2) as it:
                left = [CapacityError("p is full")]

                def first_fails(number: int) -> None:
                    group = it.prefill[number]

                    async def script(
                        request: prefill_pb2.PrefillRequest,
                    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
                        if left:
                            raise left.pop()
                        async for response in group.run(request):
                            yield response

                    group.script = script

                for number in range(2):
                    first_fails(number)
                await it.answer(text_request())
        spans = exporter.get_finished_spans()
        assert paths(spans) == ["generate", *["generate/decode"] * 2, *["generate/prefill"] * 2]
        prefills = [span for span in spans if span.name == "prefill"]
        assert [span.status.status_code for span in prefills] == [StatusCode.ERROR, StatusCode.UNSET]
        assert {(span.attributes or {})["headwater.group"] for span in prefills} == {"p0", "p1"}
        assert len({(span.attributes or {})["headwater.transfer.id"] for span in prefills}) == 2
        generate = named(spans, "generate")
        assert generate.status.status_code is StatusCode.UNSET
        assert "retried" in [event.name for event in generate.events]

    asyncio.run(run())


def test_without_an_exporter_the_callers_context_is_passed_on() -> None:
    async def run() -> None:
        sent = f"00-{7:032x}-{9:016x}-01"
        async with rig(ANSWER) as it:
            with tracing.within(tracing.carried({"traceparent": sent})):
                await it.answer(text_request())
            await it.answer(text_request())
        assert it.prefill.traceparents == it.decode.traceparents == [sent, None]

    asyncio.run(run())
