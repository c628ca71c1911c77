"""Measures at start-up what chunks cost on each stage, across prefix and chunk lengths, and remembers it.

Made-up chunks go through the pipeline one at a time, in the same log and the same code as real ones. Their prefix is
whatever the pages hold, so a long one costs nothing to set up.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from headwater.errors import DeadlinePassed
from headwater.lifecycle import get_logger
from headwater.tokens import pack
from headwater.v1 import worker_pb2
from prefill_node.costs import Chunks
from prefill_node.links import WorkerLinks

log = get_logger(__name__)

T = TypeVar("T")

_REQUEST = "profile"
# As many points as a cost has coefficients are measured in any case.
_FEWEST_POINTS = 4
# (chunks of a step, seconds), of each stage.
Samples = list[list[tuple[Chunks, float]]]


def profile_points(max_tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """(prefix, count) to be measured, cheap ones first: every fourth of the chunk size, after no prefix, and up to the
    longest that leaves room for it.
    """
    counts = {min(max(1, chunk_tokens * part // 4), max_tokens) for part in (1, 2, 4)}
    points = {
        (min(prefix, max_tokens - count), count)
        for count in counts
        for prefix in (0, max_tokens // 8, max_tokens // 2, max_tokens)
    }
    return sorted(points, key=lambda point: ((2 * point[0] + point[1]) * point[1], point))


async def measure(
    links: WorkerLinks,
    config: worker_pb2.WorkerConfig,
    points: list[tuple[int, int]],
    *,
    seconds: float,
    progress: Callable[[str], None],
) -> tuple[Samples, int]:
    """Times the points on an idle group.

    Args:
        seconds: when they are used up, what is left of the points is not measured.
        progress: told of every point.

    Returns:
        Samples of each stage, and the number of steps that the workers were given.

    Raises:
        DeadlinePassed: a step was not done in time.
    """
    reports: asyncio.Queue[tuple[int, worker_pb2.Report]] = asyncio.Queue()
    before, links.on_report = links.on_report, lambda rank, report: reports.put_nowait((rank, report))
    samples: Samples = [[] for _ in range(config.pp)]
    started = time.monotonic()
    pages = range(config.num_pages)
    num_tokens = config.num_pages * config.geometry.page_size
    links.append(worker_pb2.OpenRequest(request_id=_REQUEST, num_tokens=num_tokens, pages=pages))
    sequence = 0
    try:
        # The first one is for caches and allocators.
        for number, (prefix, count) in enumerate([points[-1], *points]):
            if number > _FEWEST_POINTS and time.monotonic() - started > seconds:
                log.info("profiling stopped early", measured=number - 1, points=len(points))
                break
            progress(f"profiling, {number} of {len(points)}")
            step = worker_pb2.Step(sequence=sequence)
            step.chunks.add(request_id=_REQUEST, start=prefix, end=prefix + count, tokens=pack([0] * count))
            links.append(step)
            sequence += 1
            async with asyncio.timeout(config.step_seconds):
                for _ in range(config.pp):
                    rank, report = await reports.get()
                    if number:
                        sample = ([(prefix, count)], report.step_done.compute_seconds)
                        samples[rank // config.tp].append(sample)
        links.append(worker_pb2.AbortRequest(request_id=_REQUEST))
        async with asyncio.timeout(config.step_seconds):
            for _ in range(links.world_size):
                await reports.get()
        links.append(worker_pb2.ForgetRequest(request_id=_REQUEST))
    except TimeoutError:
        raise DeadlinePassed(
            f"profiling: a step was not done within {config.step_seconds:g} s (deadlines.step)."
        ) from None
    finally:
        links.on_report = before
    return samples, sequence


def saved_at(config: worker_pb2.WorkerConfig) -> Path:
    """The file of the costs on this machine, for this model and layout."""
    return _file(config, "costs", list(config.layer_boundaries))


def load(path: Path, num_stages: int) -> Samples | None:
    """Samples of an earlier start; None when there are none that can be read."""
    samples = _read(path, Samples)
    return samples if samples is not None and len(samples) == num_stages and all(samples) else None


def save(path: Path, samples: Samples) -> None:
    """Failing to save costs the next start some seconds, and nothing else."""
    _write(path, samples)


def load_boundaries(config: worker_pb2.WorkerConfig) -> list[int] | None:
    """How the layers were split at an earlier start, by what they took; None when it is not known."""
    boundaries = _read(_file(config, "layers"), list[int])
    fits = boundaries is not None and len(boundaries) == config.pp + 1
    return boundaries if fits else None


def save_boundaries(config: worker_pb2.WorkerConfig, boundaries: list[int]) -> None:
    """For `load_boundaries`."""
    _write(_file(config, "layers"), boundaries)


def _file(config: worker_pb2.WorkerConfig, kind: str, *more: object) -> Path:
    geometry = config.geometry
    what = [
        _processor(),
        len(os.sched_getaffinity(0)),
        config.device,
        config.num_threads,
        geometry.model_fingerprint,
        geometry.dtype,
        config.pp,
        config.tp,
        config.chunk_tokens,
        config.num_pages * geometry.page_size,
        config.emulated_cost.SerializeToString().hex(),
        *more,
    ]
    name = hashlib.sha256(repr(what).encode()).hexdigest()[:24]
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return cache / "headwater" / kind / f"{name}.json"


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("what was measured earlier cannot be read; measuring again", path=str(path), error=str(error))
        return None


def _write(path: Path, what: object) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(what))
        temporary.replace(path)
    except OSError as error:
        log.warning("what was measured cannot be saved", path=str(path), error=str(error))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
