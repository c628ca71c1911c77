"""The router's gRPC calls to prefill and decode groups. Decides nothing; turns every failure into a typed one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import grpc.aio

from headwater.cluster import Cluster
from headwater.errors import DeadlinePassed, HeadwaterError, InvalidRequest, from_rpc_error
from headwater.rpc import open_channel
from headwater.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc


class Peers:
    """One channel to each group of the cluster file, opened on first use."""

    def __init__(self, cluster: Cluster) -> None:
        self._reply_seconds = cluster.deadlines.reply
        self._stop_seconds = cluster.deadlines.stop
        self._where = {group.name: f"{group.name} at {group.address}" for group in cluster.prefill}
        self._where |= {node.name: f"{node.name} at {node.address}" for node in cluster.decode}
        prefill = {group.name: open_channel(group.address) for group in cluster.prefill}
        decode = {group.name: open_channel(group.address) for group in cluster.decode}
        self._channels = [*prefill.values(), *decode.values()]
        self._prefill = {name: prefill_pb2_grpc.PrefillServiceStub(channel) for name, channel in prefill.items()}
        self._decode = {name: decode_pb2_grpc.DecodeServiceStub(channel) for name, channel in decode.items()}

    async def close(self) -> None:
        """Ends all calls."""
        for channel in self._channels:
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
        return contextlib.aclosing(_responses(self._prefill[name].Prefill(request), self._where[name]))

    def decode(
        self, name: str, request: decode_pb2.DecodeRequest
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[decode_pb2.DecodeResponse]]:
        """The decode leg's responses; as `prefill`."""
        return contextlib.aclosing(_responses(self._decode[name].Decode(request), self._where[name]))

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


async def _responses(call: Any, peer: str) -> AsyncGenerator[Any, None]:
    try:
        async for response in call:
            yield response
    except grpc.RpcError as error:
        raise from_rpc_error(error, peer) from error
    finally:
        call.cancel()
