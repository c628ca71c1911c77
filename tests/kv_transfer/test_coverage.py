"""Coverage against a set of cells."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.coverage import Coverage
from kv_transfer.geometry import Box, Span

WHOLE = Box(Span(0, 3), Span(0, 2), Span(0, 8))


def spans(end: int) -> st.SearchStrategy[Span]:
    return st.tuples(st.integers(0, end), st.integers(0, end)).map(lambda pair: Span(min(pair), max(pair) + 1))


def cells(box: Box) -> set[tuple[int, int, int]]:
    return {
        (layer, head, token)
        for layer in range(box.layers.start, box.layers.end)
        for head in range(box.heads.start, box.heads.end)
        for token in range(box.tokens.start, box.tokens.end)
    }


@given(st.lists(st.builds(Box, spans(3), spans(2), spans(8)), max_size=30))
def test_every_cell_at_most_once_and_complete_when_all_are_there(boxes: list[Box]) -> None:
    coverage = Coverage(WHOLE)
    arrived: set[tuple[int, int, int]] = set()
    for box in boxes:
        allowed = cells(box) <= cells(WHOLE) and not cells(box) & arrived
        if allowed:
            coverage.add(box)
            arrived |= cells(box)
        else:
            with pytest.raises(ValueError, match="overlaps|outside"):
                coverage.add(box)
        assert coverage.missing == len(cells(WHOLE) - arrived)
        assert coverage.complete == (arrived == cells(WHOLE))


def test_a_stream_of_chunks_from_two_stages_completes_only_at_the_end() -> None:
    coverage = Coverage(WHOLE)
    for start in range(0, 8, 2):
        for layers in (Span(0, 1), Span(1, 3)):
            assert not coverage.complete
            coverage.add(Box(layers, Span(0, 2), Span(start, start + 2)))
    assert coverage.complete
