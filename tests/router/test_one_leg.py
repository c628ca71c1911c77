"""Short prompts, which a decode group computes itself: real gRPC, groups that follow a script."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from headwater.errors import CapacityError, PeerUnavailable
from headwater.tokens import unpack
from headwater.v1 import decode_pb2, router_pb2
from tests.router.fakes import FakeDecode, FakePrefill, Rig, kinds, never, rig

ANSWER = [70, 80, 90, 100]
SHORT = [1, 2, 3, 4, 5]


def prompt(token_ids: list[int], max_tokens: int = 4) -> router_pb2.GenerateRequest:
    return router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=token_ids), max_tokens=max_tokens)


def can(_: FakePrefill, decode: FakeDecode) -> None:
    decode.description.prefills = True


def short() -> contextlib.AbstractAsyncContextManager[Rig]:
    return rig(ANSWER, prepare=can, router_section=f"local_prefill_tokens = {len(SHORT)}")


def tokens(responses: list[router_pb2.GenerateResponse]) -> list[int]:
    return [response.token.id for response in responses if response.HasField("token")]


def test_a_short_prompt_goes_to_the_decode_group_alone() -> None:
    async def run() -> None:
        async with short() as it:
            responses = await it.answer(prompt(SHORT))
            assert kinds(responses) == ["accepted", *["token"] * 4, "finished"]
            assert tokens(responses) == ANSWER
            assert it.prefill.requests == []
            (request,) = it.decode.requests
            assert list(unpack(request.tokens)) == SHORT
            assert (request.transfer_id, request.num_prompt_tokens, request.stop.max_tokens) == ("", 5, 4)
            accepted, finished = responses[0].accepted, responses[-1].finished
            assert (accepted.prefill_group, accepted.decode_group, accepted.transfer_id) == ("d0", "d0", "")
            assert (accepted.num_prompt_tokens, accepted.num_chunks) == (5, 1)
            assert accepted.seed == request.sampling.seed
            assert (finished.ttft.queue, finished.ttft.compute, finished.ttft.bubble) == (0.001, 0.002, 0)
            assert finished.commit_after_first_token_seconds == 0

    asyncio.run(run())


def test_a_longer_prompt_and_a_group_that_cannot_go_the_usual_way() -> None:
    async def run() -> None:
        async with short() as it:
            responses = await it.answer(prompt([*SHORT, 6]))
            assert tokens(responses) == ANSWER
            assert responses[0].accepted.prefill_group == "p0"
            assert it.decode.requests[0].tokens == b""
        async with rig(ANSWER, router_section="local_prefill_tokens = 64") as it:
            assert (await it.answer(prompt(SHORT)))[0].accepted.prefill_group == "p0"
        async with rig(ANSWER, prepare=can) as it:
            assert (await it.answer(prompt(SHORT)))[0].accepted.prefill_group == "p0"

    asyncio.run(run())


def test_a_short_prompt_needs_no_prefill_group() -> None:
    def alone(prefill: FakePrefill, decode: FakeDecode) -> None:
        can(prefill, decode)
        prefill.description.serving = False

    async def run() -> None:
        async with rig(ANSWER, prepare=alone, router_section="local_prefill_tokens = 5") as it:
            assert tokens(await it.answer(prompt(SHORT))) == ANSWER
            with pytest.raises(PeerUnavailable, match="no prefill group is serving"):
                await it.answer(prompt([*SHORT, 6]))

    asyncio.run(run())


def test_a_group_with_another_tokenizer_is_not_given_prompts() -> None:
    def other(prefill: FakePrefill, decode: FakeDecode) -> None:
        can(prefill, decode)
        decode.description.geometry.tokenizer_fingerprint = "other"

    async def run() -> None:
        async with rig(ANSWER, prepare=other, router_section="local_prefill_tokens = 5") as it:
            assert tokens(await it.answer(prompt(SHORT, max_tokens=1))) == ANSWER[:1]
            assert it.decode.requests == []

    asyncio.run(run())


def test_a_full_group_leaves_one_token_to_a_prefill_group() -> None:
    async def run() -> None:
        async with short() as it:

            async def full(request: decode_pb2.DecodeRequest) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
                raise CapacityError("d0 is full")
                yield decode_pb2.DecodeResponse()

            it.decode.script = full
            responses = await it.answer(prompt(SHORT, max_tokens=1))
            assert tokens(responses) == ANSWER[:1]
            assert responses[0].accepted.prefill_group == "p0"

    asyncio.run(run())


def test_a_group_that_ends_too_soon_or_a_client_that_leaves() -> None:
    async def run() -> None:
        async with short() as it:

            async def too_soon(request: decode_pb2.DecodeRequest) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
                for response in it.decode.alone()[:3]:
                    yield response

            it.decode.script = too_soon
            with pytest.raises(PeerUnavailable, match="decode d0 at .* ended its stream before it was done"):
                await it.answer(prompt(SHORT))

            async def hang(request: decode_pb2.DecodeRequest) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
                yield it.decode.alone()[0]
                await never()

            it.decode.script = hang
            async with contextlib.aclosing(it.client.generate(prompt(SHORT))) as responses:
                assert (await anext(responses)).HasField("accepted")
            await it.decode.cancelled.wait()

    asyncio.run(run())
