"""One rank's KV pool as tensors.

Memory has the form of `kv_transfer.geometry.PagedLayout`; slot = page · page_size + offset in the page.
Suffixes: T tokens of a step, L tokens of a prefix, H key/value heads of this rank, K key size, V value size.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch

from headwater.lifecycle import get_logger
from headwater.v1 import common_pb2
from kv_transfer import memory
from kv_transfer.geometry import Box, CellSize, PagedLayout, PageTable, Span
from kv_transfer.memory import HostBuffer
from kv_transfer.planner import packed_bytes, plan

log = get_logger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class PlacedChunk:
    """A chunk of a step: where its tokens are in the step and in the pool."""

    request_id: str
    # Tokens of the request: [start, end).
    tokens: Span
    # First of the chunk's tokens within the step.
    offset: int
    # Runs (first slot, count) of the request's tokens before the chunk, and of the chunk.
    prefix_runs: list[tuple[int, int]]
    chunk_runs: list[tuple[int, int]]


class KvPool:
    """All pages of this rank's layers and heads.

    Args:
        layers, heads: what this rank holds, numbered as in the whole model.
        device: "cpu" or "cuda".
    """

    def __init__(
        self, geometry: common_pb2.Geometry, layers: Span, heads: Span, num_pages: int, device: torch.device
    ) -> None:
        cell = CellSize.of(geometry)
        self.layout = PagedLayout(layers, heads, geometry.page_size, num_pages, cell)
        num_bytes = self.layout.total_bytes
        # Zeros, because profiling reads what nobody has written.
        if device.type == "cpu":
            self._memory = torch.frombuffer(HostBuffer(num_bytes).view(), dtype=torch.uint8)
        else:
            self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        # Copies to and from the host wait for no kernel but those that they need, and no kernel waits for them.
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._dtype = DTYPES[geometry.dtype]
        flat = self._memory.view(self._dtype)
        slots = num_pages * geometry.page_size
        shapes = [(slots, len(heads), geometry.key_size), (slots, len(heads), geometry.value_size)]
        views = flat.split([torch.Size(shape).numel() for shape in shapes] * len(layers))
        keys = [view.view(shapes[0]) for view in views[::2]]
        values = [view.view(shapes[1]) for view in views[1::2]]
        # By layer number of the whole model.
        self._layers = dict(zip(range(layers.start, layers.end), zip(keys, values, strict=True), strict=True))

    def fill(self, layer: int, chunk: PlacedChunk, value: float) -> None:
        """Stores `value` as all keys and values of a chunk."""
        for pool in self._layers[layer]:
            for slot, count in chunk.chunk_runs:
                pool[slot : slot + count] = value

    @property
    def num_bytes(self) -> int:
        return self.layout.total_bytes

    def write(self, layer: int, chunk: PlacedChunk, key_THK: torch.Tensor, value_THV: torch.Tensor) -> None:
        """Puts one chunk's keys and values into its pages."""
        for pool, new in zip(self._layers[layer], (key_THK, value_THV), strict=True):
            done = 0
            for slot, count in chunk.chunk_runs:
                pool[slot : slot + count] = new[done : done + count]
                done += count

    def prefix(self, layer: int, chunk: PlacedChunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [L, H, K] and values [L, H, V] before the chunk: views where the pages are one run, else copies."""
        parts = [[pool[slot : slot + count] for slot, count in chunk.prefix_runs] for pool in self._layers[layer]]
        keys, values = (part[0] if len(part) == 1 else torch.cat(part) for part in parts)
        return keys, values

    @property
    def address(self) -> int | None:
        """See `kv_transfer.sender.Source`."""
        return self._memory.data_ptr() if self._memory.device.type == "cpu" else None

    def pack(self, pages: PageTable, box: Box, address: int) -> None:
        """Puts the packed `box` at a host `address`; see `kv_transfer.sender.Source`."""
        if self.address is not None:
            memory.pack(plan(self.layout, pages, box).copies(), self.address, address)
        else:
            self.pack_by_tensors(pages, box, address)

    def unpack(self, pages: PageTable, box: Box, address: int) -> None:
        """The inverse of `pack`."""
        if self.address is not None:
            memory.unpack(plan(self.layout, pages, box).copies(), address, self.address)
        else:
            self.unpack_by_tensors(pages, box, address)

    def digest(self, pages: PageTable, box: Box) -> bytes:
        """xxh3-128 of the packed `box`, from what is in the pages."""
        if self.address is not None:
            return memory.digest_in_place(plan(self.layout, pages, box).copies(), self.address)
        packed = HostBuffer(packed_bytes(box, self.layout.cell))
        self.pack_by_tensors(pages, box, packed.address)
        return memory.digest(packed.address, packed.num_bytes)

    def pack_by_tensors(self, pages: PageTable, box: Box, address: int) -> None:
        """`pack` for memory that the processor cannot address: gathered on its device, then copied to the host.

        Called when the kernels that fill the box are done.
        """
        runs = self.layout.runs(pages, box.tokens)
        heads = slice(box.heads.start - self.layout.heads.start, box.heads.end - self.layout.heads.start)
        with self._on_copies():
            parts = [
                torch.cat([pool[slot : slot + count, heads] for slot, count in runs]).flatten()
                for layer in range(box.layers.start, box.layers.end)
                for pool in self._layers[layer]
            ]
            self._packed(box, address).copy_(torch.cat(parts), non_blocking=True)

    def unpack_by_tensors(self, pages: PageTable, box: Box, address: int) -> None:
        """The inverse of `pack_by_tensors`."""
        runs = self.layout.runs(pages, box.tokens)
        heads = slice(box.heads.start - self.layout.heads.start, box.heads.end - self.layout.heads.start)
        with self._on_copies():
            packed = self._packed(box, address).to(self._memory.device, non_blocking=True)
            done = 0
            for layer in range(box.layers.start, box.layers.end):
                for pool in self._layers[layer]:
                    for slot, count in runs:
                        target = pool[slot : slot + count, heads]
                        target.copy_(packed[done : done + target.numel()].view(target.shape))
                        done += target.numel()

    @contextlib.contextmanager
    def _on_copies(self) -> Iterator[None]:
        """On the copy stream; at its end what was begun there is done."""
        if self._copies is None:
            yield
            return
        with torch.cuda.stream(self._copies):
            yield
        self._copies.synchronize()

    def _packed(self, box: Box, address: int) -> torch.Tensor:
        num_bytes = packed_bytes(box, self.layout.cell)
        return torch.frombuffer(memory.view(address, num_bytes), dtype=self._dtype)


def pin(address: int, num_bytes: int) -> None:
    """Lets CUDA copy to and from host memory of ours without going through a buffer of its own."""
    status = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
    if int(status) != 0:
        # Only slower.
        log.warning("a send segment could not be pinned", status=int(status))


@dataclasses.dataclass(frozen=True)
class FetchedKv:
    """Where KV that others computed goes: a request's pages. See `kv_transfer.landing.Unpacks`."""

    pool: KvPool
    pages: Sequence[int]

    def unpack(self, box: Box, address: int) -> None:
        self.pool.unpack(self.pages, box, address)

    def digest(self, box: Box) -> bytes:
        return self.pool.digest(self.pages, box)
