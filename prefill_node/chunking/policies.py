"""The chunk policy that a configuration names."""

from __future__ import annotations

from collections.abc import Callable

from prefill_node.chunking import ChunkPolicy, PolicyName, alignment, dynamic, fixed, optimal
from prefill_node.costs import GroupCost


def make_policy(
    name: PolicyName, cost: Callable[[], GroupCost], *, chunk_tokens: int, page_size: int, smoothing: float
) -> ChunkPolicy:
    """A policy that looks at the cost each time it is asked.

    Args:
        chunk_tokens: the most tokens of a chunk.
        smoothing: of `dynamic`.
    """
    align = alignment(page_size, chunk_tokens)
    if name == "dynamic":
        return lambda start, end: dynamic.cuts(
            start, end, cost=cost(), chunk_tokens=chunk_tokens, align=align, smoothing=smoothing
        )
    if name == "optimal":
        return lambda start, end: optimal.cuts(start, end, cost=cost(), chunk_tokens=chunk_tokens, align=align)
    return lambda start, end: fixed.cuts(start, end, chunk_tokens=chunk_tokens, align=align)
