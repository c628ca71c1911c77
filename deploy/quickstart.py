"""The main job on one machine: start router, prefill group and decode node; send one long prompt; stop everything.

Called by quickstart.sh. Prints what it starts, a progress bar over the prompt's chunks, the answer as it streams,
and the time to first token in its parts.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import math
import os
import signal
import socket
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from headwater.client import Client
from headwater.cluster import load_cluster
from headwater.errors import HeadwaterError, InvalidRequest
from headwater.v1 import router_pb2
from router.check import check_cluster
from router.generate import run_generate
from router.supervisor import Supervisor

# About 5,000 tokens of source code.
_DEMO_CHARACTERS = 20_000
_DEMO_QUESTION = "\n\nIn one sentence: what is the Python module above for?"
_START_SECONDS = 600


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bash deploy/quickstart.sh", description=__doc__)
    parser.add_argument("--model", required=True, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pp", type=int, default=2, metavar="N", help="pipeline stages (2)")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor ranks of each stage (1)")
    parser.add_argument("--chunk", type=int, default=512, metavar="N", help="tokens of a chunk (512)")
    parser.add_argument(
        "--prompt-file", type=Path, metavar="F", help="a text to send (default: Python's inspect module)"
    )
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="longest answer (64)")
    parser.add_argument("--keep", action="store_true", help="leave everything serving until Ctrl-C")
    return parser.parse_args()


def write_cluster(path: Path, arguments: argparse.Namespace) -> None:
    """The cluster file of this run, on ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        router, prefill, decode = (f"127.0.0.1:{one.getsockname()[1]}" for one in sockets)
    available = sorted(os.sched_getaffinity(0))
    ranks = arguments.pp * arguments.tp
    # One rank a core, where there are enough; ranks that share a core are better placed by the kernel.
    cores = available[:ranks] if 0 < ranks <= len(available) else []
    page_size = math.gcd(arguments.chunk, 64)
    path.write_text(
        f'[model]\npath = "{arguments.model}"\n\n[router]\naddress = "{router}"\n\n'
        f'[[prefill]]\nname = "prefill-0"\naddress = "{prefill}"\npp = {arguments.pp}\ntp = {arguments.tp}\n'
        f"chunk_tokens = {arguments.chunk}\npage_size = {page_size}\npool_tokens = 16384\ncores = {cores}\n\n"
        f'[[decode]]\nname = "decode-0"\naddress = "{decode}"\ncapacity_tokens = 16384\n',
        encoding="utf-8",
    )


def prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt_file is None:
        source = Path(inspect.__file__).read_text(encoding="utf-8")
        return source[:_DEMO_CHARACTERS] + _DEMO_QUESTION
    try:
        return str(arguments.prompt_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the prompt from {arguments.prompt_file}: {error}.") from error


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - a command's output


def run(arguments: argparse.Namespace, folder: Path) -> None:
    text = prompt(arguments)
    path = folder / "cluster.toml"
    write_cluster(path, arguments)
    cluster = load_cluster(path)
    problems = check_cluster(cluster).problems
    if problems:
        raise InvalidRequest("; ".join(problems))
    with Supervisor.of_cluster(path, folder) as supervisor:
        say(f"starting a router, a prefill group (PP{arguments.pp} TP{arguments.tp}) and a decode node")
        supervisor.wait_ready(_START_SECONDS)
        for process in supervisor.placed:
            say(f"  {process.name:<10} {process.address}  process {supervisor.children[process.name].pid}")
        with Client(cluster.router.address) as client:
            say(f"  page       http://{client.status().page_address}/")
        request = router_pb2.GenerateRequest(max_tokens=arguments.max_tokens)
        request.chat.messages.add(role="user", content=text)
        asyncio.run(run_generate(cluster.router.address, request, as_json=False, progress=True))
        if arguments.keep:
            say(f"serving; try: .venv/bin/headwater generate --router {cluster.router.address} --chat --prompt 'Hello'")
            say(f"cluster file and logs: {folder}; Ctrl-C stops everything")
            asyncio.run(_until_one_ends(supervisor))
        say("stopping everything")


async def _until_one_ends(supervisor: Supervisor) -> None:
    child = await supervisor.first_exit()
    raise HeadwaterError(await asyncio.to_thread(child.describe_exit))


def main() -> int:
    arguments = parse()
    # As Ctrl-C: through the context managers, which stop the children.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with tempfile.TemporaryDirectory(prefix="headwater-") as folder:
            run(arguments, Path(folder))
    except HeadwaterError as error:
        say(f"quickstart: error: {error}")
        return 1
    except KeyboardInterrupt:
        say("quickstart: interrupted; everything has been stopped")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
