"""How a prefill rank that takes a transfer over gets the KV that earlier attempts delivered, from the decode
ranks that verified it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from headwater.errors import DeadlinePassed, PeerUnavailable, StalePeer, TransferFailed, from_rpc_error
from headwater.rpc import open_channel
from headwater.v1 import common_pb2, transfer_pb2, transfer_pb2_grpc
from kv_transfer.coverage import Coverage
from kv_transfer.geometry import Box, Span
from kv_transfer.landing import Unpacks, box_of, check_size, land
from kv_transfer.sender import Sender
from kv_transfer.streams import say
from kv_transfer.wire import WireFormat

_SLOTS = 2


async def fetch_verified(sender: Sender, grant: common_pb2.Grant, destination: Unpacks) -> int:
    """Brings the KV of tokens [0, grant.verified_tokens) of the sender's layers and heads into `destination`.

    Returns:
        Bytes that came.

    Raises:
        StalePeer, PeerUnavailable, TransferFailed, DeadlinePassed: not all of it came, or not unharmed.
    """
    layout = sender.source.layout
    tokens = Span(0, grant.verified_tokens)
    missing = len(layout.layers) * len(layout.heads)
    total = 0
    taken: set[tuple[Span, Span]] = set()
    for target in grant.targets:
        layers = layout.layers.intersection(Span(target.layer_start, target.layer_end))
        heads = layout.heads.intersection(Span(target.head_start, target.head_end))
        # Decode ranks may be replicas of each other: one of them is enough.
        if layers is None or heads is None or (layers, heads) in taken:
            continue
        taken.add((layers, heads))
        missing -= len(layers) * len(heads)
        total += await _fetch(sender, grant, target, Box(layers, heads, tokens), destination)
    if missing:
        raise TransferFailed(f"the grant of transfer {grant.transfer_id} does not cover this rank's layers and heads.")
    return total


async def _fetch(
    sender: Sender, grant: common_pb2.Grant, target: common_pb2.GrantTarget, box: Box, destination: Unpacks
) -> int:
    peer = f"decode node at {target.transfer_address}"
    owner = object()
    slots = await sender.arena.acquire(owner, min(_SLOTS, sender.arena.num_slots), sender.acknowledge_seconds)
    clean = False
    try:
        async with open_channel(target.transfer_address) as channel:
            call: Any = transfer_pb2_grpc.TransferServiceStub(channel).Fetch()
            try:
                total = await _converse(sender, grant, target, box, destination, slots, call)
            finally:
                call.cancel()
        clean = True
    except grpc.RpcError as broken:
        raise from_rpc_error(broken, peer) from broken
    finally:
        if clean:
            sender.arena.release(owner)
        else:
            # The decode node may still write to them.
            sender.replace(owner)
    return total


async def _converse(
    sender: Sender,
    grant: common_pb2.Grant,
    target: common_pb2.GrantTarget,
    box: Box,
    destination: Unpacks,
    slots: list[int],
    call: Any,
) -> int:
    peer = f"decode node at {target.transfer_address}"
    key = common_pb2.TransferKey(transfer_id=grant.transfer_id, attempt=grant.attempt, epoch=target.epoch)
    wire = WireFormat.of(sender.geometry, grant.wire_dtype)
    addresses = {slot: sender.arena.address(slot) for slot in slots}
    opening = transfer_pb2.OpenFetch(
        key=key,
        token=target.token,
        box=box.to_proto(),
        engine_session=sender.writer.engine.session,
        epoch=sender.epoch,
        slots=[transfer_pb2.LandingSlot(slot=slot, address=address) for slot, address in addresses.items()],
        slot_bytes=sender.arena.slot_bytes,
    )
    await say(call, transfer_pb2.FetchRequest(open=opening), peer)
    coverage = Coverage(box)
    total = 0
    while True:
        try:
            async with asyncio.timeout(sender.acknowledge_seconds):
                response = await call.read()
        except TimeoutError:
            raise DeadlinePassed(
                f"{peer} sent nothing for {sender.acknowledge_seconds:g} s (deadlines.acknowledge)."
            ) from None
        if response is grpc.aio.EOF:
            raise PeerUnavailable(f"{peer} ended the fetch: {await call.details() or 'without a reason'}")
        said = response.close if response.HasField("close") else response.receipt
        if said.key != key:
            raise StalePeer(f"{peer} speaks of transfer {said.key.transfer_id}, attempt {said.key.attempt}.")
        if response.HasField("close"):
            if not coverage.complete:
                raise TransferFailed(f"{peer} ended the fetch with {coverage.missing} of {box.volume} cells missing.")
            return total
        receipt = response.receipt
        where = f"fetch of transfer {grant.transfer_id}: receipt {receipt.sequence}"
        landed = box_of(receipt, where)
        if not receipt.HasField("slot") or receipt.slot not in addresses:
            raise TransferFailed(f"{where}: slot {receipt.slot} is not one that was offered.")
        check_size(receipt, landed, wire, sender.arena.slot_bytes, where)
        try:
            coverage.add(landed)
        except ValueError as error:
            raise TransferFailed(f"{where}: {error}.") from error
        await land(sender.pool, receipt, landed, wire, destination, addresses[receipt.slot], where)
        total += receipt.num_bytes
        ack = transfer_pb2.ReceiptAck(key=key, sequence=receipt.sequence)
        await say(call, transfer_pb2.FetchRequest(ack=ack), peer)
