"""Equal chunks."""

from __future__ import annotations

from prefill_node.chunking import without_small_tail


def cuts(start: int, end: int, *, chunk_tokens: int, align: int) -> tuple[int, ...]:
    """Where chunks of `chunk_tokens` end; the last one is what remains.

    Args:
        start, end: tokens to be computed: [start, end).
    """
    ends = [*range(start + chunk_tokens, end, chunk_tokens), end]
    return without_small_tail(start, ends, align, chunk_tokens)
