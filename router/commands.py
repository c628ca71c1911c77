"""The subcommands of this package: `router serve`, `up`, `check`, `generate` and `status`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cluster import load_cluster
from headwater.errors import InvalidRequest
from headwater.lifecycle import configure_logging
from headwater.v1 import common_pb2, router_pb2

if TYPE_CHECKING:
    # argparse has no public name for what add_subparsers returns.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_ROUTER = "127.0.0.1:7000"
# Of `headwater check`, when there are problems: as for every other error in a cluster file.
_EXIT_PROBLEMS = 2


def add_commands(subparsers: Subparsers) -> None:
    """Adds this package's subcommands to `headwater`."""
    router = subparsers.add_parser("router", help="the router process")
    roles = router.add_subparsers(required=True, metavar="COMMAND")
    serve = roles.add_parser("serve", help="run the router of a cluster file")
    serve.add_argument("--cluster", required=True, type=Path, metavar="FILE", help="cluster file (TOML)")
    serve.set_defaults(run=_serve)

    up = subparsers.add_parser("up", help="run everything that a cluster file places on this host")
    up.add_argument("cluster", type=Path, metavar="FILE", help="cluster file (TOML)")
    up.add_argument("--log-dir", type=Path, metavar="DIR", help="write NAME.log for each process there")
    up.set_defaults(run=_up)

    check = subparsers.add_parser("check", help="say what a cluster file means and what is wrong with it")
    check.add_argument("cluster", type=Path, metavar="FILE", help="cluster file (TOML)")
    check.set_defaults(run=_check)

    _add_generate(subparsers)

    status = subparsers.add_parser("status", help="show the router's groups")
    _add_router(status)
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.set_defaults(run=_status)


def _add_generate(subparsers: Subparsers) -> None:
    generate = subparsers.add_parser("generate", help="send a prompt and show the answer as it comes")
    _add_router(generate)
    prompt = generate.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt; without it, standard input is")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a text file with the prompt")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    generate.add_argument("--max-tokens", type=int, default=128, metavar="N", help="longest answer (128)")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="in (0, 1]; the default is 1")
    generate.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    generate.add_argument("--stop", action="append", default=[], metavar="S", help="end before this text; repeatable")
    generate.add_argument("--progress", action="store_true", help="show progress even when this is no terminal")
    generate.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing before")
    generate.set_defaults(run=_generate)


def _add_router(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--router", default=_ROUTER, metavar="HOST:PORT", help=f"the router's address ({_ROUTER})")


def _serve(arguments: argparse.Namespace) -> int:
    from router.server import serve  # noqa: PLC0415 - each command loads only what it needs

    cluster = load_cluster(arguments.cluster)
    configure_logging(cluster.router.name, cluster.log_level)
    return asyncio.run(serve(cluster))


def _up(arguments: argparse.Namespace) -> int:
    from router.up import run_up  # noqa: PLC0415

    return asyncio.run(run_up(arguments.cluster, arguments.log_dir))


def _check(arguments: argparse.Namespace) -> int:
    from router.check import check_cluster  # noqa: PLC0415
    from router.show import show_check  # noqa: PLC0415

    report = check_cluster(load_cluster(arguments.cluster))
    show_check(report)
    return _EXIT_PROBLEMS if report.problems else 0


def _generate(arguments: argparse.Namespace) -> int:
    from router.generate import run_generate  # noqa: PLC0415

    progress = arguments.progress or (sys.stderr.isatty() and not arguments.json)
    request = _request(arguments)
    return asyncio.run(run_generate(arguments.router, request, as_json=arguments.json, progress=progress))


def _status(arguments: argparse.Namespace) -> int:
    from router.client import Client  # noqa: PLC0415
    from router.show import show_status  # noqa: PLC0415

    async def ask() -> router_pb2.StatusResponse:
        async with Client(arguments.router) as client:
            return await client.status()

    show_status(asyncio.run(ask()), as_json=arguments.json)
    return 0


def _request(arguments: argparse.Namespace) -> router_pb2.GenerateRequest:
    request = router_pb2.GenerateRequest(stop=arguments.stop)
    try:
        request.max_tokens = arguments.max_tokens
        request.sampling.CopyFrom(
            common_pb2.SamplingParams(
                temperature=arguments.temperature, top_p=arguments.top_p, seed=arguments.seed or 0
            )
        )
    except ValueError as error:
        raise InvalidRequest(f"--max-tokens or --seed is out of range: {error}.") from error
    request.has_seed = arguments.seed is not None
    text = _prompt(arguments)
    if arguments.chat:
        request.chat.messages.add(role="user", content=text)
    else:
        request.text = text
    return request


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt is not None:
        return str(arguments.prompt)
    try:
        if arguments.prompt_file is not None:
            return str(arguments.prompt_file.read_text(encoding="utf-8"))
        if sys.stdin.isatty():
            raise InvalidRequest("no prompt: give --prompt TEXT, --prompt-file FILE, or pipe one in.")
        return sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the prompt: {error}") from error
