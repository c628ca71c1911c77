"""Asynchronous work that must not be abandoned half done, and gRPC streams whose other side may end them."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import grpc.aio

from headwater.errors import HeadwaterError, from_status

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
        raise await _how_it_ended(call, peer) from None


async def end_of_saying(call: Any, peer: str) -> None:
    """Nothing more is said on a stream that this side opened.

    Raises:
        HeadwaterError: the other side has ended the call; the error is its own.
    """
    try:
        await call.done_writing()
    except grpc.aio.InternalError:
        # gRPC has no error of its own for it: a call that is over cannot be closed once more.
        raise await _how_it_ended(call, peer) from None


async def _how_it_ended(call: Any, peer: str) -> HeadwaterError:
    return from_status(await call.code(), await call.details(), await call.trailing_metadata(), peer)
