"""One request through the router: real gRPC, groups that follow a script."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest
from prometheus_client import REGISTRY

from headwater.errors import CapacityError, DeadlinePassed, GeometryMismatch, PeerUnavailable, TransferFailed
from headwater.tokens import unpack
from headwater.v1 import common_pb2, decode_pb2, prefill_pb2, router_pb2
from router.ttft import PARTS
from tests.router.fakes import FakeDecode, FakePrefill, kinds, never, rig, text_request, tiny_tokenizer

ANSWER = [70, 80, 90, 100]


def outcome(name: str) -> float:
    return REGISTRY.get_sample_value("headwater_requests_total", {"outcome": name}) or 0.0


def test_events_come_in_order_with_exact_tokens_and_text() -> None:
    async def run() -> None:
        before = outcome("length")
        async with rig(ANSWER) as it:
            request = text_request()
            request.request_id = "mine"
            responses = await it.answer(request)
            prompt = tiny_tokenizer().encode(request.text).ids
            chunks = -(-len(prompt) // 4)
            assert kinds(responses) == ["accepted", *["progress"] * (chunks - 1), *["token"] * 4, "finished"]
            accepted, finished = responses[0].accepted, responses[-1].finished
            assert (accepted.request_id, accepted.prefill_group, accepted.decode_group) == ("mine", "p0", "d0")
            assert (accepted.num_prompt_tokens, accepted.num_chunks) == (len(prompt), chunks)
            assert responses[1].progress == router_pb2.Progress(tokens_done=4, tokens_total=len(prompt))
            tokens = [response.token for response in responses if response.HasField("token")]
            assert [(token.index, token.id) for token in tokens] == list(enumerate(ANSWER))
            text = "".join(token.text for token in tokens) + finished.text
            assert text == tiny_tokenizer().decode(ANSWER)
            assert finished.reason == common_pb2.FINISH_REASON_LENGTH
            assert finished.num_generated_tokens == len(ANSWER)
            (prefill,), (decode,) = it.prefill.requests, it.decode.requests
            assert list(unpack(prefill.tokens)) == prompt
            assert prefill.grant.transfer_id == decode.transfer_id == accepted.transfer_id
            assert (decode.attempt, decode.num_prompt_tokens) == (1, len(prompt))
            assert decode.source == it.prefill.description.geometry
            assert decode.sampling == prefill.sampling
            assert decode.sampling.seed == accepted.seed < 2**63
            assert list(decode.stop.eos_token_ids) == [0]
        assert outcome("length") == before + 1
        assert not it.prefill.cancelled.is_set()
        assert not it.decode.cancelled.is_set()

    asyncio.run(run())


def test_parts_of_ttft_sum_to_the_total() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it:
            responses = await it.answer(text_request())
        ttft = responses[-1].finished.ttft
        assert sum(getattr(ttft, name) for name in PARTS) == ttft.total
        assert (ttft.queue, ttft.compute, ttft.bubble) == (0.001, 0.003, 0.002)
        assert min(ttft.routing, ttft.admission) > 0
        assert (ttft.retry, ttft.exposed_transfer) == (0, 0)

    asyncio.run(run())


def test_s21_first_token_reaches_the_client_before_the_decode_group_commits() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it:
            seen = asyncio.Event()

            async def commit_when_seen(
                request: decode_pb2.DecodeRequest,
            ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
                yield FakeDecode.grant(request)
                await seen.wait()
                for response in it.decode.after_commit():
                    yield response

            it.decode.script = commit_when_seen
            tokens = []
            async with contextlib.aclosing(it.client.generate(text_request())) as responses:
                async for response in responses:
                    if response.HasField("token"):
                        seen.set()
                        tokens.append(response.token.id)
            assert tokens == ANSWER
            assert response.finished.commit_after_first_token_seconds > 0

    asyncio.run(run())


def test_decode_may_be_heard_before_the_first_token() -> None:
    """The two groups report on two paths."""

    async def run() -> None:
        async with rig(ANSWER) as it:
            decode_done = asyncio.Event()

            async def late(request: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
                it.prefill.delivered.set()
                await decode_done.wait()
                async for response in it.prefill.run(request):
                    yield response

            async def early(request: decode_pb2.DecodeRequest) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
                async for response in it.decode.run(request):
                    yield response
                decode_done.set()

            it.prefill.script, it.decode.script = late, early
            responses = await it.answer(text_request())
            assert [response.token.id for response in responses if response.HasField("token")] == ANSWER
            assert kinds(responses)[-1] == "finished"

    asyncio.run(run())


def test_s28_one_token_needs_no_decode_group() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it:
            responses = await it.answer(text_request(max_tokens=1))
            assert kinds(responses)[-2:] == ["token", "finished"]
            assert responses[-1].finished.reason == common_pb2.FINISH_REASON_LENGTH
            assert responses[-1].finished.commit_after_first_token_seconds == 0
            assert it.decode.requests == []
            assert not it.prefill.requests[0].HasField("grant")

    asyncio.run(run())


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_s28_first_token_is_eos(max_tokens: int) -> None:
    async def run() -> None:
        async with rig([0], reason=common_pb2.FINISH_REASON_EOS) as it:
            responses = await it.answer(text_request(max_tokens=max_tokens))
            assert responses[-1].finished.reason == common_pb2.FINISH_REASON_EOS
            assert [response.token.text for response in responses if response.HasField("token")] == [""]

    asyncio.run(run())


def test_ignore_eos_sends_no_eos_ids() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it:
            request = text_request()
            request.ignore_eos = True
            await it.answer(request)
            assert list(it.decode.requests[0].stop.eos_token_ids) == []

    asyncio.run(run())


def test_stop_string_cuts_the_text() -> None:
    async def run() -> None:
        answer = tiny_tokenizer().encode("the quick. brown").ids
        async with rig(answer, reason=common_pb2.FINISH_REASON_LENGTH) as it:
            request = text_request(max_tokens=len(answer))
            request.stop.append("k. b")
            responses = await it.answer(request)
            text = "".join(response.token.text for response in responses) + responses[-1].finished.text
            assert text == "the quic"
            assert responses[-1].finished.reason == common_pb2.FINISH_REASON_STOP
            assert list(it.decode.requests[0].stop.stop) == ["k. b"]

    asyncio.run(run())


def test_seed_is_the_clients_own_when_given() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it:
            request = text_request()
            request.has_seed, request.sampling.seed, request.sampling.temperature = True, 7, 0.5
            responses = await it.answer(request)
            assert responses[0].accepted.seed == it.prefill.requests[0].sampling.seed == 7
            assert it.decode.requests[0].sampling.temperature == 0.5
            assert it.decode.requests[0].sampling.top_p == 1

    asyncio.run(run())


def test_s23_prefill_refuses_and_decode_is_released() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it:

            async def refuse(request: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
                if request.tokens:
                    raise CapacityError("p0 is full")
                yield prefill_pb2.PrefillResponse()

            it.prefill.script = refuse
            with pytest.raises(CapacityError, match="p0 is full"):
                await it.answer(text_request())
            await it.decode.cancelled.wait()
            it.prefill.script = it.prefill.run
            assert kinds(await it.answer(text_request()))[-1] == "finished"

    asyncio.run(run())


@pytest.mark.parametrize("stopped", [False, True])
def test_s16_decode_dies_after_the_first_token_and_prefill_is_cancelled(*, stopped: bool) -> None:
    async def run() -> None:
        async with rig(ANSWER) as it:
            first_token_seen = asyncio.Event()

            async def hang(request: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
                async for response in it.prefill.until_first_token(request):
                    yield response
                await never()

            async def die(request: decode_pb2.DecodeRequest) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
                yield FakeDecode.grant(request)
                await first_token_seen.wait()
                if stopped:
                    await never()
                raise TransferFailed("d0 lost its KV")

            it.prefill.script, it.decode.script = hang, die
            expected, message = (PeerUnavailable, "d0") if stopped else (TransferFailed, "d0 lost its KV")
            with pytest.raises(expected, match=message):
                async with contextlib.aclosing(it.client.generate(text_request())) as responses:
                    async for response in responses:
                        if response.HasField("token"):
                            first_token_seen.set()
                            if stopped:
                                await it.decode_server.stop(0)
            await it.prefill.cancelled.wait()

    asyncio.run(run())


def test_leg_that_ends_too_soon_is_an_error() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it:

            async def only_grant(request: decode_pb2.DecodeRequest) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
                yield FakeDecode.grant(request)

            it.decode.script = only_grant
            with pytest.raises(PeerUnavailable, match="decode d0 at .* ended its stream before it was done"):
                await it.answer(text_request())

    asyncio.run(run())


def test_decode_that_never_grants_is_given_up_on() -> None:
    async def run() -> None:
        async with rig(ANSWER, reply_seconds=1) as it:

            async def no_grant(request: decode_pb2.DecodeRequest) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
                await never()
                yield FakeDecode.grant(request)

            it.decode.script = no_grant
            with pytest.raises(DeadlinePassed, match="decode d0 at .*: no answer within deadlines.reply = 1 s"):
                await it.answer(text_request())
            await it.decode.cancelled.wait()
            assert it.prefill.requests == []

    asyncio.run(run())


def test_s20_client_leaves_and_both_legs_are_cancelled() -> None:
    async def run() -> None:
        before = outcome("cancelled")
        async with rig(ANSWER) as it:

            async def hang(request: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
                yield prefill_pb2.PrefillResponse(chunk_done=prefill_pb2.ChunkDone(token_end=1))
                await never()

            it.prefill.script = hang
            async with contextlib.aclosing(it.client.generate(text_request())) as responses:
                async for response in responses:
                    if response.HasField("progress"):
                        break
            await it.prefill.cancelled.wait()
            await it.decode.cancelled.wait()
        assert outcome("cancelled") == before + 1
        assert REGISTRY.get_sample_value("headwater_requests_in_flight") == 0

    asyncio.run(run())


def test_answer_does_not_wait_for_prefill_to_quiesce() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it:
            answered = asyncio.Event()

            async def slow(request: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
                async for response in it.prefill.until_first_token(request):
                    yield response
                it.prefill.delivered.set()
                await answered.wait()
                yield prefill_pb2.PrefillResponse(completed=prefill_pb2.PrefillCompleted())

            it.prefill.script = slow
            assert kinds(await it.answer(text_request()))[-1] == "finished"
            answered.set()
        assert not it.prefill.cancelled.is_set()

    asyncio.run(run())


def test_s24_decode_with_another_model_is_named_with_field_and_values() -> None:
    def other_model(_: FakePrefill, decode: FakeDecode) -> None:
        decode.description.geometry.key_size = 32

    async def run() -> None:
        async with rig(ANSWER, prepare=other_model) as it:
            with pytest.raises(GeometryMismatch, match="key_size is .* in prefill and 32 in decode"):
                await it.answer(text_request())
            assert it.prefill.requests == []
            assert it.decode.requests == []
            status = await it.client.status()
            assert [group.state for group in status.groups] == ["serving", "serving"]
            assert "key_size" in status.groups[0].detail
            assert "key_size" in status.groups[1].detail

    asyncio.run(run())


def test_groups_with_another_tokenizer_are_not_used() -> None:
    def other_tokenizer(prefill: FakePrefill, _: FakeDecode) -> None:
        prefill.description.geometry.tokenizer_fingerprint = "other"

    async def run() -> None:
        async with rig(ANSWER, prepare=other_tokenizer) as it:
            with pytest.raises(
                GeometryMismatch, match="tokenizer_fingerprint is other there and tokenizer in the rout"
            ):
                await it.answer(text_request(max_tokens=1))

    asyncio.run(run())


def test_group_that_does_not_serve_gives_its_reason() -> None:
    def loading(prefill: FakePrefill, _: FakeDecode) -> None:
        prefill.description.serving = False
        prefill.description.detail = "loading weights"

    async def run() -> None:
        async with rig(ANSWER, prepare=loading) as it:
            with pytest.raises(PeerUnavailable, match="no prefill group is serving: p0 at .*: not_serving: loading"):
                await it.answer(text_request())

    asyncio.run(run())


def test_status_describes_groups() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it:
            it.prefill.description.free_tokens = 1000
            status = await it.client.status()
            prefill, decode = status.groups
            assert (prefill.name, prefill.role, prefill.state, prefill.layout) == (
                "p0",
                "prefill",
                "serving",
                "PP2 TP1",
            )
            assert (decode.name, decode.role, decode.state, decode.layout) == ("d0", "decode", "serving", "fake")
            assert (decode.used_tokens, decode.capacity_tokens) == (0, 1024)
            assert status.metrics_address.startswith("127.0.0.1:")

    asyncio.run(run())
