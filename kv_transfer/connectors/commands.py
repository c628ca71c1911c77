"""The subcommands of this package: `headwater decode serve`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from headwater import tracing
from headwater.cluster import DTYPES, load_cluster
from headwater.lifecycle import configure_logging
from headwater.security import use

if TYPE_CHECKING:
    # argparse has no public name for what add_subparsers returns.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001


def add_commands(subparsers: Subparsers) -> None:
    """Adds this package's subcommands to `headwater`."""
    decode = subparsers.add_parser("decode", help="a decode node on stock transformers")
    roles = decode.add_subparsers(required=True, metavar="COMMAND")
    serve = roles.add_parser("serve", help="run a decode node")
    serve.add_argument("--cluster", required=True, type=Path, metavar="FILE", help="cluster file (TOML)")
    serve.add_argument("--name", required=True, help="the node's name in the cluster file")
    serve.add_argument("--dtype", choices=DTYPES, help="replaces model.dtype of the cluster file")
    serve.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from kv_transfer.connectors.node import serve  # noqa: PLC0415 - loads torch

    cluster = load_cluster(arguments.cluster, arguments.dtype)
    use(cluster.security)
    configure_logging(arguments.name, cluster.log_level, form=cluster.log_format)
    with tracing.exporting("decode", arguments.name):
        return asyncio.run(serve(cluster, arguments.name))
