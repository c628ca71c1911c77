"""Chunks that shrink as the prefix grows, so that each takes about as long as the first.

The published rule (SGLang, "Pipeline parallelism for million-token contexts", 2026): for prefix L choose x with
f(L + x) - f(L) = f(C₀) - f(0), where f(l) = a·l² + b·l is the time of l tokens at once; smooth, x ← C₀ + σ·(x - C₀);
not below C₀/4; align down. Here a and b are α and β of the slowest stage's cost.
"""

from __future__ import annotations

import math

from prefill_node.chunking import without_small_tail
from prefill_node.costs import GroupCost


def cuts(
    start: int, end: int, *, cost: GroupCost, chunk_tokens: int, align: int, smoothing: float = 0.75
) -> tuple[int, ...]:
    """Where the chunks end.

    Args:
        chunk_tokens: C₀, of the first chunk.
        smoothing: σ, from 0 (fixed chunks) to 1 (as the cost says).
    """
    slowest = max(cost.stages, key=lambda stage: stage.seconds(end, chunk_tokens))
    quadratic, linear = slowest.per_pair, slowest.per_token
    ends: list[int] = []
    at = start
    while at < end:
        wanted = _equal_time(at, chunk_tokens, quadratic, linear)
        smooth = chunk_tokens + smoothing * (wanted - chunk_tokens)
        count = max(int(smooth), chunk_tokens // 4)
        # Cuts are aligned from token 0, also when an earlier attempt left off anywhere.
        cut = (at + count) // align * align
        at = min(end, cut if cut > at else at + count)
        ends.append(at)
    return without_small_tail(start, ends, align, chunk_tokens)


def _equal_time(prefix: int, first: int, quadratic: float, linear: float) -> float:
    """The x with a·(2·L·x + x²) + b·x = a·C₀² + b·C₀."""
    target = (quadratic * first + linear) * first
    half = quadratic * prefix + linear / 2
    # The positive root, in the form that neither cancels nor divides by the quadratic.
    return target / (half + math.sqrt(half * half + quadratic * target)) if target else first
