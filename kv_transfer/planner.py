"""The copy planner: which bytes of a paged pool are which bytes of a packed box.

Pure. A packed box holds, for each of its layers, the keys and then the values of its tokens, each token's
heads side by side: `[layer][key|value][token, head, size]` without gaps. Sender and receiver each plan between
their own pages and that form, so neither has to know how the other keeps its KV.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kv_transfer.geometry import Box, CellSize, PagedLayout, Span


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


def packed_bytes(box: Box, cell: CellSize) -> int:
    return box.volume * cell.total


def plan(layout: PagedLayout, pages: Sequence[int], box: Box) -> list[Copy]:
    """Copies between `layout`'s pool and the packed `box`, coalesced, in order of the packed bytes.

    Args:
        pages: the request's page table.
        box: must lie within the layout's layers and heads and the page table's tokens.

    Raises:
        ValueError: the box is not held by this layout.
    """
    if not (layout.layers.contains(box.layers) and layout.heads.contains(box.heads)):
        raise ValueError(f"{box} is not held by layers {layout.layers} and heads {layout.heads}")
    if box.tokens.end > len(pages) * layout.page_size:
        raise ValueError(f"{box} ends beyond the {len(pages)} pages of the request")
    runs = layout.runs(pages, box.tokens)
    key_part, _ = layout.part_bytes
    whole_tokens = box.heads == layout.heads
    copies: list[Copy] = []
    packed = 0
    for layer in range(box.layers.start, box.layers.end):
        layer_offset = (layer - layout.layers.start) * layout.layer_bytes
        for part_offset, size in ((0, layout.cell.key_bytes), (key_part, layout.cell.value_bytes)):
            if not size:
                continue
            token_bytes = len(layout.heads) * size
            row_bytes = len(box.heads) * size
            first_head = (box.heads.start - layout.heads.start) * size
            for slot, count in runs:
                paged = layer_offset + part_offset + slot * token_bytes + first_head
                if whole_tokens:
                    copies.append(Copy(paged, packed, count * row_bytes))
                else:
                    copies.append(Copy(paged, packed, row_bytes, count, token_bytes))
                packed += count * row_bytes
    return copies


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
    return [
        Box(
            Span(layer, min(layer + layers_at_once, box.layers.end)),
            box.heads,
            Span(token, min(token + tokens_at_once, box.tokens.end)),
        )
        for layer in range(box.layers.start, box.layers.end, layers_at_once)
        for token in range(box.tokens.start, box.tokens.end, tokens_at_once)
    ]
