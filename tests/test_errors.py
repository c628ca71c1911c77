"""Every error class crosses a real gRPC server and comes back as itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest

from headwater import errors
from headwater.errors import HeadwaterError, from_rpc_error, from_status
from headwater.rpc import Server, open_channel
from headwater.v1 import prefill_pb2, prefill_pb2_grpc, transfer_pb2, transfer_pb2_grpc

CODES: dict[type[HeadwaterError], grpc.StatusCode] = {
    errors.HeadwaterError: grpc.StatusCode.INTERNAL,
    errors.LocalError: grpc.StatusCode.INTERNAL,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidConfig: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelFolderError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnsupportedModel: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.DuplicateTransfer: grpc.StatusCode.ALREADY_EXISTS,
    errors.IllegalEvent: grpc.StatusCode.INTERNAL,
    errors.CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.RequestCancelled: grpc.StatusCode.CANCELLED,
    errors.PeerError: grpc.StatusCode.INTERNAL,
    errors.PeerUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.GeometryMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StalePeer: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TransferFailed: grpc.StatusCode.ABORTED,
    errors.DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class Raising(prefill_pb2_grpc.PrefillServiceServicer, transfer_pb2_grpc.TransferServiceServicer):
    """Raises `error` from every kind of call; from streams after one response."""

    error: Exception

    async def DescribePrefill(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.DescribePrefillRequest, context: object
    ) -> prefill_pb2.DescribePrefillResponse:
        raise self.error

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: object
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        yield prefill_pb2.PrefillResponse(chunk_done=prefill_pb2.ChunkDone(token_end=1))
        raise self.error

    async def Deliver(  # noqa: N802
        self, request_iterator: AsyncIterator[transfer_pb2.DeliverRequest], context: object
    ) -> AsyncIterator[transfer_pb2.DeliverResponse]:
        yield transfer_pb2.DeliverResponse()
        raise self.error


async def raised_by(call: str, error: Exception) -> grpc.RpcError:
    """What a client sees when a servicer raises `error`."""
    servicer, server = Raising(), Server("127.0.0.1:0", [])
    servicer.error = error
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server.grpc_server)
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(servicer, server.grpc_server)
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            prefill = prefill_pb2_grpc.PrefillServiceStub(channel)
            if call == "unary":
                await prefill.DescribePrefill(prefill_pb2.DescribePrefillRequest())
                raise AssertionError
            responses: AsyncIterator[object]
            if call == "server stream":
                responses = aiter(prefill.Prefill(prefill_pb2.PrefillRequest()))
            else:
                responses = aiter(transfer_pb2_grpc.TransferServiceStub(channel).Deliver(iter(())))
            with contextlib.suppress(StopAsyncIteration):
                await anext(responses)
            async for _ in responses:
                pass
            raise AssertionError
    except grpc.RpcError as seen:
        return seen
    finally:
        await server.stop(0)


def test_every_class_has_its_code() -> None:
    assert set(errors._CLASSES.values()) == set(CODES)
    assert {error: error.code for error in CODES} == CODES


@pytest.mark.parametrize("call", ["unary", "server stream", "both stream"])
def test_every_class_and_message_comes_back(call: str) -> None:
    async def run() -> None:
        for kind, code in CODES.items():
            message = f"{kind.__name__}: 100 % of “p0 × d0”\nare gone."
            seen = await raised_by(call, kind(message))
            assert isinstance(seen, grpc.aio.AioRpcError)
            assert seen.code() is code
            back = from_rpc_error(seen, "p0 at h:1")
            assert (type(back), str(back)) == (kind, message)

    asyncio.run(run())


def test_how_long_to_wait_for_room_comes_along() -> None:
    error = errors.CapacityError("full")
    error.retry_after_seconds = 2.5
    seen = asyncio.run(raised_by("unary", error))
    assert isinstance(seen, grpc.aio.AioRpcError)
    assert ("grpc-retry-pushback-ms", "2500") in [(key, value) for key, value in seen.trailing_metadata()]
    back = from_rpc_error(seen, "p0 at h:1")
    assert isinstance(back, errors.CapacityError)
    assert back.retry_after_seconds == 2.5


@pytest.mark.parametrize("letter", ["a", "漢", "\n"])
def test_long_message_is_shortened_and_keeps_its_class(letter: str) -> None:
    """GRPC drops a status whose headers are too long, and reports RESOURCE_EXHAUSTED instead."""
    seen = asyncio.run(raised_by("unary", errors.TransferFailed(letter * 20_000)))
    back = from_rpc_error(seen, "p0 at h:1")
    assert type(back) is errors.TransferFailed
    start, _, rest = str(back).partition(" … ")
    assert set(start) == {letter}
    assert len(start) > 600
    assert rest == "(cut; the rest is in the log of the process that failed)"


def test_message_that_is_not_unicode_comes_back() -> None:
    """A path may hold bytes that are not UTF-8, which Python keeps as lone surrogates."""
    seen = asyncio.run(raised_by("unary", errors.ModelFolderError("no folder m\udcff")))
    back = from_rpc_error(seen, "p0 at h:1")
    assert (type(back), str(back)) == (errors.ModelFolderError, "no folder m?")


@pytest.mark.parametrize("call", ["unary", "server stream"])
def test_defect_of_a_peer_names_the_peer(call: str) -> None:
    back = from_rpc_error(asyncio.run(raised_by(call, ValueError("boom"))), "p0 at h:1")
    assert type(back) is errors.PeerUnavailable
    assert str(back) == "p0 at h:1: Unexpected <class 'ValueError'>: boom"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.CapacityError),
        (grpc.StatusCode.UNAVAILABLE, errors.PeerUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlinePassed),
        (grpc.StatusCode.ABORTED, errors.TransferFailed),
        (grpc.StatusCode.UNKNOWN, errors.PeerUnavailable),
        (grpc.StatusCode.UNIMPLEMENTED, errors.PeerUnavailable),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.PeerUnavailable),
    ],
)
def test_status_without_a_known_class_is_read_by_its_code(code: grpc.StatusCode, kind: type[HeadwaterError]) -> None:
    for trailing in (None, (), ((errors.ERROR_CLASS_KEY, "FromTheFuture"),), ((errors.ERROR_CLASS_KEY, b"x"),)):
        back = from_status(code, "details", trailing, "p0 at h:1")
        assert (type(back), str(back)) == (kind, "p0 at h:1: details")
    assert str(from_status(code, "", None, "p0 at h:1")) == f"p0 at h:1: {code.name}"


def test_server_that_is_not_there() -> None:
    async def run() -> None:
        async with open_channel("127.0.0.1:1") as channel:
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                await stub.DescribePrefill(prefill_pb2.DescribePrefillRequest())
        back = from_rpc_error(caught.value, "p0 at 127.0.0.1:1")
        assert type(back) is errors.PeerUnavailable
        assert str(back).startswith("p0 at 127.0.0.1:1: ")

    asyncio.run(run())


def test_error_that_is_no_call() -> None:
    back = from_rpc_error(grpc.RpcError("odd"), "p0 at h:1")
    assert (type(back), str(back)) == (errors.PeerUnavailable, "p0 at h:1: the call failed: odd")


def test_error_class_by_name() -> None:
    assert errors.error_class("CapacityError") is errors.CapacityError
    assert errors.error_class("ValueError") is errors.PeerUnavailable
