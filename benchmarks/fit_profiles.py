"""Fits `prefill_node.profiles` to published figures.

    python -m benchmarks.fit_profiles [--json FILE]

Each figure is a run of requests that are all there at second 0, or the ratio of two runs. Runs are made as the
published system makes them: requests in order, none overtaken, and as many steps in flight as there are stages
(`pp_async_batch_depth` is 0 unless set, and the published commands do not set it); our own scheduler keeps more.

The fit minimises the squares of log(fitted / published) over the logarithms of the free parameters, by Nelder and
Mead's method (The Computer Journal, 1965) from several starts: cuts move in steps of 64 tokens, so the sum is neither
smooth nor has it one minimum. Meanwhile runs are computed by a recurrence; what is printed is simulated.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks.report import write_json
from prefill_node.chunking import ChunkPolicy, PolicyName
from prefill_node.chunking.policies import make_policy
from prefill_node.costs import GroupCost
from prefill_node.profiles import PROFILES, Profile
from prefill_node.scheduler import Limits
from prefill_node.simulator import Arrival, Hardware, simulate

_PAGE = 64
_K = 1024
_128K = 128 * _K

Point = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """So many requests of so many tokens, all there at second 0, on `pp` stages."""

    pp: int
    policy: PolicyName
    chunk_tokens: int
    smoothing: float = 0.0
    num_tokens: int = _128K
    num_requests: int = 1


# Seconds of a run, on stages that cost so much.
Clock = Callable[[GroupCost, Run], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """A published number: seconds of `run`, or how many times as long `base` takes."""

    name: str
    published: float
    run: Run
    base: Run | None = None

    def value(self, profile: Profile, clock: Clock) -> float:
        seconds = clock(profile.cost(self.run.pp), self.run)
        return seconds if self.base is None else clock(profile.cost(self.base.pp), self.base) / seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What is fitted to what.

    Attributes:
        free: where the search begins, by parameter. The others stay what they are in the profile.
    """

    profile: str
    figures: tuple[Figure, ...]
    free: Mapping[str, float]


def _qwen3() -> Setup:
    def dynamic(num_tokens: int, num_requests: int = 1) -> Run:
        return Run(8, "dynamic", 18 * _K, 0.8, num_tokens, num_requests)

    def fixed(pp: int, chunk_tokens: int, num_requests: int = 1) -> Run:
        return Run(pp, "fixed", chunk_tokens, num_requests=num_requests)

    figures = (
        # There is nothing to balance at PP1, so its chunks are taken as fixed.
        Figure("TTFT 128K, PP1", 55.5, fixed(1, 18 * _K)),
        Figure("TTFT 128K, PP8, dynamic 18K", 10.54, dynamic(_128K)),
        # The chunks of longer prompts are not published: as at 128K.
        Figure("TTFT 256K, PP8, dynamic 18K", 32.68, dynamic(2 * _128K)),
        Figure("TTFT 512K, PP8, dynamic 18K", 114.33, dynamic(4 * _128K)),
        Figure("TTFT 1M, PP8, dynamic 18K", 420.91, dynamic(8 * _128K)),
        Figure("throughput PP8 / PP1, dynamic 18K", 6.14, dynamic(_128K, 16), fixed(1, 18 * _K, 16)),
        # Published as an efficiency of 69.6 %; of PP1 with the same chunks, as far as is said.
        Figure("throughput PP8 / PP1, fixed 6K", 8 * 0.696, fixed(8, 6 * _K, 16), fixed(1, 6 * _K, 16)),
    )
    return Setup(
        "h20-qwen3-235b-a22b-fp8-tp4",
        figures,
        # Attention takes 45 s of the 55.5 s at H20's peak rate, and never quite reaches it.
        {"step_seconds": 5e-3, "per_token": 8 / _128K, "per_pair": 47 / _128K**2},
    )


def _deepseek() -> Setup:
    # One base for all ratios: the best of the tensor-parallel settings, which had chunks of 12K.
    base = Run(1, "fixed", 12 * _K, num_requests=16)
    figures = (
        Figure("TTFT 128K, PP1", 48.5, Run(1, "fixed", 12 * _K)),
        Figure("TTFT 128K, PP4, dynamic 12K", 15.5, Run(4, "dynamic", 12 * _K, 0.65)),
        Figure("throughput PP4 / PP1, dynamic 12K", 3.31, Run(4, "dynamic", 12 * _K, 0.65, num_requests=16), base),
        Figure("throughput PP4 / PP1, fixed 4K", 3.20, Run(4, "fixed", 4 * _K, num_requests=16), base),
        # "18.4 % over TP32", which has 2.54.
        Figure("throughput PP4 / PP1, fixed 12K", 2.54 * 1.184, Run(4, "fixed", 12 * _K, num_requests=16), base),
    )
    return Setup(
        "h20-deepseek-v3.1-tp8",
        figures,
        # At H20's peak rate: 36 s of attention, and 2 µs to rebuild a prefix token's keys and values.
        {"per_prefix_token": 2e-6, "per_token": 8 / _128K, "per_pair": 36 / _128K**2},
    )


SETUPS = (_qwen3(), _deepseek())


