"""The router's gRPC calls to prefill and decode groups. Decides nothing; turns every failure into a typed one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from opentelemetry.trace import Span

from headwater import tracing
from headwater.cluster import Cluster
from headwater.errors import DeadlinePassed, HeadwaterError, InvalidRequest, from_rpc_error
from headwater.rpc import open_channel
from headwater.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from router import spans


class Peers:
    """One channel to each group, opened on first use."""

    def __init__(self, cluster: Cluster) -> None:
        self._reply_seconds = cluster.deadlines.reply
        self._stop_seconds = cluster.deadlines.stop
        self._where: dict[str, str] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._prefill: dict[str, prefill_pb2_grpc.PrefillServiceAsyncStub] = {}
        self._decode: dict[str, decode_pb2_grpc.DecodeServiceAsyncStub] = {}
        for group in cluster.prefill:
            self.add(group.name, "prefill", group.address)
        for node in cluster.decode:
            self.add(node.name, "decode", node.address)

    def add(self, name: str, role: str, address: str) -> None:
        """A group that may be called from now on, by a name that no other one has."""
        channel = self._channels[name] = open_channel(address)
        self._where[name] = f"{name} at {address}"
        if role == "prefill":
            self._prefill[name] = prefill_pb2_grpc.PrefillServiceStub(channel)
        else:
            self._decode[name] = decode_pb2_grpc.DecodeServiceStub(channel)

    async def remove(self, name: str) -> None:
        """Ends all calls to a group, and forgets it."""
        self._prefill.pop(name, None)
        self._decode.pop(name, None)
        await self._channels.pop(name).close()

    async def close(self) -> None:
        """Ends all calls."""
        for channel in self._channels.values():
            await channel.close()

    async def describe_prefill(self, name: str) -> prefill_pb2.DescribePrefillResponse:
        """Raises PeerError when the group does not answer within `deadlines.reply`."""
        try:
            return await self._prefill[name].DescribePrefill(
                prefill_pb2.DescribePrefillRequest(), timeout=self._reply_seconds
            )
        except grpc.RpcError as error:
            raise self._unanswered(error, name) from error

    async def describe_decode(self, name: str) -> decode_pb2.DescribeDecodeResponse:
        """Raises PeerError when the group does not answer within `deadlines.reply`."""
        try:
            return await self._decode[name].DescribeDecode(
                decode_pb2.DescribeDecodeRequest(), timeout=self._reply_seconds
            )
        except grpc.RpcError as error:
            raise self._unanswered(error, name) from error

    def prefill(
        self, name: str, request: prefill_pb2.PrefillRequest
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[prefill_pb2.PrefillResponse]]:
        """The prefill leg's responses. Leaving the context ends the call at once.

        Iterating raises the peer's HeadwaterError.
        """
        grant = request.grant
        return self._leg("prefill", name, self._prefill[name].Prefill, request, grant.transfer_id, grant.attempt)

    def decode(
        self, name: str, request: decode_pb2.DecodeRequest
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[decode_pb2.DecodeResponse]]:
        """The decode leg's responses; as `prefill`."""
        return self._leg("decode", name, self._decode[name].Decode, request, request.transfer_id, request.attempt)

    @contextlib.asynccontextmanager
    async def _leg(
        self, leg: str, name: str, method: Callable[..., Any], request: Any, transfer_id: str, attempt: int
    ) -> AsyncGenerator[AsyncIterator[Any], None]:
        """One call, over which the group has the context of its span."""
        with spans.leg(leg, name, request.request_id, transfer_id, attempt) as span:
            call = method(request, metadata=tracing.metadata(span))
            try:
                async with contextlib.aclosing(_responses(call, self._where[name], span)) as responses:
                    yield responses
            finally:
                call.cancel()

    async def regrant(self, name: str, request: decode_pb2.RegrantRequest) -> common_pb2.Grant:
        """Raises PeerError when the node does not begin the attempt."""
        try:
            # It may have to wait for the writers of the attempt before.
            response = await self._decode[name].Regrant(request, timeout=self._reply_seconds + self._stop_seconds)
        except grpc.RpcError as error:
            raise self._unanswered(error, name) from error
        return response.grant

    async def redirect(self, name: str, request: prefill_pb2.RedirectRequest) -> None:
        """Raises PeerError when the group has nothing to redirect any more."""
        try:
            await self._prefill[name].Redirect(request, timeout=self._reply_seconds)
        except grpc.RpcError as error:
            raise self._unanswered(error, name) from error

    async def trace_prefill(self, name: str, request_id: str) -> prefill_pb2.TracePrefillResponse:
        """What a group did for a request that is running or ended lately.

        Raises:
            InvalidRequest: it does not know the request, or there is no such group any more.
            PeerError: it does not answer.
        """
        if name not in self._prefill:
            raise InvalidRequest(f"there is no prefill group {name!r} any more.")
        request = prefill_pb2.TracePrefillRequest(request_id=request_id)
        try:
            return await self._prefill[name].TracePrefill(request, timeout=self._reply_seconds)
        except grpc.RpcError as error:
            raise self._unanswered(error, name) from error

    async def drain(self, name: str, *, draining: bool) -> None:
        """Has a group refuse new requests, or take them again.

        Raises:
            InvalidRequest: there is no such group.
            PeerError: it does not answer.
        """
        try:
            if name in self._prefill:
                await self._prefill[name].DrainPrefill(
                    prefill_pb2.DrainPrefillRequest(draining=draining), timeout=self._reply_seconds
                )
            elif name in self._decode:
                await self._decode[name].DrainDecode(
                    decode_pb2.DrainDecodeRequest(draining=draining), timeout=self._reply_seconds
                )
            else:
                raise InvalidRequest(f"there is no group {name!r}; there are {', '.join(sorted(self._where))}.")
        except grpc.RpcError as error:
            raise self._unanswered(error, name) from error

    def _unanswered(self, error: grpc.RpcError, name: str) -> HeadwaterError:
        if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlinePassed(f"{self._where[name]}: no answer within deadlines.reply = {self._reply_seconds:g} s.")
        return from_rpc_error(error, self._where[name])


async def _responses(call: Any, peer: str, span: Span) -> AsyncGenerator[Any, None]:
    try:
        async for response in call:
            yield response
    except grpc.RpcError as error:
        raised = from_rpc_error(error, peer)
        # Another group may take over, and then the call's end raises nothing.
        tracing.failed(span, raised)
        raise raised from error
