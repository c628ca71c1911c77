"""A client of the router, as the `headwater` command uses it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

import grpc

from headwater.cluster import Deadlines
from headwater.errors import from_rpc_error
from headwater.rpc import open_channel
from headwater.v1 import router_pb2, router_pb2_grpc

_STATUS_SECONDS = Deadlines().reply


class Client:
    """One channel to a router.

        async with Client("127.0.0.1:7000") as client:
            async for response in client.generate(request): ...

    Every method raises the HeadwaterError that the router reports, or PeerUnavailable when there is none.
    """

    def __init__(self, address: str) -> None:
        self._peer = f"router at {address}"
        self._channel = open_channel(address)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def generate(self, request: router_pb2.GenerateRequest) -> AsyncGenerator[router_pb2.GenerateResponse, None]:
        """The answer's events. Closing the iterator cancels the request."""
        call = self._stub.Generate(request)
        try:
            async for response in call:
                yield response
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._peer) from error
        finally:
            call.cancel()

    async def status(self) -> router_pb2.StatusResponse:
        """What the router knows of its groups."""
        try:
            return await self._stub.Status(router_pb2.StatusRequest(), timeout=_STATUS_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._peer) from error
