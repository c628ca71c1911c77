"""The copy planner against a brute-force oracle that moves one element at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer import memory
from kv_transfer.geometry import Box, CellSize, PagedLayout, Span
from kv_transfer.planner import packed_bytes, plan, split


@st.composite
def cases(draw: st.DrawFn) -> tuple[PagedLayout, list[int], Box]:
    first_layer = draw(st.integers(0, 3))
    layers = Span(first_layer, first_layer + draw(st.integers(1, 3)))
    first_head = draw(st.integers(0, 3))
    heads = Span(first_head, first_head + draw(st.integers(1, 3)))
    page_size = draw(st.integers(1, 5))
    num_pages = draw(st.integers(1, 6))
    cell = CellSize(draw(st.integers(1, 6)), draw(st.integers(0, 6)))
    pages = draw(st.permutations(range(num_pages)))[: draw(st.integers(1, num_pages))]
    span = lambda low, high: st.tuples(st.integers(low, high - 1), st.integers(low, high - 1)).map(  # noqa: E731
        lambda pair: Span(min(pair), max(pair) + 1)
    )
    box = Box(
        draw(span(layers.start, layers.end)),
        draw(span(heads.start, heads.end)),
        draw(span(0, len(pages) * page_size)),
    )
    return PagedLayout(layers, heads, page_size, num_pages, cell), list(pages), box


def oracle(layout: PagedLayout, pages: list[int], box: Box, pool: bytes) -> bytes:
    """The packed box, read cell by cell from the definition of the two forms."""
    packed = bytearray()
    slots = layout.num_pages * layout.page_size
    num_heads = len(layout.heads)
    for layer in range(box.layers.start, box.layers.end):
        start = (layer - layout.layers.start) * slots * num_heads * layout.cell.total
        for size in (layout.cell.key_bytes, layout.cell.value_bytes):
            for token in range(box.tokens.start, box.tokens.end):
                slot = pages[token // layout.page_size] * layout.page_size + token % layout.page_size
                for head in range(box.heads.start, box.heads.end):
                    at = start + (slot * num_heads + head - layout.heads.start) * size
                    packed += pool[at : at + size]
            start += slots * num_heads * size
    return bytes(packed)


@given(cases(), st.integers(0, 2**32 - 1))
def test_packing_equals_the_oracle_and_unpacking_inverts_it(
    case: tuple[PagedLayout, list[int], Box], seed: int
) -> None:
    layout, pages, box = case
    pool = np.random.default_rng(seed).integers(0, 256, layout.total_bytes, dtype=np.uint8)
    size = packed_bytes(box, layout.cell)
    packed = np.zeros(size, dtype=np.uint8)
    copies = plan(layout, pages, box)
    memory.pack(copies, pool.ctypes.data, packed.ctypes.data)
    assert packed.tobytes() == oracle(layout, pages, box, pool.tobytes())

    other = np.full(layout.total_bytes, 7, dtype=np.uint8)
    memory.unpack(copies, packed.ctypes.data, other.ctypes.data)
    assert oracle(layout, pages, box, other.tobytes()) == packed.tobytes()
    # Nothing else was touched: putting the sevens back restores the pool.
    memory.unpack(copies, np.full(size, 7, dtype=np.uint8).ctypes.data, other.ctypes.data)
    assert (other == 7).all()


@given(cases(), st.integers(1, 200))
def test_split_covers_the_box_once_within_the_limit(case: tuple[PagedLayout, list[int], Box], limit: int) -> None:
    layout, _, box = case
    if len(box.heads) * layout.cell.total > limit:
        with pytest.raises(ValueError, match="more than a slot"):
            split(box, layout.cell, limit)
        return
    seen: set[tuple[int, int]] = set()
    for piece in split(box, layout.cell, limit):
        assert packed_bytes(piece, layout.cell) <= limit
        assert piece.heads == box.heads
        cells = {
            (layer, token)
            for layer in range(piece.layers.start, piece.layers.end)
            for token in range(piece.tokens.start, piece.tokens.end)
        }
        assert not cells & seen
        seen |= cells
    assert len(seen) == len(box.layers) * len(box.tokens)


def test_neighbouring_pages_become_one_copy_per_layer_and_part() -> None:
    layout = PagedLayout(Span(0, 2), Span(0, 3), page_size=16, num_pages=8, cell=CellSize(256, 256))
    copies = plan(layout, [2, 3, 4], Box(Span(0, 2), Span(0, 3), Span(5, 40)))
    assert [(copy.length, copy.rows) for copy in copies] == [(35 * 3 * 256, 1)] * 4


def test_a_box_outside_the_layout_is_refused() -> None:
    layout = PagedLayout(Span(2, 4), Span(0, 2), page_size=4, num_pages=4, cell=CellSize(4, 4))
    with pytest.raises(ValueError, match="not held"):
        plan(layout, [0], Box(Span(1, 3), Span(0, 2), Span(0, 4)))
    with pytest.raises(ValueError, match="beyond the 1 pages"):
        plan(layout, [0], Box(Span(2, 3), Span(0, 2), Span(0, 5)))
