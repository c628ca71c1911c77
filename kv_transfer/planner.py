"""The copy planner: which bytes of one rank's KV are which bytes of another's. Pure.

Two ways to deliver a box of KV:

- *staged*: through a packed box, `[layer][key|value][token, head, size]` without gaps. Sender and receiver
  each plan between their own pages and that form, so neither has to know how the other keeps its KV.
- *direct*: page to page, for writers and receivers that keep the same element type. `pair` plans between the
  two layouts, in the order of the packed box, so that one digest serves both ways.

Any PP×TP may send to any other: `own_part` says which share of a box a rank sends when several hold it, and
`intersection` cuts it to what a destination rank wants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.geometry import Box, CellSize, PagedLayout, PageTable, Span

# A direct write costs a message of its own; over TCP shorter ones are slower than packing (about 60 µs each,
# measured over loopback), and an RDMA adapter takes a few µs.
DIRECT_MIN_BYTES = {"tcp": 256 * 1024, "rdma": 16 * 1024, "memory": 1}
# The same of writing the pieces of a packed box from their pages, instead of packing them. Over TCP 1 MiB pieces
# gained a fifth of throughput (benchmarks/transfer.py). In memory: some boxes one way, some the other.
IN_PLACE_MIN_BYTES = DIRECT_MIN_BYTES | {"memory": 192}


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """`rows` pieces of `length` bytes, at `paged + i · paged_stride` and `packed + i · length`.

    Offsets are from the start of the pool and of the packed box.
    """

    paged: int
    packed: int
    length: int
    rows: int = 1
    paged_stride: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The copies between a pool and a packed box, not yet spelled out: its size depends neither on the tokens
    nor on the pages of the request, only on the runs that the pages make.

    Args:
        parts: for each layer and each of keys and values: offset of slot 0 in the pool, bytes of one token in the
            pool, bytes of the box's heads of one token, offset of those within the token.
        runs: (first slot, count) of the box's tokens, in order.
    """

    parts: list[tuple[int, int, int, int]]
    runs: list[tuple[int, int]]

    def copies(self) -> Iterator[Copy]:
        """In order of the packed bytes."""
        packed = 0
        for start, token_bytes, row_bytes, first_head in self.parts:
            for slot, count in self.runs:
                paged = start + slot * token_bytes + first_head
                if token_bytes == row_bytes:
                    yield Copy(paged, packed, count * row_bytes)
                else:
                    yield Copy(paged, packed, row_bytes, count, token_bytes)
                packed += count * row_bytes


def packed_bytes(box: Box, cell: CellSize) -> int:
    return box.volume * cell.total


def plan(layout: PagedLayout, pages: PageTable, box: Box) -> Plan:
    """Copies between `layout`'s pool and the packed `box`, coalesced.

    Args:
        pages: the request's page table.
        box: must lie within the layout's layers and heads and the page table's tokens.

    Raises:
        ValueError: the box is not held by this layout.
    """
    _check_held(layout, pages, box)
    key_part, _ = layout.part_bytes
    parts = []
    for layer in range(box.layers.start, box.layers.end):
        layer_offset = (layer - layout.layers.start) * layout.layer_bytes
        for part_offset, size in ((0, layout.cell.key_bytes), (key_part, layout.cell.value_bytes)):
            if size:
                first_head = (box.heads.start - layout.heads.start) * size
                parts.append((layer_offset + part_offset, len(layout.heads) * size, len(box.heads) * size, first_head))
    return Plan(parts, layout.runs(pages, box.tokens))


