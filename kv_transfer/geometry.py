"""Shapes of KV, free of addresses.

A `Box` says which part of one request's KV is meant: layers × heads × tokens, all numbered as in the whole
model and the whole prompt. A `PagedLayout` says where one rank keeps its share. Neither knows memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from headwater.cluster import Model
from headwater.errors import GeometryMismatch
from headwater.v1 import common_pb2
from kv_transfer.model_folder import ModelFolder, resolve_dtype

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Fields of Geometry that two groups must share; planner and wire format convert the rest.
CONTRACT_FIELDS = (
    "model_fingerprint",
    "weights_fingerprint",
    "tokenizer_fingerprint",
    "num_layers",
    "num_kv_heads",
    "key_size",
    "value_size",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A half-open range [start, end)."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"empty or negative span [{self.start}, {self.end})")

    def __len__(self) -> int:
        return self.end - self.start

    def contains(self, other: Span) -> bool:
        return self.start <= other.start and other.end <= self.end

    def overlaps(self, other: Span) -> bool:
        return self.start < other.end and other.start < self.end

    def intersection(self, other: Span) -> Span | None:
        return Span(max(self.start, other.start), min(self.end, other.end)) if self.overlaps(other) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """Layers × key/value heads × tokens of one request."""

    layers: Span
    heads: Span
    tokens: Span

    @property
    def volume(self) -> int:
        """Number of (layer, head, token) cells."""
        return len(self.layers) * len(self.heads) * len(self.tokens)

    def contains(self, other: Box) -> bool:
        return (
            self.layers.contains(other.layers)
            and self.heads.contains(other.heads)
            and self.tokens.contains(other.tokens)
        )

    def to_proto(self) -> common_pb2.KvBox:
        return common_pb2.KvBox(
            layer_start=self.layers.start,
            layer_end=self.layers.end,
            head_start=self.heads.start,
            head_end=self.heads.end,
            token_start=self.tokens.start,
            token_end=self.tokens.end,
        )

    @staticmethod
    def from_proto(box: common_pb2.KvBox) -> Box:
        """Raises ValueError for an empty or reversed range."""
        return Box(
            Span(box.layer_start, box.layer_end),
            Span(box.head_start, box.head_end),
            Span(box.token_start, box.token_end),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class CellSize:
    """Bytes of one head of one token of one layer."""

    key_bytes: int
    value_bytes: int

    @property
    def total(self) -> int:
        return self.key_bytes + self.value_bytes

    @staticmethod
    def of(geometry: common_pb2.Geometry) -> CellSize:
        item = ITEM_SIZES[geometry.dtype]
        return CellSize(geometry.key_size * item, geometry.value_size * item)


# Page i of a request; an array where it is used often.
PageTable: TypeAlias = Sequence[int] | npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class PagedLayout:
    """One rank's KV memory: for each layer all its keys, then all its values; inside, page after page; inside
    a page, token after token; inside a token, head after head. In tensor terms
    `[layer][key|value][page, page_token, head, size]`.

    Token t of a request with page table `pages` is at page `pages[t // page_size]`.
    """

    layers: Span
    heads: Span
    page_size: int
    num_pages: int
    cell: CellSize

    @property
    def part_bytes(self) -> tuple[int, int]:
        """Bytes of the keys and of the values of one layer."""
        cells = self.num_pages * self.page_size * len(self.heads)
        return cells * self.cell.key_bytes, cells * self.cell.value_bytes

    @property
    def layer_bytes(self) -> int:
        return sum(self.part_bytes)

    @property
    def total_bytes(self) -> int:
        return self.layer_bytes * len(self.layers)

    def runs(self, pages: PageTable, tokens: Span) -> list[tuple[int, int]]:
        """Maximal runs (first slot, count) that hold `tokens` in order; slot = page · page_size + offset."""
        first, offset = divmod(tokens.start, self.page_size)
        table = pages[first : (tokens.end - 1) // self.page_size + 1]
        # Where the next page is not the neighbour.
        breaks = (np.flatnonzero(np.diff(table) != 1) + 1).tolist() if len(table) > 1 else ()
        runs = []
        for start, end in itertools.pairwise([0, *breaks, len(table)]):
            slot = int(table[start]) * self.page_size
            count = (end - start) * self.page_size
            runs.append((slot, count) if start else (slot + offset, count - offset))
        # The last page may be held in part.
        runs[-1] = (runs[-1][0], runs[-1][1] - (-tokens.end % self.page_size))
        return runs


@dataclasses.dataclass(frozen=True, slots=True)
class HeadShare:
    """Key/value heads of one tensor-parallel rank. Ranks with equal heads are replicas of each other."""

    heads: Span
    replica: int
    num_replicas: int


def head_share(num_kv_heads: int, tp: int, tensor_rank: int) -> HeadShare:
    """How tensor parallelism spreads key/value heads: equal shares, or equal numbers of replicas of each head
    where there are more ranks than heads. MLA's one latent is a single head, which every rank replicates.

    Raises:
        ValueError: neither number divides the other.
    """
    if num_kv_heads % tp == 0:
        share = num_kv_heads // tp
        return HeadShare(Span(tensor_rank * share, (tensor_rank + 1) * share), 0, 1)
    if tp % num_kv_heads == 0:
        replicas = tp // num_kv_heads
        head = tensor_rank // replicas
        return HeadShare(Span(head, head + 1), tensor_rank % replicas, replicas)
    raise ValueError(f"{num_kv_heads} key/value heads cannot be spread over {tp} tensor-parallel ranks")


def geometry_of(folder: ModelFolder, model: Model, page_size: int, dtype: str | None = None) -> common_pb2.Geometry:
    """The KV contract of a group that serves `folder` with pages of `page_size` tokens.

    Args:
        dtype: of the group, if it has one of its own.
    """
    return common_pb2.Geometry(
        model_fingerprint=folder.model_fingerprint,
        weights_fingerprint=folder.weights_fingerprint,
        tokenizer_fingerprint=folder.tokenizer_fingerprint,
        num_layers=folder.num_layers,
        num_kv_heads=folder.num_kv_heads,
        key_size=folder.key_size,
        value_size=folder.value_size,
        dtype=resolve_dtype(dtype or model.dtype),
        page_size=page_size,
        vocab_size=folder.vocab_size,
        max_context_tokens=model.max_context_tokens or folder.max_context_tokens,
    )


def check_contract(source: common_pb2.Geometry, destination: common_pb2.Geometry) -> None:
    """Raises GeometryMismatch naming the first field in which two groups differ that must be equal."""
    for field in CONTRACT_FIELDS:
        theirs, ours = getattr(source, field), getattr(destination, field)
        if theirs != ours:
            raise GeometryMismatch(
                f"prefill and decode do not serve the same KV: {field} is {theirs} in prefill and {ours} in decode. "
                "Start both groups from the same model folder."
            )
    for side, geometry in (("prefill", source), ("decode", destination)):
        if geometry.dtype not in ITEM_SIZES:
            raise GeometryMismatch(
                f"the KV of {side} is of dtype {geometry.dtype!r}, which cannot be converted; "
                f"use one of {', '.join(ITEM_SIZES)}."
            )
