"""Which (layer, head, token) cells of a transfer have arrived.

Exactly-once is the rule: a box that overlaps what is already there is refused, and the transfer is covered
when the boxes' volumes add up to the whole.
"""

from __future__ import annotations

import bisect

from kv_transfer.geometry import Box, Span


class Coverage:
    """Interval map of one transfer.

    Boxes with equal layers and heads share one sorted list of token spans, so a stream of chunks costs
    O(log n) each; distinct (layers, heads) pairs are few (one per writer and piece of a chunk).
    """

    def __init__(self, whole: Box) -> None:
        self.whole = whole
        self._volume = 0
        self._spans: dict[tuple[Span, Span], list[tuple[int, int]]] = {}

    @property
    def complete(self) -> bool:
        return self._volume == self.whole.volume

    @property
    def missing(self) -> int:
        """Cells still to come."""
        return self.whole.volume - self._volume

    def add(self, box: Box) -> None:
        """Marks `box` as arrived.

        Raises:
            ValueError: it lies outside the whole, or overlaps what has arrived; nothing changes.
        """
        whole = self.whole
        if not (
            whole.layers.contains(box.layers) and whole.heads.contains(box.heads) and whole.tokens.contains(box.tokens)
        ):
            raise ValueError(f"{box} lies outside {whole}")
        for (layers, heads), spans in self._spans.items():
            if layers.overlaps(box.layers) and heads.overlaps(box.heads) and _overlaps(spans, box.tokens):
                raise ValueError(f"{box} overlaps what has already arrived")
        spans = self._spans.setdefault((box.layers, box.heads), [])
        _insert(spans, box.tokens)
        self._volume += box.volume


def _overlaps(spans: list[tuple[int, int]], tokens: Span) -> bool:
    # The only candidate is the last span that starts before tokens.end.
    at = bisect.bisect_left(spans, (tokens.end, tokens.end))
    return at > 0 and spans[at - 1][1] > tokens.start


def _insert(spans: list[tuple[int, int]], tokens: Span) -> None:
    """Adds a span that overlaps none, merging it with its neighbours."""
    start, end = tokens.start, tokens.end
    at = bisect.bisect_left(spans, (start, end))
    if at < len(spans) and spans[at][0] == end:
        end = spans.pop(at)[1]
    if at > 0 and spans[at - 1][1] == start:
        start = spans.pop(at - 1)[0]
        at -= 1
    spans.insert(at, (start, end))
