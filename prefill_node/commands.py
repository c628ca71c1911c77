"""The subcommands of this package: `headwater prefill serve`, `prefill worker`, `trace`, `simulate`, `import-model`."""

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
    prefill = subparsers.add_parser("prefill", help="a prefill group's processes")
    roles = prefill.add_subparsers(required=True, metavar="COMMAND")

    serve = roles.add_parser("serve", help="run a group's leader, and its workers on this host")
    serve.add_argument("--cluster", required=True, type=Path, metavar="FILE", help="cluster file (TOML)")
    serve.add_argument("--name", required=True, help="the group's name in the cluster file")
    serve.add_argument("--dtype", choices=DTYPES, help="replaces model.dtype of the cluster file")
    serve.set_defaults(run=_serve)

    worker = roles.add_parser("worker", help="run one rank, on a host that the leader is not on")
    add_worker_arguments(worker)
    worker.set_defaults(run=_worker)

    trace = subparsers.add_parser("trace", help="show where a request's time went in its prefill group")
    trace.add_argument("request", metavar="REQUEST", help="id of a request that is running or ended lately")
    trace.add_argument("--cluster", required=True, type=Path, metavar="FILE", help="cluster file (TOML)")
    trace.add_argument("--out", type=Path, metavar="FILE", help="the trace, for Perfetto (trace-REQUEST.json)")
    trace.add_argument("--svg", type=Path, metavar="FILE", help="also draw a Gantt chart there")
    trace.add_argument("--group", metavar="NAME", help="ask this prefill group only (default: all, in their order)")
    trace.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    trace.set_defaults(run=_trace)

    simulate = subparsers.add_parser("simulate", help="say what a prefill group would do with a workload")
    simulate.add_argument("cluster", type=Path, metavar="FILE", help="cluster file (TOML)")
    simulate.add_argument("--group", metavar="NAME", help="the prefill group (default: the file's first)")
    simulate.add_argument(
        "--workload",
        required=True,
        metavar="WORKLOAD",
        help="COUNTxTOKENS[@START][+EVERY],... in seconds, or a file of JSON lines: at, tokens, priority, cancel_at",
    )
    simulate.add_argument("--profile", metavar="NAME", help="published costs instead of those measured here")
    simulate.add_argument("--gbps", type=float, default=100.0, help="of each stage's link, in Gbit/s (default: 100)")
    simulate.add_argument("--json", action="store_true", help="print JSON instead of a table")
    simulate.add_argument("--out", type=Path, metavar="FILE", help="write the timeline there, for Perfetto")
    simulate.add_argument("--svg", type=Path, metavar="FILE", help="draw a Gantt chart there")
    simulate.set_defaults(run=_simulate)

    convert = subparsers.add_parser("import-model", help="turn a GGUF file into a safetensors folder")
    convert.add_argument("gguf", type=Path, help="the GGUF file")
    convert.add_argument("folder", type=Path, help="the folder to make")
    convert.set_defaults(run=_import_model)


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """What a worker must be told: by an operator, or by the leader that starts it."""
    parser.add_argument("--leader", required=True, metavar="HOST:PORT", help="where the group's leader listens")
    parser.add_argument("--rank", required=True, type=int, help="rank in the group: stage * tp + tensor rank")
    parser.add_argument("--epoch", default="", help=argparse.SUPPRESS)
    parser.add_argument("--host", help="this host's address as the other ranks reach it (default: the leader's host)")


def _serve(arguments: argparse.Namespace) -> int:
    from prefill_node.group import serve  # noqa: PLC0415 - each command loads only what it needs

    cluster = load_cluster(arguments.cluster, arguments.dtype)
    use(cluster.security)
    configure_logging(arguments.name, cluster.log_level, form=cluster.log_format)
    with tracing.exporting("prefill", arguments.name):
        return asyncio.run(serve(cluster, arguments.name))


def _worker(arguments: argparse.Namespace) -> int:
    from prefill_node.worker import run  # noqa: PLC0415 - loads torch

    return run(arguments)


def _trace(arguments: argparse.Namespace) -> int:
    from prefill_node.trace import default_file_name, fetch_trace, write_trace  # noqa: PLC0415

    cluster = load_cluster(arguments.cluster)
    use(cluster.security)
    groups = cluster.prefill if arguments.group is None else (cluster.prefill_named(arguments.group),)
    request_id: str = arguments.request
    group, response = asyncio.run(fetch_trace(request_id, groups, cluster.deadlines.reply))
    out = arguments.out or Path(default_file_name(request_id))
    write_trace(request_id, group, response, out, arguments.svg, as_json=arguments.json)
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    from rich.console import Console  # noqa: PLC0415

    from prefill_node import simulate  # noqa: PLC0415

    cluster = load_cluster(arguments.cluster)
    section = cluster.prefill_named(arguments.group) if arguments.group else cluster.prefill[0]
    arrivals = simulate.parse_workload(arguments.workload)
    result = simulate.run_group(cluster, section, arrivals, arguments.profile, arguments.gbps)
    simulate.report(
        result,
        f"{section.name}: {arguments.workload}",
        as_json=arguments.json,
        trace=arguments.out,
        svg=arguments.svg,
        console=Console(),
    )
    return 0


def _import_model(arguments: argparse.Namespace) -> int:
    from prefill_node.import_model import import_model  # noqa: PLC0415 - loads torch

    import_model(arguments.gguf, arguments.folder)
    return 0
