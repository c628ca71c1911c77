"""Consoles for tables: as wide as the terminal, and wide enough for everything when the output is a file."""

from __future__ import annotations

import sys

from rich.console import Console

_FILE_COLUMNS = 200


def open_console(*, stderr: bool = False) -> Console:
    """A console on standard output or standard error."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else _FILE_COLUMNS)
