"""Prefill ranks and requests whose every byte is known, in host memory."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headwater.errors import HeadwaterError
from headwater.v1 import common_pb2
from kv_transfer import memory
from kv_transfer.geometry import CellSize, PagedLayout, Span, head_share
from kv_transfer.incoming import PagedDestination
from kv_transfer.memory import HostBuffer
from kv_transfer.mooncake import MooncakeEngine
from kv_transfer.sender import Outgoing, PagedSource, Sender, WriterRank
from kv_transfer.slots import SlotArena
from kv_transfer.writer import Writer
from tests.rdma.link import SENDING

LAYERS, HEADS, KEY, VALUE = 4, 4, 64, 48
DTYPE, ITEM_BYTES = "bfloat16", 2
TOKEN_BYTES = LAYERS * HEADS * (KEY + VALUE) * ITEM_BYTES
# Of landing slots and send segments.
SLOT_BYTES = 256 * 1024
CHUNK_TOKENS = 256
FIRST_TOKEN = 99


def geometry(page_size: int) -> common_pb2.Geometry:
    return common_pb2.Geometry(
        num_layers=LAYERS, num_kv_heads=HEADS, key_size=KEY, value_size=VALUE, dtype=DTYPE, page_size=page_size
    )


def fill(layout: PagedLayout, address: int, pages: Sequence[int], name: str, num_tokens: int) -> None:
    """Puts the KV of request `name` into a pool: patterns, not numbers, since nothing here computes with them."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    tokens = np.arange(num_tokens)
    slots = np.asarray(pages)[tokens // layout.page_size] * layout.page_size + tokens % layout.page_size
    num_slots, num_heads = layout.num_pages * layout.page_size, len(layout.heads)
    for layer in range(LAYERS):
        for size in (KEY, VALUE):
            whole = random.integers(0, 1 << 16, (num_tokens, HEADS, size), dtype=np.uint16)
            if layout.layers.start <= layer < layout.layers.end:
                num_bytes = num_slots * num_heads * size * ITEM_BYTES
                part = np.frombuffer(memory.view(address, num_bytes), np.uint16).reshape(num_slots, num_heads, size)
                part[slots] = whole[:, layout.heads.start : layout.heads.end]
                address += num_bytes


def contents(address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memory.view(address, num_bytes), np.uint8)


class Landing:
    """Where one request's KV goes: pages in a shuffled order in memory of its own, which is zero before."""

    def __init__(self, name: str, num_tokens: int, page_size: int) -> None:
        num_pages = -(-num_tokens // page_size) + 1
        self.layout = PagedLayout(
            Span(0, LAYERS), Span(0, HEADS), page_size, num_pages, CellSize.of(geometry(page_size))
        )
        self.pages: list[int] = np.random.default_rng(1).permutation(num_pages)[: num_pages - 1].tolist()
        self.buffer = HostBuffer(self.layout.total_bytes)
        self.address = self.buffer.address
        self.retired = False
        self._name, self._num_tokens = name, num_tokens
        paged = PagedDestination(self.layout, self.pages, self.address)
        self.unpack, self.pack, self.digest = paged.unpack, paged.pack, paged.digest

    def retire(self) -> None:
        self.retired = True
        self.buffer.give_back_memory()
        self.buffer.retire()

    def num_wrong_bytes(self) -> int:
        """Of all bytes, those of the page that is nobody's included."""
        expected = HostBuffer(self.layout.total_bytes)
        fill(self.layout, expected.address, self.pages, self._name, self._num_tokens)
        here, there = (contents(address, self.layout.total_bytes) for address in (self.address, expected.address))
        return int(np.count_nonzero(here != there))


class PrefillRank:
    """A sender over an engine of its own, and a pool."""

    def __init__(self, pp: int, tp: int, rank: int, num_pages: int, page_size: int, write_seconds: float) -> None:
        stage, tensor_rank = divmod(rank, tp)
        share = head_share(HEADS, tp, tensor_rank)
        layers = Span(LAYERS * stage // pp, LAYERS * (stage + 1) // pp)
        self.layout = PagedLayout(layers, share.heads, page_size, num_pages, CellSize.of(geometry(page_size)))
        self.pool = HostBuffer(self.layout.total_bytes)
        self.engine = MooncakeEngine(SENDING.host, "rdma", write_seconds)
        self.engine.register(self.pool.address, self.pool.num_bytes)
        self.writer = Writer(self.engine, write_seconds=write_seconds, max_bytes_in_flight=4 * SLOT_BYTES)
        self.arena = SlotArena(self.engine, 4, SLOT_BYTES)
        self.sender = Sender(
            self.writer,
            self.arena,
            PagedSource(self.layout, self.pool.address),
            geometry(page_size),
            WriterRank(rank, "prefill", share.replica, share.num_replicas, samples=rank == pp * tp - 1),
            chunk_tokens=CHUNK_TOKENS,
            reply_seconds=5.0,
            acknowledge_seconds=10.0,
        )


class Prefill:
    """All ranks of a prefill group, in this process."""

    def __init__(
        self, num_tokens: int, *, pp: int = 1, tp: int = 1, page_size: int = 16, write_seconds: float = 30.0
    ) -> None:
        self.num_tokens = num_tokens
        num_pages = -(-num_tokens // page_size)
        self.pages: list[int] = np.random.default_rng(2).permutation(num_pages).tolist()
        self.ranks = [PrefillRank(pp, tp, rank, num_pages, page_size, write_seconds) for rank in range(pp * tp)]
        # What transfers failed with by themselves.
        self.failures: list[HeadwaterError] = []

    def send(self, grant: common_pb2.Grant, name: str, num_tokens: int) -> list[Outgoing]:
        """Sends all of request `name`, in chunks."""
        for rank in self.ranks:
            fill(rank.layout, rank.pool.address, self.pages, name, num_tokens)
        outgoing = [rank.sender.open(grant, self.pages, self.failures.append) for rank in self.ranks]
        edges = [*range(0, num_tokens, CHUNK_TOKENS), num_tokens]
        for start, end in itertools.pairwise(edges):
            for one in outgoing:
                one.send(Span(start, end))
        for one in outgoing:
            one.finish(FIRST_TOKEN if one is outgoing[-1] else None)
        return outgoing
