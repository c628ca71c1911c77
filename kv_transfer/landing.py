"""The receiving half of a delivery, whichever way it goes: a box that is said to have landed is checked, put in
place and acknowledged.
"""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import Executor
from typing import Protocol

from headwater.errors import TransferFailed
from headwater.v1 import common_pb2, transfer_pb2
from kv_transfer import memory
from kv_transfer.geometry import Box, PagedLayout, PageTable
from kv_transfer.memory import HostBuffer
from kv_transfer.planner import packed_bytes, plan
from kv_transfer.wire import WireFormat


class Unpacks(Protocol):
    """The half of `incoming.Destination` that is needed here."""

    def unpack(self, box: Box, address: int) -> None: ...

    def digest(self, box: Box) -> bytes: ...


@dataclasses.dataclass(frozen=True)
class Region:
    """Memory that writers wrote to page to page."""

    layout: PagedLayout
    pages: PageTable
    address: int


def box_of(receipt: transfer_pb2.Receipt, where: str) -> Box:
    """Raises TransferFailed when the receipt's ranges are empty or reversed."""
    try:
        return Box.from_proto(receipt.box)
    except ValueError as error:
        raise TransferFailed(f"{where}: {error}.") from error


def check_size(receipt: transfer_pb2.Receipt, box: Box, wire: WireFormat, limit: int | None, where: str) -> None:
    """Raises TransferFailed when the receipt's size is not its box's, or exceeds a slot's `limit`."""
    num_bytes = wire.num_bytes(box)
    if receipt.num_bytes != num_bytes or (limit is not None and num_bytes > limit):
        raise TransferFailed(f"{where}: {receipt.num_bytes} bytes do not make {box} ({num_bytes} bytes).")


async def land(
    pool: Executor,
    receipt: transfer_pb2.Receipt,
    box: Box,
    wire: WireFormat,
    destination: Unpacks,
    at: int | Region,
    where: str,
) -> None:
    """Puts a box in place and verifies it there: what is checked is what will be read, and no peer can write to it.
    A landing slot could change between a check and the copy.

    Args:
        pool: threads for the work.
        at: address of the landing slot, or the region that the box was written to.

    Raises:
        TransferFailed: the bytes are not those that were sent.
    """

    def work() -> bool:
        if isinstance(at, Region):
            return not receipt.digest or _digest_of(at, box) == receipt.digest
        if not wire.converts:
            destination.unpack(box, at)
            return not receipt.digest or destination.digest(box) == receipt.digest
        landed = HostBuffer(receipt.num_bytes)
        memory.copy(at, landed.address, receipt.num_bytes)
        if receipt.digest and memory.digest(landed.address, receipt.num_bytes) != receipt.digest:
            return False
        local = HostBuffer(packed_bytes(box, wire.local_cell))
        wire.decode(box, landed.address, local.address)
        destination.unpack(box, local.address)
        return True

    if not await asyncio.get_running_loop().run_in_executor(pool, work):
        raise TransferFailed(
            f"{where}: the bytes of {box} do not have the digest that the writer computed. "
            "They were damaged or overwritten on the way; nothing of this transfer is used."
        )


def _digest_of(region: Region, box: Box) -> bytes:
    return memory.digest_in_place(plan(region.layout, region.pages, box).copies(), region.address)


def landing_slots(key: common_pb2.TransferKey, slots: dict[int, int]) -> transfer_pb2.Slots:
    """`slots` (number → address) as a message."""
    return transfer_pb2.Slots(
        key=key, slots=[transfer_pb2.LandingSlot(slot=slot, address=address) for slot, address in slots.items()]
    )
