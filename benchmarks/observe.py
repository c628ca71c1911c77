"""What watching costs, and whether the parts of TTFT add up to what a client measures.

    python -m benchmarks.observe [--tokens 4096] [--chunk 512] [--pairs 3] [--json FILE]

Two equal clusters (router, PP2 pinned to two cores, decode node) take turns with the same prompt. One writes warnings
only. The other has everything on: a log line for each lifecycle event, every process's metrics read once a second as
Prometheus would, the router's page open, and every span exported to a collector. The order within a round alternates; a
ratio is the geometric mean of two rounds with opposite orders, and the median of all such pairs is quoted. What reads
metrics, page and spans is this program, on the same cores as the ranks, so its own share is in the figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import math
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.report import write_json
from benchmarks.ttft import cluster_file, prompt
from headwater.client import AsyncClient, prompt_request
from headwater.cluster import load_cluster
from headwater.v1 import router_pb2
from router.supervisor import Supervisor
from tests.collector import collector
from tests.harness import model_folder

_START_SECONDS = 300
_SCRAPE_SECONDS = 1.0
_TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT"


@dataclasses.dataclass(frozen=True)
class Run:
    """One request, as its client saw it: seconds to the first token, and what the router says of them."""

    seconds: float
    ttft: router_pb2.TtftParts


async def ask(router: str, token_ids: list[int]) -> Run:
    """One request of two tokens, so that its KV moves."""
    started = time.perf_counter()
    seconds = 0.0
    async with AsyncClient(router) as client:
        async for event in client.generate(prompt_request(token_ids, 2, ignore_eos=True)):
            if event.HasField("token") and not seconds:
                seconds = time.perf_counter() - started
    return Run(seconds, event.finished.ttft)


@contextlib.asynccontextmanager
async def watched(router: str) -> AsyncIterator[None]:
    """The page is open and metrics are read while the context lasts."""
    async with AsyncClient(router) as client:
        page = f"http://{(await client.status()).page_address}"
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as watching:
        async with session.get(f"{page}/sd") as listed:
            targets = [target for entry in await listed.json() for target in entry["targets"]]
        tasks = [watching.create_task(_scrape(session, targets)), watching.create_task(_look(session, page))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _scrape(session: aiohttp.ClientSession, targets: list[str]) -> None:
    while True:
        for target in targets:
            async with session.get(f"http://{target}/metrics") as answer:
                await answer.read()
        await asyncio.sleep(_SCRAPE_SECONDS)


async def _look(session: aiohttp.ClientSession, page: str) -> None:
    async with session.get(f"{page}/api/events", timeout=aiohttp.ClientTimeout(total=None)) as events:
        async for _ in events.content:
            pass


async def measure(plain: str, observed: str, token_ids: list[int], runs: int, console: Console) -> list[dict[str, Run]]:
    """Both clusters' runs, round by round."""
    # Short, so that page tables, connections and allocators are warm.
    for router in (plain, observed):
        await ask(router, token_ids[: len(token_ids) // 8])
    rounds = []
    for number in range(runs):
        seen: dict[str, Run] = {}
        for name in ("plain", "observed") if number % 2 else ("observed", "plain"):
            if name == "plain":
                seen[name] = await ask(plain, token_ids)
            else:
                async with watched(observed):
                    seen[name] = await ask(observed, token_ids)
        rounds.append(seen)
        console.print(f"round {number + 1}/{runs}: " + ", ".join(f"{key} {seen[key].seconds:.2f} s" for key in seen))
    return rounds


def summary(rounds: list[dict[str, Run]], num_tokens: int) -> dict[str, float]:
    """The published keys."""
    every = [run for seen in rounds for run in seen.values()]
    speeds = {
        name: num_tokens / statistics.median(seen[name].seconds for seen in rounds) for name in ("plain", "observed")
    }
    ratios = [seen["plain"].seconds / seen["observed"].seconds for seen in rounds]
    pairs = [math.sqrt(one * other) for one, other in zip(ratios[::2], ratios[1::2], strict=True)]
    return {
        "plain_tokens_per_s": round(speeds["plain"], 1),
        "observed_tokens_per_s": round(speeds["observed"], 1),
        "observed_over_plain": round(statistics.median(pairs), 4),
        "ttft_parts_over_client_median": round(statistics.median(run.ttft.total / run.seconds for run in every), 4),
        "ttft_parts_over_client_worst": round(
            min((run.ttft.total / run.seconds for run in every), key=lambda ratio: -abs(1 - ratio)), 4
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observe", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    console = Console()
    model = model_folder()
    token_ids = prompt(model, arguments.tokens)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        traces = stack.enter_context(collector())
        routers = {}
        for name, level in (("plain", "warning"), ("observed", "info")):
            (folder / name).mkdir()
            path = cluster_file(folder / name, model, arguments.tokens, arguments.chunk, level=level, groups=("pp2",))
            if name == "observed":
                os.environ[_TRACES] = traces.endpoint
            supervisor = stack.enter_context(Supervisor.of_cluster(path, folder / name))
            supervisor.wait_ready(_START_SECONDS)
            os.environ.pop(_TRACES, None)
            routers[name] = load_cluster(path).router.address
        rounds = asyncio.run(measure(routers["plain"], routers["observed"], token_ids, 2 * arguments.pairs, console))
    numbers = summary(rounds, arguments.tokens) | {"spans": len(traces.spans)}
    table = Table(
        title=f"Watching, {arguments.tokens} tokens in chunks of {arguments.chunk}, {2 * arguments.pairs} rounds"
    )
    table.add_column("figure")
    table.add_column("measured", justify="right")
    table.add_column("bound", justify="right")
    bounds = {"observed_over_plain": "≥ 0.99", "ttft_parts_over_client_worst": "0.98 to 1.02"}
    for key, value in numbers.items():
        table.add_row(key, f"{value:g}", bounds.get(key, ""))
    console.print(table)
    if arguments.json:
        settings = {"tokens": arguments.tokens, "chunk_tokens": arguments.chunk, "rounds": 2 * arguments.pairs}
        seconds = {name: [seen[name].seconds for seen in rounds] for name in ("plain", "observed")}
        write_json(arguments.json, {**numbers, **settings, "seconds": seconds})


if __name__ == "__main__":
    main()
