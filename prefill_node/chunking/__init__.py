"""Where to cut a prompt into chunks: one policy a module, all of them pure functions of the known length.

`fixed` cuts equal chunks, `dynamic` shrinks them as the prefix grows so that each takes as long as the first, and
`optimal` minimises the time until the last stage is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

PolicyName: TypeAlias = Literal["fixed", "dynamic", "optimal"]
# (start, end) of what is to be computed, and how many requests keep the pipeline filled together → where each chunk
# ends; the last number is `end`.
ChunkPolicy: TypeAlias = Callable[[int, int, int], tuple[int, ...]]

# Smallest step between two cuts; kernels like round numbers (the published rule: max(page_size, 64)).
MIN_ALIGNMENT = 64


def alignment(page_size: int, chunk_tokens: int) -> int:
    """Cuts are multiples of this."""
    aligned = -(-MIN_ALIGNMENT // page_size) * page_size
    return aligned if aligned <= chunk_tokens else 1


def without_small_tail(start: int, ends: Sequence[int], align: int, max_tokens: int) -> tuple[int, ...]:
    """The same cuts, unless the last chunk is smaller than a quarter of their mean: then it joins the one before,
    or, where that would be more than `max_tokens`, shares evenly with it.
    """
    if len(ends) == 1:
        return tuple(ends)
    before, previous, end = [start, *ends][-3:]
    if 4 * (end - previous) * len(ends) >= end - start:
        return tuple(ends)
    if end - before <= max_tokens:
        return (*ends[:-2], end)
    middle = -(-(before + end) // 2 // align) * align
    return (*ends[:-2], middle, end) if before < middle < end and middle - before <= max_tokens else tuple(ends)
