"""`headwater simulate`: what a prefill group would do with a workload, under a virtual clock."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from headwater.cluster import Cluster, Prefill
from headwater.errors import InvalidConfig
from kv_transfer.geometry import CellSize
from kv_transfer.model_folder import read_model_folder
from prefill_node.costs import GroupCost, fit
from prefill_node.group import limits_of, policy_of, worker_configs
from prefill_node.profiles import PROFILES, profile_named
from prefill_node.profiling import load, load_boundaries, saved_at
from prefill_node.simulator import Arrival, Hardware, Result, simulate
from prefill_node.timeline import chrome_trace, gantt_svg

_PART = re.compile(r"(\d+)x(\d+)(?:@([\d.]+))?(?:\+([\d.]+))?")


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a workload file."""

    at: float
    tokens: int
    priority: int = 0
    cancel_at: float | None = None


def parse_workload(text: str) -> list[Arrival]:
    """Requests from "COUNTxTOKENS[@START][+EVERY],…" or from a file of JSON lines (at, tokens, priority, cancel_at).

    Raises:
        InvalidConfig: it is neither.
    """
    path = Path(text)
    if path.is_file():
        try:
            lines = [msgspec.json.decode(line, type=_Line) for line in path.read_bytes().splitlines() if line.strip()]
        except msgspec.DecodeError as error:
            raise InvalidConfig(
                f"{text}: {error}. Give one JSON object a line: at (seconds) and tokens, and maybe priority, cancel_at."
            ) from error
        return [
            Arrival(f"r{number}", line.at, line.tokens, line.priority, line.cancel_at)
            for number, line in enumerate(lines)
        ]
    arrivals: list[Arrival] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or not int(match[2]):
            raise InvalidConfig(
                f"workload {part!r} is neither a file nor COUNTxTOKENS[@START][+EVERY] (seconds); for example "
                "16x131072 or 1x1000000,50x1000@2+0.5."
            )
        count, tokens, start, every = int(match[1]), int(match[2]), float(match[3] or 0), float(match[4] or 0)
        first = len(arrivals)
        arrivals += [Arrival(f"r{first + number}", start + number * every, tokens) for number in range(count)]
    return arrivals


def run_group(cluster: Cluster, section: Prefill, arrivals: list[Arrival], profile: str | None, gbps: float) -> Result:
    """Simulates a group as the cluster file describes it, with a profile's costs, or as measured here earlier.

    Args:
        gbps: of each stage's link, Gbit/s.

    Raises:
        InvalidConfig: the profile is unknown, or nothing was measured.
    """
    name = profile or (section.emulated_profile if section.device == "emulated" else None)
    if name is not None:
        found = profile_named(name)
        cost, kv_bytes_per_token = found.cost(section.pp), float(found.kv_bytes_per_token)
    else:
        folder = read_model_folder(Path(cluster.model.path))
        config = worker_configs(cluster, section, folder, epoch="")[0]
        if section.measure_layers:
            config = worker_configs(cluster, section, folder, epoch="", boundaries=load_boundaries(config))[0]
        samples = load(saved_at(config), section.pp)
        if samples is None:
            raise InvalidConfig(
                f"the costs of {section.name} have not been measured on this machine. Start it once with chunk_policy "
                f'"dynamic" or "optimal", or give --profile ({", ".join(PROFILES)}).'
            )
        cost = GroupCost(tuple(fit(measured) for measured in samples))
        geometry = config.geometry
        kv_bytes_per_token = float(CellSize.of(geometry).total * geometry.num_layers * geometry.num_kv_heads)
    return simulate(
        arrivals,
        Hardware(cost, kv_bytes_per_token=kv_bytes_per_token, kv_bytes_per_second=gbps * 1e9 / 8),
        cuts=policy_of(section, lambda: cost),
        # A workload is never refused for its size.
        limits=dataclasses.replace(limits_of(section), max_queued=max(section.max_queued_requests, len(arrivals))),
        num_pages=-(-section.pool_tokens // section.page_size),
        page_size=section.page_size,
    )


def summary(result: Result) -> dict[str, Any]:
    """The figures of a result."""
    times = sorted(outcome.ttft for outcome in result.outcomes if outcome.first_token_at is not None)
    tokens = sum(outcome.arrival.num_tokens for outcome in result.outcomes if outcome.first_token_at is not None)
    exposed = [
        outcome.delivered_at - outcome.first_token_at
        for outcome in result.outcomes
        if outcome.first_token_at is not None and outcome.delivered_at is not None
    ]
    return {
        "requests": len(result.outcomes),
        "first_tokens": len(times),
        "ttft_p50_s": round(statistics.median(times), 4) if times else None,
        "ttft_max_s": round(times[-1], 4) if times else None,
        "tokens_per_s": round(tokens / result.seconds, 1) if result.seconds else None,
        "seconds": round(result.seconds, 4),
        "bubble_share": round(result.bubble_share, 4),
        "exposed_transfer_s": round(max(exposed), 4) if exposed else None,
        "chunks": sum(outcome.num_chunks for outcome in result.outcomes),
    }


def report(
    result: Result, title: str, *, as_json: bool, trace: Path | None, svg: Path | None, console: Console
) -> None:
    """Prints the figures, and writes the timeline where that is asked for.

    Raises:
        InvalidConfig: a file cannot be written.
    """
    numbers = summary(result)
    if as_json:
        console.print_json(data=numbers)
    else:
        table = Table(title=title, show_header=False)
        for key, value in numbers.items():
            table.add_row(key, "–" if value is None else str(value))
        console.print(table)
    shown = [track for track in result.tracks if any(bar.track == track for bar in result.bars)]
    if trace is not None:
        _write(trace, json.dumps(chrome_trace(result.bars, shown)))
    if svg is not None:
        _write(svg, gantt_svg(result.bars, shown, title))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"cannot write {path}: {error.strerror}.") from error
