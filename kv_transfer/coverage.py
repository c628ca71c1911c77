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
        if not self.whole.contains(box):
            raise ValueError(f"{box} lies outside {self.whole}")
        for (layers, heads), spans in self._spans.items():
            if layers.overlaps(box.layers) and heads.overlaps(box.heads) and _overlaps(spans, box.tokens):
                raise ValueError(f"{box} overlaps what has already arrived")
        spans = self._spans.setdefault((box.layers, box.heads), [])
        _insert(spans, box.tokens)
        self._volume += box.volume

    def prefix(self) -> int:
        """The largest n such that every (layer, head) has all tokens before n."""
        whole = self.whole
        layers = sorted({whole.layers.start, *(edge for group, _ in self._spans for edge in (group.start, group.end))})
        heads = sorted({whole.heads.start, *(edge for _, group in self._spans for edge in (group.start, group.end))})
        # Every combination of edges stands for a rectangle of (layer, head) that has one history.
        return min(
            self._prefix_at(layer, head)
            for layer in layers
            if layer < whole.layers.end
            for head in heads
            if head < whole.heads.end
        )

    def _prefix_at(self, layer: int, head: int) -> int:
        here = [
            span
            for (layers, heads), spans in self._spans.items()
            if layers.start <= layer < layers.end and heads.start <= head < heads.end
            for span in spans
        ]
        reached = self.whole.tokens.start
        for start, end in sorted(here):
            if start != reached:
                break
            reached = end
        return reached

    def cut(self, end: int) -> None:
        """Forgets whatever lies at or beyond token `end`, which `prefix` must reach."""
        if end > self.prefix():
            raise ValueError(f"tokens before {end} have not all arrived")
        self._volume = 0
        self._spans = {}
        if end > self.whole.tokens.start:
            self.add(Box(self.whole.layers, self.whole.heads, Span(self.whole.tokens.start, end)))


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
