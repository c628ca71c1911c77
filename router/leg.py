"""What every way of running a request shares: what it needs of groups and peers, and how it notes that one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from headwater.errors import CapacityError, DeadlinePassed, HeadwaterError, PeerError
from headwater.lifecycle import Logger
from headwater.v1 import common_pb2, decode_pb2, prefill_pb2
from router.snapshot import DecodeGroup, Loss, PrefillGroup, Snapshot


class Peers(Protocol):
    """What a flow needs of `router.peers.Peers`."""

    def prefill(
        self, name: str, request: prefill_pb2.PrefillRequest
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[prefill_pb2.PrefillResponse]]: ...

    def decode(
        self, name: str, request: decode_pb2.DecodeRequest
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[decode_pb2.DecodeResponse]]: ...

    async def regrant(self, name: str, request: decode_pb2.RegrantRequest) -> common_pb2.Grant: ...

    async def redirect(self, name: str, request: prefill_pb2.RedirectRequest) -> None: ...


class Groups(Protocol):
    """What a flow needs of `router.registry.Registry`."""

    def snapshot(self, blocks: Sequence[int] = ()) -> Snapshot: ...

    def listen(self, listener: Callable[[str], None]) -> None: ...

    def failed(self, name: str, error: HeadwaterError) -> None: ...

    def succeeded(self, name: str) -> None: ...

    def dispatched(
        self, name: str, num_tokens: int, blocks: Sequence[int] = ()
    ) -> contextlib.AbstractContextManager[Callable[[], None]]: ...


async def first_response(
    events: AsyncIterator[decode_pb2.DecodeResponse], node: DecodeGroup, seconds: float
) -> decode_pb2.DecodeResponse:
    """What a decode group says first; an empty response when it ends without a word.

    Args:
        seconds: deadlines.reply.

    Raises:
        DeadlinePassed: it says nothing.
    """
    try:
        async with asyncio.timeout(seconds):
            return await anext(events, decode_pb2.DecodeResponse())
    except TimeoutError:
        raise DeadlinePassed(f"decode {node}: no answer within deadlines.reply = {seconds:g} s.") from None


def note_lost(groups: Groups, group: PrefillGroup | DecodeGroup, error: PeerError | CapacityError, log: Logger) -> Loss:
    """A group does not do its part."""
    log.warning("a group does not do its part", group=group.name, error=str(error))
    groups.failed(group.name, error)
    return Loss(group.description.epoch if group.description else "", time.monotonic())
