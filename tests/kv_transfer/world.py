"""Prefill groups and decode groups of any layout in one process: real gRPC on loopback, in-memory engines with
faults, and KV whose every byte is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headwater.errors import HeadwaterError
from headwater.rpc import Server
from headwater.v1 import common_pb2, transfer_pb2_grpc
from kv_transfer import memory
from kv_transfer.engine import TransferEngine
from kv_transfer.fetching import fetch_verified
from kv_transfer.geometry import CellSize, PagedLayout, Span, head_share
from kv_transfer.incoming import Incoming, PagedDestination
from kv_transfer.memory import HostBuffer
from kv_transfer.memory_engine import Faults, MemoryFabric
from kv_transfer.mooncake import MooncakeEngine
from kv_transfer.receiver import Receiver, ReceiverOptions, TransferServicer, join_grants
from kv_transfer.sender import Outgoing, PagedSource, Sender, WriterRank
from kv_transfer.slots import SlotArena
from kv_transfer.wire import _NUMPY
from kv_transfer.writer import Writer

LAYERS, HEADS, KEY, VALUE = 5, 4, 8, 6
SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Shape:
    """A group's layout. Boundaries default to shares as even as they go."""

    pp: int = 1
    tp: int = 1
    page_size: int = 4
    dtype: str = "float32"
    boundaries: tuple[int, ...] = ()

    def ranks(self) -> list[tuple[Span, Span, int, int]]:
        """(layers, heads, replica, replicas) of each rank; rank = stage · tp + tensor rank."""
        edges = self.boundaries or tuple(LAYERS * stage // self.pp for stage in range(self.pp + 1))
        shares = [head_share(HEADS, self.tp, rank) for rank in range(self.tp)]
        return [
            (Span(start, end), share.heads, share.replica, share.num_replicas)
            for start, end in itertools.pairwise(edges)
            for share in shares
        ]

    def geometry(self) -> common_pb2.Geometry:
        return common_pb2.Geometry(
            num_layers=LAYERS,
            num_kv_heads=HEADS,
            key_size=KEY,
            value_size=VALUE,
            dtype=self.dtype,
            page_size=self.page_size,
        )


def truth(name: str, num_tokens: int) -> list[npt.NDArray[np.float32]]:
    """KV of a transfer: keys and values of each layer in turn, [token, head, size]."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    sizes = [KEY, VALUE] * LAYERS
    return [random.standard_normal((num_tokens, HEADS, size), dtype=np.float32) for size in sizes]


def part_of(layout: PagedLayout, address: int, layer: int, part: int, dtype: str) -> npt.NDArray[Any]:
    """[slot, head, size] of one layer's keys or values, where they lie."""
    kind = np.dtype(_NUMPY[dtype])
    start = (layer - layout.layers.start) * layout.layer_bytes + part * layout.part_bytes[0]
    shape = (layout.num_pages * layout.page_size, len(layout.heads), (KEY, VALUE)[part])
    num_bytes = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer(memory.view(address + start, num_bytes), dtype=kind).reshape(shape)


def _slots(layout: PagedLayout, pages: Sequence[int], tokens: range) -> list[int]:
    return [pages[token // layout.page_size] * layout.page_size + token % layout.page_size for token in tokens]


class Kv:
    """One request's KV on one decode rank: pages in a shuffled order, in memory of its own."""

    def __init__(self, name: str, shape: Shape, layers: Span, heads: Span, num_tokens: int) -> None:
        self.name, self.dtype = name, shape.dtype
        num_pages = -(-num_tokens // shape.page_size) + 1
        self.layout = PagedLayout(layers, heads, shape.page_size, num_pages, CellSize.of(shape.geometry()))
        self.pages = np.random.default_rng(len(name)).permutation(num_pages)[: num_pages - 1].tolist()
        self.buffer = HostBuffer(self.layout.total_bytes)
        self.address = self.buffer.address
        self.retired = False
        self._paged = PagedDestination(self.layout, self.pages, self.address)
        self.unpack, self.pack, self.digest = self._paged.unpack, self._paged.pack, self._paged.digest

    def retire(self) -> None:
        self.retired = True
        self.buffer.retire()

    def content(self, num_tokens: int) -> list[npt.NDArray[Any]]:
        """As `truth`, of this rank's layers and heads."""
        slots = _slots(self.layout, self.pages, range(num_tokens))
        return [
            part_of(self.layout, self.address, layer, part, self.dtype)[slots]
            for layer in range(self.layout.layers.start, self.layout.layers.end)
            for part in (0, 1)
        ]


class Fabric(Protocol):
    """Makes engines that reach each other."""

    def engine(self, name: str) -> TransferEngine: ...


class MooncakeFabric:
    """The real one, over TCP."""

    def __init__(self, write_seconds: float = SECONDS) -> None:
        self._write_seconds = write_seconds

    def engine(self, name: str) -> TransferEngine:
        return MooncakeEngine("127.0.0.1", "tcp", self._write_seconds)


class PrefillRank:
    """A source rank with a pool of pages."""

    def __init__(
        self,
        fabric: Fabric,
        shape: Shape,
        rank: int,
        epoch: str,
        *,
        num_pages: int,
        write_seconds: float,
        segment_bytes: int = 400,
    ) -> None:
        layers, heads, replica, replicas = shape.ranks()[rank]
        self.dtype = shape.dtype
        self.layout = PagedLayout(layers, heads, shape.page_size, num_pages, CellSize.of(shape.geometry()))
        self.pool = HostBuffer(self.layout.total_bytes)
        self.engine = fabric.engine(f"prefill-{epoch}-{rank}")
        self.arena = SlotArena(self.engine, 3, segment_bytes)
        self.writer = Writer(self.engine, write_seconds=write_seconds, max_bytes_in_flight=4 * segment_bytes)
        self.sender = Sender(
            self.writer,
            self.arena,
            PagedSource(self.layout, self.pool.address),
            shape.geometry(),
            WriterRank(rank, epoch, replica, replicas, samples=rank == shape.pp * shape.tp - 1),
            chunk_tokens=8,
            reply_seconds=SECONDS,
            acknowledge_seconds=SECONDS,
        )
        self.failures: list[HeadwaterError] = []

    def compute(self, name: str, num_tokens: int, pages: Sequence[int], tokens: range) -> None:
        """Puts the true KV of some tokens into the pool."""
        slots = _slots(self.layout, pages, tokens)
        for number, part in enumerate(truth(name, num_tokens)):
            layer = number // 2
            if self.layout.layers.start <= layer < self.layout.layers.end:
                here = part[tokens.start : tokens.stop, self.layout.heads.start : self.layout.heads.end]
                target = part_of(self.layout, self.pool.address, layer, number % 2, self.dtype)
                target[slots] = here.astype(target.dtype)

    def scribble(self, pages: Sequence[int]) -> None:
        """Somebody else's KV in these pages."""
        slots = _slots(self.layout, pages, range(len(pages) * self.layout.page_size))
        for layer in range(self.layout.layers.start, self.layout.layers.end):
            for part in (0, 1):
                part_of(self.layout, self.pool.address, layer, part, self.dtype)[slots] = 77.0

    async def fetch(self, grant: common_pb2.Grant, pages: Sequence[int]) -> int:
        return await fetch_verified(self.sender, grant, PagedDestination(self.layout, pages, self.pool.address))

    def close(self) -> None:
        self.writer.close()
        self.sender.close()
        self.arena.check()
        assert self.arena.held == 0
        self.engine.close()


class PrefillGroup:
    """All ranks of one incarnation of a prefill group."""

    def __init__(
        self,
        fabric: Fabric,
        shape: Shape,
        epoch: str,
        *,
        num_pages: int = 16,
        write_seconds: float = SECONDS,
        segment_bytes: int = 400,
    ) -> None:
        self.shape = shape
        self.ranks = [
            PrefillRank(
                fabric,
                shape,
                rank,
                epoch,
                num_pages=num_pages,
                write_seconds=write_seconds,
                segment_bytes=segment_bytes,
            )
            for rank in range(shape.pp * shape.tp)
        ]

    def open(self, grant: common_pb2.Grant, pages: Sequence[int]) -> list[Outgoing]:
        return [rank.sender.open(grant, pages, rank.failures.append) for rank in self.ranks]

    def compute(self, name: str, num_tokens: int, pages: Sequence[int], tokens: range) -> None:
        for rank in self.ranks:
            rank.compute(name, num_tokens, pages, tokens)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


@dataclasses.dataclass
class Transfer:
    """One transfer on all ranks of a decode group."""

    name: str
    num_tokens: int
    incoming: list[Incoming]
    kv: list[Kv]
    grant: common_pb2.Grant


class DecodeRank:
    """A receiver with its server."""

    def __init__(
        self,
        fabric: Fabric,
        shape: Shape,
        rank: int,
        epoch: str,
        options: ReceiverOptions,
        num_slots: int,
        slot_bytes: int = 400,
    ) -> None:
        self.shape = shape
        self.layers, self.heads, _, _ = shape.ranks()[rank]
        self.engine = fabric.engine(f"decode-{epoch}-{rank}")
        self.arena = SlotArena(self.engine, num_slots, slot_bytes)
        self.writer = Writer(self.engine, write_seconds=SECONDS, max_bytes_in_flight=4 * slot_bytes)
        self.server = Server("127.0.0.1:0", ["headwater.v1.TransferService"])
        self.receiver = Receiver(
            self.engine,
            self.arena,
            self.writer,
            epoch=f"{epoch}-{rank}",
            address=self.server.address,
            geometry=shape.geometry(),
            layers=self.layers,
            heads=self.heads,
            options=options,
        )
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(
            TransferServicer(self.receiver), self.server.grpc_server
        )

    async def close(self) -> None:
        await self.server.stop(SECONDS)
        # The server has ended every call; what it does on the way out takes a moment.
        arena, receiver = self.arena, self.receiver
        try:
            await until(lambda: (receiver.open_transfers, arena.held, arena.quarantined) == (0, 0, 0))
        except TimeoutError:
            left = f"{receiver.open_transfers} transfers, {arena.held} slots held, {arena.quarantined} quarantined"
            stacks = "\n".join(str(task.get_stack(limit=8)) for task in asyncio.all_tasks())
            raise AssertionError(f"{self.engine.session} still has {left}; tasks:\n{stacks}") from None
        await receiver.close()
        self.writer.close()
        arena.check()
        self.engine.close()


class DecodeGroup:
    """All ranks of one incarnation of a decode group."""

    def __init__(
        self,
        fabric: Fabric,
        shape: Shape,
        epoch: str = "now",
        options: ReceiverOptions = ReceiverOptions(),
        num_slots: int = 16,
        slot_bytes: int = 400,
    ) -> None:
        self.shape = shape
        self.ranks = [
            DecodeRank(fabric, shape, rank, epoch, options, num_slots, slot_bytes)
            for rank in range(shape.pp * shape.tp)
        ]

    async def start(self) -> None:
        for rank in self.ranks:
            await rank.server.start()

    def expect(self, name: str, num_tokens: int, source_dtype: str = "", attempt: int = 1) -> Transfer:
        kv = [Kv(name, self.shape, rank.layers, rank.heads, num_tokens) for rank in self.ranks]
        incoming = [
            rank.receiver.expect(name, attempt, num_tokens, one, source_dtype=source_dtype)
            for rank, one in zip(self.ranks, kv, strict=True)
        ]
        grants = [rank.receiver.grant(one) for rank, one in zip(self.ranks, incoming, strict=True)]
        return Transfer(name, num_tokens, incoming, kv, join_grants(grants))

    async def regrant(self, transfer: Transfer, attempt: int) -> common_pb2.Grant:
        grants = [await rank.receiver.regrant(transfer.name, attempt) for rank in self.ranks]
        return join_grants(grants)

    async def close(self) -> None:
        for rank in self.ranks:
            await rank.close()


def assert_landed(transfer: Transfer, source_dtype: str) -> None:
    """Every rank of the decode group holds what was sent: the truth, rounded where types are narrower."""
    wire = np.dtype(_NUMPY[transfer.grant.wire_dtype])
    for kv in transfer.kv:
        parts = truth(transfer.name, transfer.num_tokens)[2 * kv.layout.layers.start : 2 * kv.layout.layers.end]
        for expected, got in zip(parts, kv.content(transfer.num_tokens), strict=True):
            sent = expected.astype(_NUMPY[source_dtype]).astype(wire).astype(got.dtype)
            np.testing.assert_array_equal(got, sent[:, kv.layout.heads.start : kv.layout.heads.end])


@dataclasses.dataclass
class World:
    fabric: MemoryFabric
    prefill: PrefillGroup
    decode: DecodeGroup


@contextlib.asynccontextmanager
async def world(
    faults: Faults = Faults(),
    source: Shape = Shape(2, 2),
    target: Shape = Shape(),
    options: ReceiverOptions = ReceiverOptions(),
    *,
    write_seconds: float = SECONDS,
    num_slots: int = 16,
) -> AsyncIterator[World]:
    """One prefill group and one decode group. Leaves when nothing of them is left, and everything balances."""
    fabric = MemoryFabric(faults)
    decode = DecodeGroup(fabric, target, options=options, num_slots=num_slots)
    await decode.start()
    prefill = PrefillGroup(fabric, source, "p1", write_seconds=write_seconds)
    try:
        yield World(fabric, prefill, decode)
    finally:
        await decode.close()
        # Writes that hang are over now, so what they read from comes back.
        fabric.land_late()
        await until(lambda: all(rank.arena.held == 0 for rank in prefill.ranks))
        prefill.close()


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Waits for a condition that must become true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
