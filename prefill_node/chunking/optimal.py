"""The cuts that let the last stage be done soonest.

With stage time t the makespan of a chain of chunks through P equal stages is Σt + (P-1)·max t. Dynamic programming over
the cuts, for a bound T on each chunk's time, gives the least Σt (TeraPipe, Li et al., ICML 2021, enumerates T). Here T
is searched by branch and bound, which leaves out bounds that cannot win, so the answer is exact on its grid.

Filling and draining the pipeline, (P-1)·max t, is paid once by all requests that follow each other without a gap, so a
request that shares the pipeline with m - 1 others counts one m-th of it, and gets larger chunks.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import numpy.typing as npt

from prefill_node.chunking import dynamic, fixed, without_small_tail
from prefill_node.costs import GroupCost

# Points of the grid; a longer prompt has a coarser one.
_MAX_POINTS = 400
# Bounds that are tried together.
_BATCH = 24

Floats = npt.NDArray[np.float64]


@functools.lru_cache(maxsize=256)
def cuts(start: int, end: int, *, cost: GroupCost, chunk_tokens: int, align: int, sharing: int = 1) -> tuple[int, ...]:
    """Where the chunks end; never later done, by the cost, than `fixed` or `dynamic` chunks of at most the same size.

    Args:
        chunk_tokens: the most tokens of a chunk.
        sharing: requests that keep the pipeline filled together, this one included.
    """
    waits = (len(cost.stages) - 1) / sharing
    step = align * -(-(end - start) // (align * _MAX_POINTS))
    if step > chunk_tokens:
        step = align
    grid = [start, *range((start // step + 1) * step, end, step), end]
    candidates = [without_small_tail(start, best_cuts(grid, cost, chunk_tokens, waits), align, chunk_tokens)]
    for size in {chunk_tokens, *(max(align, chunk_tokens // part // align * align) for part in (2, 4))}:
        candidates.append(fixed.cuts(start, end, chunk_tokens=size, align=align))
        candidates.append(dynamic.cuts(start, end, cost=cost, chunk_tokens=size, align=align))
    return min(candidates, key=lambda ends: (_value(cost, start, ends, waits), len(ends)))


def _value(cost: GroupCost, start: int, ends: tuple[int, ...], waits: float) -> float:
    if waits == len(cost.stages) - 1:
        # Exact, also where stages differ.
        return cost.makespan(start, ends)
    seconds = [cost.seconds(begin, end - begin) for begin, end in itertools.pairwise((start, *ends))]
    return sum(seconds) + waits * max(seconds)


def best_cuts(grid: list[int], cost: GroupCost, max_tokens: int, waits: float) -> tuple[int, ...]:
    """The ends that minimise Σt + waits·max t over cuts at grid points, t on the slowest stage.

    Args:
        grid: increasing; first and last are the range's own.

    Raises:
        ValueError: two grid points are farther apart than `max_tokens`.
    """
    points = np.array(grid)
    if int(np.diff(points).max()) > max_tokens:
        raise ValueError(f"a grid of steps of {int(np.diff(points).max())} allows no chunk of {max_tokens} tokens")
    times = _times(points, cost, max_tokens)
    bounds = np.unique(times[np.isfinite(times)])
    # What has been tried: index of the bound → least Σt, or infinity where no cuts keep to it.
    tried: dict[int, float] = {}
    best, best_value = len(bounds) - 1, float("inf")
    untried = _spread([(-1, len(bounds))]) if waits else [len(bounds) - 1]
    while untried:
        for index, least in zip(untried, _least_sums(times, bounds[untried])[-1].tolist(), strict=True):
            tried[index] = least
            value = least + waits * float(bounds[index])
            if value < best_value:
                best, best_value = index, value
        # A larger bound allows all that a smaller one does, so between two of them Σt is no less than at the upper one.
        known = sorted(tried)
        open_ranges = [
            (low, high)
            for low, high in itertools.pairwise(known)
            if high - low > 1 and tried[high] + waits * float(bounds[low + 1]) < best_value
        ]
        untried = _spread(open_ranges)
    return _trace(points, times, float(bounds[best]))


def _times(points: npt.NDArray[np.int64], cost: GroupCost, max_tokens: int) -> Floats:
    """[k, j]: of the chunk from point j - 1 - k to point j; infinite where there is none, or it is too large."""
    num_points = len(points)
    width = int((np.searchsorted(points, points + max_tokens, side="right") - 1 - np.arange(num_points)).max())
    times = np.full((width, num_points), np.inf)
    for back in range(min(width, num_points - 1)):
        prefix = points[: num_points - 1 - back].astype(np.float64)
        count = points[back + 1 :] - prefix
        seconds = np.max(
            [
                stage.base
                + stage.per_prefix_token * prefix
                + stage.per_token * count
                + stage.per_pair * (2 * prefix + count) * count
                for stage in cost.stages
            ],
            axis=0,
        )
        times[back, back + 1 :] = np.where(count <= max_tokens, seconds, np.inf)
    return times


def _least_sums(times: Floats, bounds: Floats) -> Floats:
    """[j, bound]: least Σt up to point j, of chunks that keep to each bound; after `width` rows of infinity, which
    stand for the points before the first.
    """
    width, num_points = times.shape
    sums = np.full((width + num_points, len(bounds)), np.inf)
    sums[width] = 0.0
    for point in range(1, num_points):
        seconds = times[:, point, None]
        # Row k is point - 1 - k.
        reached = sums[width + point - 1 : point - 1 : -1] + np.where(seconds <= bounds, seconds, np.inf)
        reached.min(axis=0, out=sums[width + point])
    return sums


def _trace(points: npt.NDArray[np.int64], times: Floats, bound: float) -> tuple[int, ...]:
    width = len(times)
    sums = _least_sums(times, np.array([bound]))[:, 0]
    allowed = np.where(times <= bound, times, np.inf)
    ends: list[int] = []
    point = len(points) - 1
    while point > 0:
        ends.append(int(points[point]))
        point -= 1 + int((sums[width + point - 1 : point - 1 : -1] + allowed[:, point]).argmin())
    return tuple(reversed(ends))


def _spread(ranges: list[tuple[int, int]]) -> list[int]:
    """About `_BATCH` indices strictly within the ranges (low, high), none twice."""
    chosen: set[int] = set()
    for low, high in ranges:
        share = max(1, min(high - low - 1, _BATCH // len(ranges)))
        chosen.update(low + (high - low) * (part + 1) // (share + 1) for part in range(share))
        if low == -1:
            chosen.update((0, high - 1))
    return sorted(index for index in chosen if any(low < index < high for low, high in ranges))
