"""Requests that are started anew on other groups: real gRPC, groups that follow a script."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest
from prometheus_client import REGISTRY

from headwater.errors import CapacityError, HeadwaterError, InvalidRequest, PeerUnavailable
from headwater.v1 import decode_pb2, prefill_pb2, router_pb2
from tests.router.fakes import FakeDecode, FakePrefill, Site, kinds, site, text_request

ANSWER = [70, 80, 90, 100]


def retries() -> float:
    return REGISTRY.get_sample_value("headwater_retries_total") or 0.0


def first_prefills_fail(it: Site, error: HeadwaterError, count: int = 1) -> None:
    """The first `count` requests fail, whichever groups they come to."""
    left = [error] * count

    def script(group: FakePrefill) -> None:
        async def run(request: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
            if left:
                raise left.pop()
            async for response in group.run(request):
                yield response

        group.script = run

    for group in it.prefill:
        script(group)


@pytest.mark.parametrize("error", [CapacityError("p is full"), PeerUnavailable("p is gone")])
def test_s23_a_prefill_group_that_does_not_begin_is_replaced(error: HeadwaterError) -> None:
    async def run() -> None:
        async with site(ANSWER, 2) as it:
            before = retries()
            first_prefills_fail(it, error)
            responses = await it.answer(text_request())
            assert [response.token.id for response in responses if response.HasField("token")] == ANSWER
            assert kinds(responses).count("accepted") == 2
            # Each group was asked once, and the second try was a transfer of its own.
            (one,), (other,) = (group.requests for group in it.prefill)
            assert one.grant.transfer_id != other.grant.transfer_id
            assert {one.request_id.partition("~")[0]} == {other.request_id.partition("~")[0]}
            assert retries() == before + 1

    asyncio.run(run())


def test_a_decode_group_that_does_not_grant_is_replaced() -> None:
    async def run() -> None:
        async with site(ANSWER, 2) as it:
            left = [CapacityError("d is full")]

            def first_fails(group: FakeDecode) -> None:
                async def script(request: decode_pb2.DecodeRequest) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
                    if left:
                        raise left.pop()
                    async for response in group.run(request):
                        yield response

                group.script = script

            for group in it.decode:
                first_fails(group)
            responses = await it.answer(text_request())
            assert [response.token.id for response in responses if response.HasField("token")] == ANSWER
            assert [len(group.requests) for group in it.decode] == [1, 1]
            assert sum(len(group.requests) for group in it.prefill) == 1

    asyncio.run(run())


def test_when_nobody_is_left_the_first_reason_is_told() -> None:
    async def run() -> None:
        async with site(ANSWER, 2) as it:
            first_prefills_fail(it, CapacityError("everybody is full"), count=9)
            with pytest.raises(CapacityError, match="everybody is full"):
                await it.answer(text_request())
            assert [len(group.requests) for group in it.prefill] == [1, 1]

    asyncio.run(run())


def test_a_bad_request_is_not_tried_again() -> None:
    async def run() -> None:
        async with site(ANSWER, 2) as it:
            before = retries()
            first_prefills_fail(it, InvalidRequest("never"), count=9)
            with pytest.raises(InvalidRequest, match="never"):
                await it.answer(text_request())
            assert sum(len(group.requests) for group in it.prefill) == 1
            assert retries() == before

    asyncio.run(run())


def test_after_the_first_token_nothing_is_started_anew() -> None:
    async def run() -> None:
        async with site(ANSWER, 2) as it:
            before = retries()

            def ends_too_soon(group: FakePrefill) -> None:
                async def script(
                    request: prefill_pb2.PrefillRequest,
                ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
                    async for response in group.until_first_token(request):
                        yield response
                    raise PeerUnavailable("p is gone")

                group.script = script

            for group in it.prefill:
                ends_too_soon(group)
            seen: list[router_pb2.GenerateResponse] = []

            async def ask() -> None:
                async with contextlib.aclosing(it.client.generate(text_request())) as responses:
                    async for response in responses:
                        seen.append(response)  # noqa: PERF401 - what came before the error counts

            with pytest.raises(PeerUnavailable, match="p is gone"):
                await ask()
            assert [response.token.id for response in seen if response.HasField("token")] == ANSWER[:1]
            assert kinds(seen).count("accepted") == 1
            assert retries() == before

    asyncio.run(run())


def test_s20_a_group_that_fails_every_request_is_left_alone_for_a_while() -> None:
    async def run() -> None:
        async with site(ANSWER, 2, 'prefill_policy = "round_robin"') as it:
            broken, sound = it.prefill

            async def gone(request: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
                raise PeerUnavailable("p0 is gone")
                yield prefill_pb2.PrefillResponse()

            broken.script = gone
            for _ in range(12):
                responses = await it.answer(text_request())
                assert [response.token.id for response in responses if response.HasField("token")] == ANSWER
            # The breaker opened after three faults (and lets one request a second through), where every other request
            # would have come first to the broken group.
            assert 3 <= len(broken.requests) < 6
            assert len(sound.requests) == 12

    asyncio.run(run())
