"""The copy planner against a brute-force oracle that moves one element at a time."""

from __future__ import annotations

import ctypes
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import memory
from kv_transfer.coverage import Coverage
from kv_transfer.geometry import Box, CellSize, PagedLayout, Span, head_share
from kv_transfer.memory import HostBuffer
from kv_transfer.planner import own_part, packed_bytes, pair, plan, split
from tests.kv_transfer.world import LAYERS, Kv, Shape, part_of, truth


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
    memory.pack(copies.copies(), pool.ctypes.data, packed.ctypes.data)
    assert packed.tobytes() == oracle(layout, pages, box, pool.tobytes())

    other = np.full(layout.total_bytes, 7, dtype=np.uint8)
    memory.unpack(copies.copies(), packed.ctypes.data, other.ctypes.data)
    assert oracle(layout, pages, box, other.tobytes()) == packed.tobytes()
    # Nothing else was touched: putting the sevens back restores the pool.
    memory.unpack(copies.copies(), np.full(size, 7, dtype=np.uint8).ctypes.data, other.ctypes.data)
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
    assert [(copy.length, copy.rows) for copy in copies.copies()] == [(35 * 3 * 256, 1)] * 4


def test_a_box_outside_the_layout_is_refused() -> None:
    layout = PagedLayout(Span(2, 4), Span(0, 2), page_size=4, num_pages=4, cell=CellSize(4, 4))
    with pytest.raises(ValueError, match="not held"):
        plan(layout, [0], Box(Span(1, 3), Span(0, 2), Span(0, 4)))
    with pytest.raises(ValueError, match="beyond the 1 pages"):
        plan(layout, [0], Box(Span(2, 3), Span(0, 2), Span(0, 5)))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    pp = draw(st.integers(1, LAYERS))
    inner = sorted(draw(st.permutations(range(1, LAYERS)))[: pp - 1])
    return Shape(pp, draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 6)), boundaries=(0, *inner, LAYERS))


@given(shapes(), shapes(), st.integers(1, 25), st.integers(1, 9), st.integers(224, 900), st.randoms())
@settings(max_examples=60, deadline=None)
def test_any_layout_to_any_layout(
    source: Shape, target: Shape, num_tokens: int, chunk: int, slot_bytes: int, random: Random
) -> None:
    """S15, S24, S25, S27: every rank of the destination gets every one of its bytes, once, from the right place.

    Uneven stages, fewer key/value heads than ranks on either side, pages of different sizes in any order, partial
    last pages; staged and page to page.
    """
    senders = [(PrefillRankMemory(source, rank, num_tokens, random), *source.ranks()[rank]) for rank in every(source)]
    for sender, *_ in senders:
        sender.fill("t", num_tokens)
    staged = [Kv("t", target, layers, heads, num_tokens) for layers, heads, _, _ in target.ranks()]
    direct = [Kv("t", target, layers, heads, num_tokens) for layers, heads, _, _ in target.ranks()]
    coverages = [Coverage(Box(kv.layout.layers, kv.layout.heads, Span(0, num_tokens))) for kv in staged]
    for start in range(0, num_tokens, chunk):
        tokens = Span(start, min(start + chunk, num_tokens))
        for sender, layers, heads, replica, replicas in senders:
            own = own_part(layers, replica, replicas)
            for kv, other, coverage in zip(staged, direct, coverages, strict=True):
                wanted = own.intersection(kv.layout.layers) if own else None
                shared = heads.intersection(kv.layout.heads)
                if wanted is None or shared is None:
                    continue
                for box in split(Box(wanted, shared, tokens), kv.layout.cell, slot_bytes):
                    # Raises when a cell comes twice.
                    coverage.add(box)
                    packed = HostBuffer(packed_bytes(box, kv.layout.cell))
                    memory.pack(plan(sender.layout, sender.pages, box).copies(), sender.address, packed.address)
                    kv.unpack(box, packed.address)
                    pieces = pair(sender.layout, sender.pages, other.layout, other.pages, box)
                    digest = memory.Digest()
                    for here, there, length in zip(pieces.source, pieces.target, pieces.length, strict=True):
                        ctypes.memmove(other.address + int(there), sender.address + int(here), int(length))
                        digest.add(sender.address + int(here), int(length))
                    assert digest.value() == memory.digest(packed.address, packed.num_bytes)
    for coverage, *kvs in zip(coverages, staged, direct, strict=True):
        assert coverage.complete
        for kv in kvs:
            assert_holds_truth(kv, num_tokens)


class PrefillRankMemory:
    """One source rank's pages, in any order."""

    def __init__(self, shape: Shape, rank: int, num_tokens: int, random: Random) -> None:
        layers, heads, _, _ = shape.ranks()[rank]
        num_pages = -(-num_tokens // shape.page_size)
        self.layout = PagedLayout(layers, heads, shape.page_size, num_pages + 2, CellSize.of(shape.geometry()))
        self.pages = random.sample(range(num_pages + 2), num_pages)
        self.buffer = HostBuffer(self.layout.total_bytes)
        self.address = self.buffer.address

    def fill(self, name: str, num_tokens: int) -> None:
        for number, part in enumerate(truth(name, num_tokens)):
            layer, kind = divmod(number, 2)
            if self.layout.layers.start <= layer < self.layout.layers.end:
                size = self.layout.page_size
                slots = [self.pages[token // size] * size + token % size for token in range(num_tokens)]
                here = part_of(self.layout, self.address, layer, kind, "float32")
                here[slots] = part[:, self.layout.heads.start : self.layout.heads.end]


def every(shape: Shape) -> range:
    return range(shape.pp * shape.tp)


def assert_holds_truth(kv: Kv, num_tokens: int) -> None:
    expected = truth("t", num_tokens)[2 * kv.layout.layers.start : 2 * kv.layout.layers.end]
    for right, got in zip(expected, kv.content(num_tokens), strict=True):
        np.testing.assert_array_equal(got, right[:, kv.layout.heads.start : kv.layout.heads.end])


def test_a_latent_that_every_tensor_rank_replicates_is_sent_once() -> None:
    """MLA: one head, whatever the tensor parallelism. Each replica sends its share of the layers."""
    shares = [head_share(1, 4, rank) for rank in range(4)]
    assert {share.heads for share in shares} == {Span(0, 1)}
    parts = [own_part(Span(3, 13), share.replica, share.num_replicas) for share in shares]
    assert parts == [Span(3, 5), Span(5, 8), Span(8, 10), Span(10, 13)]
    # More replicas than layers: some have nothing to send.
    assert [own_part(Span(0, 2), replica, 4) for replica in range(4)] == [None, Span(0, 1), None, Span(1, 2)]
    with pytest.raises(ValueError, match="3 key/value heads cannot be spread over 2"):
        head_share(3, 2, 0)


def test_a_plan_does_not_grow_with_the_prompt() -> None:
    """A chunk late in a million tokens costs what an early one does."""
    layout = PagedLayout(Span(0, 12), Span(0, 1), page_size=64, num_pages=16_384, cell=CellSize(256, 256))
    pages = list(range(16_384))
    early = plan(layout, pages, Box(layout.layers, layout.heads, Span(0, 8192)))
    late = plan(layout, pages, Box(layout.layers, layout.heads, Span(1_040_384, 1_048_576)))
    assert len(early.parts) == len(late.parts) == 24
    assert len(early.runs) == len(late.runs) == 1
