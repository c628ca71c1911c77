"""What every benchmark says: its figures beside their bounds, the machine, the date and the versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table


def machine() -> dict[str, Any]:
    """The machine that the numbers belong to."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in cpuinfo if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = fields.get("flags", "").split()
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": fields.get("model name", platform.machine()),
        "cpu_family_model": f"{fields.get('cpu family')}/{fields.get('model')}",
        "cores": len(os.sched_getaffinity(0)),
        "instructions": [flag for flag in wanted if flag in flags],
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
    }


def write_json(path: Path, numbers: dict[str, Any]) -> None:
    """The numbers, with the machine under "machine"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**numbers, "machine": machine()}, indent=2) + "\n", encoding="utf-8")


def print_figures(title: str, numbers: Mapping[str, Any], bounds: Mapping[str, str]) -> None:
    """A table of the numbers, each beside its bound; what is not a number is left out."""
    table = Table(title=title)
    table.add_column("figure")
    table.add_column("measured", justify="right")
    table.add_column("bound", justify="right")
    for key, value in numbers.items():
        if isinstance(value, int | float):
            table.add_row(key, f"{value:g}", bounds.get(key, ""))
    Console().print(table)


def processor_seconds(process: psutil.Process) -> float:
    """Of all its threads so far, those that have ended included."""
    return float(sum(process.cpu_times()[:2]))


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