def simulated_seconds(cost: GroupCost, run: Run) -> float:
    """By the simulator."""
    # Falling priorities keep requests in order.
    arrivals = [Arrival(f"r{number}", 0.0, run.num_tokens, -number) for number in range(run.num_requests)]
    limits = Limits(
        run.chunk_tokens, look_ahead=0, max_running=16, max_queued=run.num_requests, max_wait_seconds=math.inf
    )
    num_pages = run.num_requests * -(-run.num_tokens // _PAGE)
    return simulate(
        arrivals, Hardware(cost), cuts=_policy(cost, run), limits=limits, num_pages=num_pages, page_size=_PAGE
    ).seconds


def recurrent_seconds(cost: GroupCost, run: Run) -> float:
    """The same, much sooner: a stage begins a step when it has done the one before and the stage before has done this
    one, and the first stage when the last has done the step that is as many before as there are stages.
    """
    ends = _policy(cost, run)(0, run.num_tokens, 1)
    chunks = [(start, end - start) for start, end in itertools.pairwise((0, *ends))]
    times = [[stage.seconds(prefix, count) for stage in cost.stages] for prefix, count in chunks]
    done = [0.0] * run.pp
    last_done = [0.0] * run.pp
    for number, step in enumerate(times * run.num_requests):
        ready = last_done[number % run.pp]
        for stage, seconds in enumerate(step):
            ready = done[stage] = max(ready, done[stage]) + seconds
        last_done[number % run.pp] = ready
    return done[-1]


def fit(setup: Setup) -> Profile:
    """The profile with the free parameters that come closest to the figures, to four digits."""
    profile = PROFILES[setup.profile]

    def at(logarithms: Point) -> Profile:
        values = {
            name: float(f"{value:.3e}") for name, value in zip(setup.free, np.exp(logarithms).tolist(), strict=True)
        }
        step_seconds = values.pop("step_seconds", profile.step_seconds)
        return dataclasses.replace(
            profile, step_seconds=step_seconds, layers=dataclasses.replace(profile.layers, **values)
        )

    def off(logarithms: Point) -> float:
        candidate = at(logarithms)
        return sum(
            math.log(figure.value(candidate, recurrent_seconds) / figure.published) ** 2 for figure in setup.figures
        )

    begin = np.log(list(setup.free.values()))
    # The first parameter is what a chunk costs beyond its tokens: the figures say least of that.
    starts = [begin + shift * np.eye(len(begin))[0] for shift in (-1.0, 0.0, 1.0)]
    found = [nelder_mead(off, nelder_mead(off, start, 0.3), 0.1) for start in starts]
    return at(min(found, key=off))


def nelder_mead(function: Callable[[Point], float], start: Point, size: float) -> Point:
    """Where `function` is least, near a simplex of `size` at `start`."""

    def vertex(point: Point) -> tuple[float, Point]:
        return function(point), point

    def value(vertex: tuple[float, Point]) -> float:
        return vertex[0]

    simplex = [vertex(point) for point in (start, *(start + size * axis for axis in np.eye(len(start))))]
    for _ in range(200):
        simplex.sort(key=value)
        best, worst = simplex[0], simplex[-1]
        if max(float(np.abs(point - best[1]).max()) for _, point in simplex) < 1e-4:
            break
        middle: Point = np.mean([point for _, point in simplex[:-1]], axis=0)
        reflected = vertex(2 * middle - worst[1])
        if reflected[0] < best[0]:
            simplex[-1] = min(reflected, vertex(3 * middle - 2 * worst[1]), key=value)
        elif reflected[0] < simplex[-2][0]:
            simplex[-1] = reflected
        else:
            nearer = vertex((middle + min(reflected, worst, key=value)[1]) / 2)
            if nearer[0] < min(reflected[0], worst[0]):
                simplex[-1] = nearer
            else:
                simplex[1:] = [vertex((point + best[1]) / 2) for _, point in simplex[1:]]
    return min(simplex, key=value)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write parameters and residuals there")
    arguments = parser.parse_args()
    console = Console()
    results = {}
    for setup in SETUPS:
        fitted = fit(setup)
        table = Table(title=setup.profile)
        table.add_column("figure", no_wrap=True)
        for column in ("published", "fitted", "residual %", "kept %"):
            table.add_column(column, justify="right")
        rows = []
        for figure in setup.figures:
            number = figure.value(fitted, simulated_seconds)
            if not math.isclose(number, figure.value(fitted, recurrent_seconds), rel_tol=1e-9):
                raise AssertionError(f"{figure.name}: the recurrence does not do what the simulator does")
            residual = number / figure.published - 1
            kept = PROFILES[setup.profile].residuals.get(figure.name, math.nan)
            cells = f"{figure.published:.3f}", f"{number:.3f}", f"{100 * residual:+.2f}", f"{100 * kept:+.2f}"
            table.add_row(figure.name, *cells)
            rows.append({"figure": figure.name, "published": figure.published, "fitted": number, "residual": residual})
        # "kept" is what the residual was when the numbers were written into `prefill_node.profiles`.
        console.print(table)
        console.print(f"step_seconds={fitted.step_seconds:g}, layers={fitted.layers}\n", highlight=False)
        parameters = {"step_seconds": fitted.step_seconds, **dataclasses.asdict(fitted.layers)}
        results[setup.profile] = {"parameters": parameters, "figures": rows}
    if arguments.json:
        write_json(arguments.json, results)


def _policy(cost: GroupCost, run: Run) -> ChunkPolicy:
    return make_policy(
        run.policy, lambda: cost, chunk_tokens=run.chunk_tokens, page_size=_PAGE, smoothing=run.smoothing
    )


if __name__ == "__main__":
    main()
