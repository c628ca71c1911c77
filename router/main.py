"""The `headwater` command, composed of the subcommands that packages and plug-ins add.

An entry point in the group `headwater.commands` is a function `add_commands(subparsers) -> None`. It adds
parsers, each with `set_defaults(run=…)`, where `run(args) -> int` returns the exit code and imports what it
needs itself: `headwater --help` must stay quick.

Exit codes: 0 success; 1 a peer failed or had no room; 2 the command, the cluster file or the request is
wrong; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points

import argcomplete

from headwater.errors import HeadwaterError, InvalidConfig, LocalError

EXIT_PEER = 1
EXIT_LOCAL = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (without the program's name); returns the exit code."""
    try:
        parser = build_parser()
        argcomplete.autocomplete(parser)
        args = parser.parse_args(argv)
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except HeadwaterError as error:
        sys.stderr.write(f"headwater: error: {error}\n")
        return EXIT_LOCAL if isinstance(error, LocalError) else EXIT_PEER
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def build_parser(commands: Sequence[EntryPoint] | None = None) -> argparse.ArgumentParser:
    """The parser with every subcommand of `commands`, by default those that are installed.

    Raises:
        InvalidConfig: an installed package's commands cannot be loaded, or there are none.
    """
    parser = argparse.ArgumentParser(
        prog="headwater", description="Prefill-only disaggregated LLM serving.", allow_abbrev=False
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    found = sorted(entry_points(group="headwater.commands") if commands is None else commands)
    if not found:
        raise InvalidConfig("headwater is not installed in this environment: pip install -e . in its checkout.")
    for entry in found:
        try:
            add_commands = entry.load()
        except ImportError as error:
            raise InvalidConfig(f"the commands of {entry.value!r} cannot be loaded: {error}.") from error
        add_commands(subparsers)
    return parser
