"""How a group joins routers by itself: it says where it is, again and again, and each router asks it for the rest."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import grpc

from headwater.cluster import Deadlines
from headwater.errors import HeadwaterError, from_rpc_error
from headwater.lifecycle import get_logger
from headwater.rpc import authorization, open_channel
from headwater.v1 import router_pb2, router_pb2_grpc

log = get_logger(__name__)

_REPLY_SECONDS = Deadlines().reply
# Of a lease, before it is renewed.
_RENEW = 1 / 3
_RETRY_SECONDS = 1.0


@contextlib.asynccontextmanager
async def registered(routers: Sequence[str], request: router_pb2.RegisterRequest) -> AsyncIterator[None]:
    """Keeps a group registered with every router while the context lasts. A router that refuses or is not there is
    asked again; the group serves whatever they say.
    """
    tasks = [asyncio.ensure_future(_keep(router, request)) for router in routers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _keep(router: str, request: router_pb2.RegisterRequest) -> None:
    said = None
    async with open_channel(router) as channel:
        stub = router_pb2_grpc.RegistryServiceStub(channel)
        while True:
            try:
                lease = await stub.Register(request, timeout=2 * _REPLY_SECONDS, metadata=authorization())
            except grpc.RpcError as error:
                reason, pause = _reason(from_rpc_error(error, f"router at {router}")), _RETRY_SECONDS
            else:
                reason, pause = "", _RENEW * lease.lease_seconds
            if reason != said:
                said = reason
                if reason:
                    log.warning("not registered", router=router, reason=reason)
                else:
                    log.info("registered", router=router)
            await asyncio.sleep(pause)


def _reason(error: HeadwaterError) -> str:
    return f"{type(error).__name__}: {error}"
