"""What a step costs on each stage: the model, its fit, and how it learns while serving. Pure.

The time of a chunk of x tokens after a prefix of L tokens is

    t(L, x) = c + γ·L + β·x + α·(2·L·x + x²)

c for what any step costs, γ for reading the prefix, β for the layers' matrices and α for attention, whose pairs of
tokens are L·x + x²/2. A step of several chunks costs c once. The form with L as a variable of its own is what
published dynamic chunking lacks: its quadratic is fitted without a prefix and extrapolated.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

# A step's chunks: (prefix, count) of each.
Chunks = Sequence[tuple[int, int]]

# Steps that the online fit remembers, per stage; so many new ones, or half of what it knows, make it fit again.
_WINDOW, _REFIT_EVERY = 256, 128
# A gradient that is zero but for rounding, relative.
_OPTIMAL = 1e-9
# A step this many times farther off than the median step is (half of them are nearer) says nothing about the stage ...
_OUTLIER = 5.0
# ... and being this much off is never an outlier.
_ORDINARY = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds on one stage.

    Args:
        base: c, of any step.
        per_prefix_token: γ.
        per_token: β.
        per_pair: α.
    """

    base: float
    per_prefix_token: float
    per_token: float
    per_pair: float

    def seconds(self, prefix: int, count: int) -> float:
        """Of a chunk of `count` tokens after `prefix` tokens."""
        return (
            self.base
            + self.per_prefix_token * prefix
            + self.per_token * count
            + self.per_pair * (2 * prefix + count) * count
        )

    def step_seconds(self, chunks: Chunks) -> float:
        return self.of_features(_features(chunks))

    def of_features(self, features: tuple[float, float, float, float]) -> float:
        """Of a step with these `_features`."""
        steps, prefixes, counts, pairs = features
        return self.base * steps + self.per_prefix_token * prefixes + self.per_token * counts + self.per_pair * pairs

    def scaled(self, factor: float) -> StageCost:
        return StageCost(*(factor * value for value in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True, slots=True)
class GroupCost:
    """Of all stages, first to last."""

    stages: tuple[StageCost, ...]

    def seconds(self, prefix: int, count: int) -> float:
        """On the slowest stage, which is what the pipeline moves by."""
        return max(stage.seconds(prefix, count) for stage in self.stages)

    def makespan(self, start: int, ends: Iterable[int]) -> float:
        """Seconds from the first stage's start to the last stage's end of chunks that follow each other.

        Args:
            start: token where the first chunk begins.
            ends: where each chunk ends.
        """
        if len(set(self.stages)) == 1:
            seconds = [self.stages[0].seconds(begin, end - begin) for begin, end in itertools.pairwise((start, *ends))]
            return sum(seconds) + (len(self.stages) - 1) * max(seconds)
        done = [0.0] * len(self.stages)
        for end in ends:
            ready = 0.0
            for number, stage in enumerate(self.stages):
                ready = done[number] = max(ready, done[number]) + stage.seconds(start, end - start)
            start = end
        return done[-1]


def assumed_cost(num_stages: int) -> GroupCost:
    """Before anything was measured: a step costs what 256 tokens cost, and a token a microsecond."""
    return GroupCost((StageCost(256e-6, 0.0, 1e-6, 0.0),) * num_stages)


def fit(samples: Sequence[tuple[Chunks, float]]) -> StageCost:
    """The non-negative coefficients with the least squares of relative errors.

    Args:
        samples: chunks of a step, and its seconds.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("a cost cannot be fitted to no samples")
    return _fit(_table(samples))


def relative_error(cost: StageCost, samples: Sequence[tuple[Chunks, float]]) -> float:
    """Median of |predicted - measured| / measured."""
    return float(np.median([abs(cost.step_seconds(chunks) - seconds) / seconds for chunks, seconds in samples]))


class OnlineCost:
    """One stage's cost, refined by the steps that it runs.

    Args:
        profiled: samples from start-up; they are kept, so that lengths which are not served now stay known.
    """

    def __init__(self, profiled: Sequence[tuple[Chunks, float]] = ()) -> None:
        self._profiled = _table(profiled)
        # Rows of such a table.
        self._recent: collections.deque[tuple[float, ...]] = collections.deque(maxlen=_WINDOW)
        self._new = 0
        self.cost = fit(profiled) if profiled else None
        # Relative, of the newest step, before it was learnt from; None before there was a cost.
        self.error: float | None = None

    def add(self, chunks: Chunks, seconds: float) -> bool:
        """A step took `seconds`. Returns whether the cost has changed."""
        features = _features(chunks)
        if self.cost is not None:
            self.error = abs(self.cost.of_features(features) - seconds) / seconds
        self._recent.append((*features, seconds))
        self._new += 1
        if self.cost is not None and self._new < min(_REFIT_EVERY, -(-len(self._recent) // 2)):
            return False
        self._new = 0
        table = np.concatenate([self._profiled, np.array(self._recent)])
        first = _fit(table)
        off = np.abs(table[:, :4] @ dataclasses.astuple(first) / table[:, 4] - 1)
        kept = off <= max(_ORDINARY, _OUTLIER * float(np.median(off)))
        self.cost = first if kept.all() else _fit(table[kept])
        return True


class LearnedCost:
    """The costs of a group's stages, as far as they are known."""

    def __init__(self, num_stages: int) -> None:
        self.stages = [OnlineCost() for _ in range(num_stages)]
        self.group = assumed_cost(num_stages)

    def learn(self, profiled: Sequence[Sequence[tuple[Chunks, float]]]) -> None:
        """Begins with samples of each stage from start-up."""
        self.stages = [OnlineCost(samples) for samples in profiled]
        self._join()

    @property
    def measured(self) -> bool:
        """Whether every stage has run."""
        return all(stage.cost is not None for stage in self.stages)

    def seconds(self, prefix: int, count: int) -> float:
        """Of a chunk, on the slowest stage, by what is known now."""
        return self.group.seconds(prefix, count)

    def add(self, stage: int, chunks: Chunks, seconds: float) -> None:
        """A stage has computed a step."""
        if self.stages[stage].add(chunks, seconds):
            self._join()

    def _join(self) -> None:
        known = [stage.cost for stage in self.stages if stage.cost is not None]
        if len(known) == len(self.stages):
            self.group = GroupCost(tuple(known))


def _features(chunks: Chunks) -> tuple[float, float, float, float]:
    """What the coefficients of a step's cost are multiplied with."""
    prefixes = counts = pairs = 0
    for prefix, count in chunks:
        prefixes += prefix
        counts += count
        pairs += (2 * prefix + count) * count
    return 1.0, float(prefixes), float(counts), float(pairs)


def _table(samples: Sequence[tuple[Chunks, float]]) -> npt.NDArray[np.float64]:
    """[samples, 5]: the features of each, and its seconds."""
    return np.array([(*_features(chunks), seconds) for chunks, seconds in samples]).reshape(-1, 5)


def _fit(table: npt.NDArray[np.float64]) -> StageCost:
    """Non-negative least squares over 4 columns: of the 15 supports, the one whose solution is not negative and would
    not get better by any column that it leaves out (the Karush-Kuhn-Tucker conditions).
    """
    scaled = table[:, :4] / table[:, 4:]
    # Columns differ by ten orders of magnitude.
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1.0
    columns = scaled / norms
    # The normal equations will do: the columns are scaled, and the leader solves them while it serves.
    gram, right = columns.T @ columns, columns.sum(axis=0)
    best, best_error = np.zeros(4), float("inf")
    for size in range(4, 0, -1):
        for support in itertools.combinations(range(4), size):
            part = list(support)
            solution = np.zeros(4)
            solution[part] = np.linalg.lstsq(gram[np.ix_(part, part)], right[part], rcond=None)[0]
            if (solution < 0).any():
                continue
            error = float(solution @ gram @ solution - 2 * solution @ right)
            if error < best_error:
                best, best_error = solution, error
            if (right - gram @ solution).max() <= _OPTIMAL * right.max():
                return StageCost(*(float(value) for value in solution / norms))
    # Rounding hid it.
    return StageCost(*(float(value) for value in best / norms))
