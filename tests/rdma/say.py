"""What the guest says on its console."""

from __future__ import annotations

from pathlib import Path


def say(line: str) -> None:
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    print(f"[{uptime:5.1f}] {line}", flush=True)  # noqa: T201 - a command's output
