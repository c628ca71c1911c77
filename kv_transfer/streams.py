"""Asynchronous work that must not be abandoned half done, and gRPC streams whose other side may end them."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from headwater.errors import from_status

T = TypeVar("T")


async def to_its_end(work: asyncio.Future[T]) -> T:
    """Awaits `work`; when cancelled meanwhile, however often, lets it end first.

    gRPC cancels a call when its client leaves, and once more when the server stops.
    """
    interrupted: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted
    return work.result()


async def say(call: Any, message: Any, peer: str) -> None:
    """Writes to a stream that this side opened.

    Raises:
        HeadwaterError: the other side has ended the call; the error is its own.
        grpc.RpcError: the call ended while writing.
    """
    try:
        # gRPC cancels a call whose write is cancelled.
        await to_its_end(asyncio.ensure_future(call.write(message)))
    except asyncio.InvalidStateError:
        # The call was over already.
        status = await call.code(), await call.details(), await call.trailing_metadata()
        raise from_status(*status, peer) from None
