"""The `headwater` command, composed of the subcommands that packages and plug-ins add.

An entry point in the group `headwater.commands` is a function `add_commands(subparsers) -> None`. It adds
parsers, each with `set_defaults(run=…)`, where `run(args) -> int` returns the exit code and imports what it
needs itself: `headwater --help` must stay quick.

Exit codes are those of `headwater.exits`. What goes wrong is one line on standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import NoReturn

import argcomplete

from headwater.errors import HeadwaterError, InvalidConfig
from headwater.exits import MEANINGS, Exit, exit_of


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and where to read on. argparse makes the parsers of subcommands alike."""

    def error(self, message: str) -> NoReturn:
        self.exit(Exit.LOCAL, f"headwater: error: {message}; see {self.prog} --help.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (without the program's name); returns the exit code."""
    try:
        parser = build_parser()
        argcomplete.autocomplete(parser)
        args = parser.parse_args(argv)
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except HeadwaterError as error:
        sys.stderr.write(f"headwater: error: {' '.join(str(error).split())}\n")
        return exit_of(error)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


def build_parser(commands: Sequence[EntryPoint] | None = None) -> argparse.ArgumentParser:
    """The parser with every subcommand of `commands`, by default those that are installed.

    Raises:
        InvalidConfig: an installed package's commands cannot be loaded, or there are none.
    """
    parser = _Parser(
        prog="headwater",
        description="Prefill-only disaggregated LLM serving.",
        epilog="\n".join(["exit codes:", *(f"  {code:<19d} {meaning}" for code, meaning in MEANINGS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
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
