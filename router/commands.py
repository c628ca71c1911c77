"""The subcommands of this package: running, checking and asking a cluster. What each does: `headwater --help`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headwater import tracing
from headwater.client import Client, prompt_request
from headwater.cluster import Cluster, load_cluster
from headwater.errors import InvalidRequest
from headwater.exits import Exit
from headwater.lifecycle import configure_logging
from headwater.security import use
from headwater.v1 import router_pb2

if TYPE_CHECKING:
    # argparse has no public name for what add_subparsers returns.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_ROUTER = "127.0.0.1:7000"


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
    up.add_argument("--json", action="store_true", help="print what happens as JSON objects, one a line")
    up.add_argument("--observe", action="store_true", help="run a Prometheus as well, which watches the cluster")
    up.add_argument("--scrape-interval", type=float, default=5.0, metavar="SECONDS", help="of that Prometheus (5)")
    up.set_defaults(run=_up)

    check = subparsers.add_parser("check", help="say what a cluster file means and what is wrong with it")
    check.add_argument("cluster", type=Path, metavar="FILE", help="cluster file (TOML)")
    check.add_argument("--json", action="store_true", help="print one JSON object, problems included")
    check.set_defaults(run=_check)

    _add_generate(subparsers)
    _add_operations(subparsers)
    _add_files(subparsers)


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
    generate.add_argument("--priority", type=int, default=0, metavar="N", help="higher goes first; the default is 0")
    generate.add_argument("--progress", action="store_true", help="show progress even when this is no terminal")
    generate.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing before")
    generate.set_defaults(run=_generate)


def _add_operations(subparsers: Subparsers) -> None:
    status = subparsers.add_parser("status", help="show the router's groups")
    _add_router(status)
    status.add_argument("--json", action="store_true", help="print one JSON object, or with --watch one a line")
    status.add_argument(
        "--watch", type=float, nargs="?", const=1.0, metavar="SECONDS", help="again and again, every second"
    )
    status.set_defaults(run=_status)

    for name, draining, text in (
        ("drain", True, "let a group end what it has, and give it nothing new"),
        ("undrain", False, "give a group new requests again"),
    ):
        drain = subparsers.add_parser(name, help=text)
        drain.add_argument("group", metavar="GROUP", help="its name in the cluster file")
        _add_router(drain)
        drain.set_defaults(run=_drain, draining=draining)

    abort = subparsers.add_parser("abort", help="end a running request on all its groups")
    abort.add_argument("request", metavar="REQUEST", help="its id, as `generate` and the logs show it")
    _add_router(abort)
    abort.set_defaults(run=_abort)

    bench = subparsers.add_parser("bench", help="load a cluster, and say what its clients saw")
    _add_router(bench)
    bench.add_argument("--requests", type=int, default=32, metavar="N", help="requests in all (32)")
    bench.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="tokens of each prompt (512)")
    bench.add_argument("--max-tokens", type=int, default=16, metavar="N", help="tokens of each answer (16)")
    bench.add_argument("--concurrency", type=int, default=4, metavar="N", help="requests under way at most (4)")
    bench.add_argument("--rate", type=float, default=0.0, metavar="R", help="requests a second; default: as they go")
    bench.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts (0)")
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    bench.set_defaults(run=_bench)


def _add_files(subparsers: Subparsers) -> None:
    init = subparsers.add_parser("init", help="write a commented cluster file to begin with")
    init.add_argument("file", type=Path, metavar="FILE", help="where to; it must not exist")
    init.add_argument("--model", default="/models/MODEL", metavar="DIR", help="folder of the model")
    init.add_argument("--pp", type=int, default=2, metavar="N", help="stages of the prefill group (2)")
    init.add_argument("--tp", type=int, default=1, metavar="N", help="ranks of a stage (1)")
    init.set_defaults(run=_init)

    config = subparsers.add_parser("config", help="about cluster files")
    about = config.add_subparsers(required=True, metavar="COMMAND")
    schema = about.add_parser("schema", help="print their JSON Schema, for editors")
    schema.set_defaults(run=_schema)

    completion = subparsers.add_parser("completion", help="print completion for a shell")
    completion.add_argument("shell", choices=["bash", "zsh", "fish"])
    completion.set_defaults(run=_completion)


def _add_router(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--router", default=_ROUTER, metavar="HOST:PORT", help=f"the router's address ({_ROUTER})")


def _serve(arguments: argparse.Namespace) -> int:
    from router.server import serve  # noqa: PLC0415 - each command loads only what it needs

    cluster = load_cluster(arguments.cluster)
    use(cluster.security)
    configure_logging(cluster.router.name, cluster.log_level, form=cluster.log_format)
    with tracing.exporting("router", cluster.router.name):
        return asyncio.run(serve(cluster))


def _up(arguments: argparse.Namespace) -> int:
    from router.up import run_up  # noqa: PLC0415

    use(load_cluster(arguments.cluster).security)
    scrape_seconds = arguments.scrape_interval if arguments.observe else None
    return asyncio.run(run_up(arguments.cluster, arguments.log_dir, scrape_seconds, as_json=arguments.json))


def _check(arguments: argparse.Namespace) -> int:
    from router.check import check_cluster  # noqa: PLC0415
    from router.show import show_check  # noqa: PLC0415

    cluster = load_cluster(arguments.cluster)
    use(cluster.security)
    report = check_cluster(cluster)
    show_check(report, as_json=arguments.json)
    return Exit.LOCAL if report.problems else Exit.DONE


def _generate(arguments: argparse.Namespace) -> int:
    from router.generate import run_generate  # noqa: PLC0415

    progress = arguments.progress or (sys.stderr.isatty() and not arguments.json)
    request = _request(arguments)
    return asyncio.run(run_generate(arguments.router, request, as_json=arguments.json, progress=progress))


def _status(arguments: argparse.Namespace) -> int:
    from router.show import show_status, watch_status  # noqa: PLC0415

    with Client(arguments.router) as client:
        if arguments.watch is not None:
            watch_status(client.status, arguments.watch, as_json=arguments.json)
        show_status(client.status(), as_json=arguments.json)
    return 0


def _drain(arguments: argparse.Namespace) -> int:
    with Client(arguments.router) as client:
        client.drain(arguments.group, draining=arguments.draining)
    return 0


def _abort(arguments: argparse.Namespace) -> int:
    with Client(arguments.router) as client:
        client.cancel(arguments.request)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from router.bench import Load, run_bench  # noqa: PLC0415

    load = Load(
        arguments.requests,
        arguments.prompt_tokens,
        arguments.max_tokens,
        arguments.concurrency,
        arguments.rate,
        arguments.seed,
    )
    return asyncio.run(run_bench(arguments.router, load, as_json=arguments.json))


def _init(arguments: argparse.Namespace) -> int:
    from router.init import write_cluster_file  # noqa: PLC0415

    write_cluster_file(arguments.file, arguments.model, arguments.pp, arguments.tp)
    return 0


def _schema(_: argparse.Namespace) -> int:
    import msgspec  # noqa: PLC0415

    sys.stdout.write(json.dumps(msgspec.json.schema(Cluster), indent=2) + "\n")
    return 0


def _completion(arguments: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode  # noqa: PLC0415

    sys.stdout.write(shellcode(["headwater"], shell=arguments.shell) + "\n")
    return 0


def _request(arguments: argparse.Namespace) -> router_pb2.GenerateRequest:
    text = _prompt(arguments)
    try:
        return prompt_request(
            [("user", text)] if arguments.chat else text,
            arguments.max_tokens,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            seed=arguments.seed,
            stop=arguments.stop,
            priority=arguments.priority,
        )
    except ValueError as error:
        raise InvalidRequest(f"--max-tokens, --seed or --priority is out of range: {error}.") from error


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
