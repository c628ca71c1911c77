"""How a decode rank gives what is verified of a transfer to a prefill rank that takes it over.

The counterpart of `fetching`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

from headwater.errors import InvalidRequest, PeerUnavailable, StalePeer
from headwater.v1 import common_pb2, transfer_pb2
from kv_transfer.geometry import Box
from kv_transfer.incoming import Attempt, Incoming
from kv_transfer.pushing import Push, PushTarget
from kv_transfer.reception import check_key

if TYPE_CHECKING:
    from kv_transfer.receiver import Receiver


async def give(
    receiver: Receiver,
    incoming: Incoming,
    attempt: Attempt,
    opening: transfer_pb2.OpenFetch,
    requests: AsyncIterator[transfer_pb2.FetchRequest],
) -> AsyncGenerator[transfer_pb2.FetchResponse, None]:
    """Writes the box that is asked for into the other side's slots, with receipts, until all is acknowledged.

    Raises:
        InvalidRequest: the box is not within what is verified.
        StalePeer: the attempt is over.
        PeerUnavailable: the prefill rank left.
        TransferFailed, DeadlinePassed: it could not be written.
    """
    where = f"transfer {incoming.transfer_id}: fetch by {opening.engine_session}"
    box = _asked_for(incoming, opening, where)
    responses: asyncio.Queue[transfer_pb2.FetchResponse] = asyncio.Queue()
    push = Push(
        receiver.writer,
        receiver.arena,
        receiver.pool,
        incoming.destination.pack,
        PushTarget(
            session=opening.engine_session,
            epoch=opening.epoch,
            key=opening.key,
            slot_bytes=opening.slot_bytes,
            slots={landing.slot: landing.address for landing in opening.slots},
            digests=True,
            peer=f"prefill rank at {opening.engine_session}",
        ),
        incoming.wire,
        say=lambda receipt: responses.put_nowait(transfer_pb2.FetchResponse(receipt=receipt)),
        acknowledge_seconds=receiver.options.acknowledge_seconds,
    )
    pushing: asyncio.Future[Any] = asyncio.ensure_future(_push_all(push, box))
    hearing: asyncio.Future[Any] = asyncio.ensure_future(_take_acks(requests, push, opening.key))
    stopped: asyncio.Future[Any] = asyncio.ensure_future(attempt.stopped.wait())
    taking: asyncio.Future[Any] = asyncio.ensure_future(responses.get())
    everything = {pushing, hearing, stopped, taking}
    try:
        while not (pushing.done() or hearing.done() or stopped.done()) or taking.done():
            if taking.done():
                response = taking.result()
                everything.discard(taking)
                taking = asyncio.ensure_future(responses.get())
                everything.add(taking)
                yield response
            await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            raise StalePeer(f"{where}: the attempt is over: {attempt.stop_reason}.")
        if not pushing.done():
            # The other side left; what it said last is the reason.
            hearing.result()
            raise PeerUnavailable(f"{where}: the prefill rank left.")
        pushing.result()
        yield transfer_pb2.FetchResponse(close=transfer_pb2.CloseDelivery(key=opening.key, complete=True))
    finally:
        for waiting in everything:
            waiting.cancel()
        await asyncio.gather(*everything, return_exceptions=True)
        await push.stop()


def _asked_for(incoming: Incoming, opening: transfer_pb2.OpenFetch, where: str) -> Box:
    try:
        box = Box.from_proto(opening.box)
    except ValueError as error:
        raise InvalidRequest(f"{where}: {error}.") from error
    if not incoming.coverage.whole.contains(box) or box.tokens.end > incoming.verified_tokens:
        raise InvalidRequest(
            f"{where}: {box} is not within what is verified, {incoming.coverage.whole} to token "
            f"{incoming.verified_tokens}."
        )
    return box


async def _push_all(push: Push, box: Box) -> None:
    await push.push(box)
    await push.acknowledged_all()


async def _take_acks(
    requests: AsyncIterator[transfer_pb2.FetchRequest], push: Push, key: common_pb2.TransferKey
) -> None:
    async for message in requests:
        if not message.HasField("ack"):
            raise StalePeer("a fetch goes on with acknowledgements.")
        check_key(message.ack.key, key)
        push.acknowledged(message.ack.sequence)