def split(box: Box, cell: CellSize, max_bytes: int) -> list[Box]:
    """Cuts `box` into boxes of at most `max_bytes`, by layers, and by tokens where one layer is too large.

    Raises:
        ValueError: not even one token of one layer fits.
    """
    token_bytes = len(box.heads) * cell.total
    if token_bytes > max_bytes:
        raise ValueError(f"one token of one layer takes {token_bytes} bytes, more than a slot's {max_bytes}")
    tokens_at_once = min(len(box.tokens), max_bytes // token_bytes)
    layers_at_once = max_bytes // (tokens_at_once * token_bytes) if tokens_at_once == len(box.tokens) else 1
    spans = [
        Span(token, min(token + tokens_at_once, box.tokens.end))
        for token in range(box.tokens.start, box.tokens.end, tokens_at_once)
    ]
    return [
        Box(Span(layer, min(layer + layers_at_once, box.layers.end)), box.heads, tokens)
        for layer in range(box.layers.start, box.layers.end, layers_at_once)
        for tokens in spans
    ]


def own_part(layers: Span, replica: int, num_replicas: int) -> Span | None:
    """The layers that one of several ranks with the same KV sends, so that together they send it once.

    None when there are more replicas than layers and nothing is left for this one.
    """
    start = layers.start + len(layers) * replica // num_replicas
    end = layers.start + len(layers) * (replica + 1) // num_replicas
    return Span(start, end) if start < end else None


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """Contiguous pieces of a direct delivery, in the order of the packed box. Offsets from the two pools' starts.

    Three int64 arrays of one length.
    """

    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]


def pair(
    source: PagedLayout, source_pages: PageTable, target: PagedLayout, target_pages: PageTable, box: Box
) -> Pieces:
    """Which bytes of `source` go to which bytes of `target` for `box`, coalesced.

    Raises:
        ValueError: one of them does not hold the box, or their elements differ in size.
    """
    if source.cell != target.cell:
        raise ValueError(f"cells of {source.cell} cannot be written into cells of {target.cell}")
    _check_held(source, source_pages, box)
    _check_held(target, target_pages, box)
    runs = _common_runs(source.runs(source_pages, box.tokens), target.runs(target_pages, box.tokens))
    if not box.heads == source.heads == target.heads:
        # Other heads lie between those of one token and the next.
        runs = [(first + i, second + i, 1) for first, second, count in runs for i in range(count)]
    starts = np.array(runs, dtype=np.int64).T
    sources, targets, lengths = [], [], []
    for part, size in enumerate((source.cell.key_bytes, source.cell.value_bytes)):
        if size:
            sources.append(_offsets(source, box, part, size, starts[0]))
            targets.append(_offsets(target, box, part, size, starts[1]))
            lengths.append(np.broadcast_to(starts[2] * len(box.heads) * size, sources[-1].shape))
    # [layer, part, run], flattened: the order of the packed box.
    merged = [np.stack(arrays, axis=1).reshape(-1) for arrays in (sources, targets, lengths)]
    return _coalesced(*merged)


def _offsets(
    layout: PagedLayout, box: Box, part: int, size: int, slots: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    layers = np.arange(box.layers.start, box.layers.end, dtype=np.int64) - layout.layers.start
    first = layers * layout.layer_bytes + part * layout.part_bytes[0] + (box.heads.start - layout.heads.start) * size
    offsets: npt.NDArray[np.int64] = first[:, None] + slots[None, :] * (len(layout.heads) * size)
    return offsets


def _common_runs(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(slot in first, slot in second, count) for two lists of runs that hold the same tokens."""
    common: list[tuple[int, int, int]] = []
    i = j = used_i = used_j = 0
    while i < len(first):
        count = min(first[i][1] - used_i, second[j][1] - used_j)
        common.append((first[i][0] + used_i, second[j][0] + used_j, count))
        used_i, used_j = used_i + count, used_j + count
        if used_i == first[i][1]:
            i, used_i = i + 1, 0
        if used_j == second[j][1]:
            j, used_j = j + 1, 0
    return common


def _coalesced(source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], length: npt.NDArray[np.int64]) -> Pieces:
    """Joins pieces that follow each other on both sides."""
    new = np.ones(len(source), dtype=bool)
    new[1:] = (source[1:] != source[:-1] + length[:-1]) | (target[1:] != target[:-1] + length[:-1])
    first = np.flatnonzero(new)
    return Pieces(source[first], target[first], np.add.reduceat(length, first))


def _check_held(layout: PagedLayout, pages: PageTable, box: Box) -> None:
    if not (layout.layers.contains(box.layers) and layout.heads.contains(box.heads)):
        raise ValueError(f"{box} is not held by layers {layout.layers} and heads {layout.heads}")
    if box.tokens.end > len(pages) * layout.page_size:
        raise ValueError(f"{box} ends beyond the {len(pages)} pages of the request")
