"""What a client without this package sees: gRPC's code, and a message that says what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import grpc
import grpc.aio
import pytest

from headwater.errors import CapacityError, PeerError, TransferFailed
from headwater.rpc import open_channel
from headwater.v1 import prefill_pb2, router_pb2, router_pb2_grpc
from tests.router.fakes import FakeDecode, FakePrefill, rig, text_request


def nothing(prefill: FakePrefill, decode: FakeDecode) -> None:
    pass


def other_model(prefill: FakePrefill, decode: FakeDecode) -> None:
    decode.description.geometry.model_fingerprint = "other"


def not_serving(prefill: FakePrefill, decode: FakeDecode) -> None:
    decode.description.serving = False
    decode.description.detail = "loading weights"


def refusing(error: PeerError | CapacityError) -> Callable[[FakePrefill, FakeDecode], None]:
    async def refuse(request: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        if request.tokens:
            raise error
        yield prefill_pb2.PrefillResponse()

    def prepare(prefill: FakePrefill, decode: FakeDecode) -> None:
        prefill.script = refuse

    return prepare


@pytest.mark.parametrize(
    ("prepare", "request_", "code", "details"),
    [
        (nothing, text_request(max_tokens=0), grpc.StatusCode.INVALID_ARGUMENT, "it must be at least 1"),
        (nothing, text_request("fox" * 100), grpc.StatusCode.INVALID_ARGUMENT, "the model's context is 64"),
        (
            other_model,
            text_request(),
            grpc.StatusCode.FAILED_PRECONDITION,
            "model_fingerprint is model in prefill and oth",
        ),
        (not_serving, text_request(), grpc.StatusCode.UNAVAILABLE, "not_serving: loading weights"),
        (refusing(CapacityError("p0 is full")), text_request(), grpc.StatusCode.RESOURCE_EXHAUSTED, "p0 is full"),
        (refusing(TransferFailed("lost")), text_request(), grpc.StatusCode.ABORTED, "lost"),
    ],
)
def test_code_and_message(
    prepare: Callable[[FakePrefill, FakeDecode], None],
    request_: router_pb2.GenerateRequest,
    code: grpc.StatusCode,
    details: str,
) -> None:
    async def run() -> None:
        async with rig([70, 80], prepare=prepare) as it, open_channel(it.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in router_pb2_grpc.RouterServiceStub(channel).Generate(request_):
                    pass
            assert caught.value.code() is code
            assert details in (caught.value.details() or "")

    asyncio.run(run())
