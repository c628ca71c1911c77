"""The library by itself, as its example shows it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.harness import no_leaks


def test_the_example_sends_and_receives_between_two_processes_in_under_sixty_lines() -> None:
    with no_leaks():
        command = [sys.executable, "-m", "kv_transfer.example"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert re.fullmatch("122880 bytes over (tcp|rdma), first token 42\n", result.stdout)
    assert len(Path("kv_transfer/example.py").read_text(encoding="utf-8").splitlines()) < 60
