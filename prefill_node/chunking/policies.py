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

    def policy(start: int, end: int, sharing: int) -> tuple[int, ...]:
        if name == "dynamic":
            return dynamic.cuts(start, end, cost=cost(), chunk_tokens=chunk_tokens, align=align, smoothing=smoothing)
        if name == "optimal":
            return optimal.cuts(start, end, cost=cost(), chunk_tokens=chunk_tokens, align=align, sharing=sharing)
        return fixed.cuts(start, end, chunk_tokens=chunk_tokens, align=align)

    return policy
