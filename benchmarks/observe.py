"""What watching costs, and whether the parts of TTFT add up to what a client measures.

    python -m benchmarks.observe [--tokens 2048] [--chunk 256] [--pairs 60] [--json FILE]

One cluster (router, PP2 pinned to two cores, decode node), because two equal ones differ by more than what is measured
here. Requests with the same prompt take turns: one is watched, which means that every process's metrics are read as
often as `headwater up --observe` does, the router's page is open, and its spans are recorded and exported; of the other
nothing is read, and its trace is not sampled. The order within a round alternates.

watching_share: what watching takes of the two cores' time. Threads that compute are left out; of all others, and of
    this program, which reads metrics, page and spans, the processor time of a watched request less that of an unwatched
    one. Log lines cannot be switched while a process runs, so all requests write them, and they are counted: lines of
    the rank that writes most, times what a line takes. All of it is on the ranks' own cores here. A stage that is held
    up holds up the others, so tokens/s can lose more than this.
observed_over_plain: tokens/s. The geometric mean of two rounds with opposite orders, and the median of such pairs, with
    the 95 % interval of that median (by the sign test, so nothing is assumed of how runs differ). Where equal runs
    differ by several percent, as on shared machines, it takes some 60 pairs to show one: half an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import math
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from rich.console import Console

from benchmarks.report import print_figures, processor_seconds, write_json
from benchmarks.ttft import cluster_file, prompt
from headwater import tracing
from headwater.client import AsyncClient, prompt_request
from headwater.cluster import load_cluster
from headwater.v1 import router_pb2
from router.supervisor import Supervisor
from tests.collector import collector
from tests.harness import model_folder

_START_SECONDS = 300
# Of the PP2 group.
_CORES = 2
# As `headwater up --observe` does.
_SCRAPE_SECONDS = 5.0
_TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT"


@dataclasses.dataclass(frozen=True)
class Run:
    """One request, as its client saw it: seconds to the first token, and what the router says of them."""

    seconds: float
    ttft: router_pb2.TtftParts
    # Processor time of everything that does not compute.
    beside: float


def beside_seconds(processes: list[psutil.Process]) -> float:
    """Processor time so far of this process and of `processes`, but for the ranks' compute threads. Threads that have
    ended count: a process answers each reader of its metrics in one of its own.
    """
    seconds = 0.0
    for process in [psutil.Process(), *processes]:
        seconds += processor_seconds(process)
        if "prefill_node.worker" in process.cmdline():
            computing = Path(f"/proc/{process.pid}/task/{process.pid}/schedstat").read_text(encoding="ascii")
            seconds -= int(computing.split()[0]) / 1e9
    return seconds


async def ask(router: str, token_ids: list[int], processes: list[psutil.Process], *, sampled: bool) -> Run:
    """One request of two tokens, so that its KV moves."""
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    parent = NonRecordingSpan(
        SpanContext(secrets.randbits(128), secrets.randbits(64), is_remote=False, trace_flags=flags)
    )
    before, started = beside_seconds(processes), time.perf_counter()
    seconds = 0.0
    with tracing.within(tracing.context_of(parent)):
        async with AsyncClient(router) as client:
            async for event in client.generate(prompt_request(token_ids, 2, ignore_eos=True)):
                if event.HasField("token") and not seconds:
                    seconds = time.perf_counter() - started
    return Run(seconds, event.finished.ttft, beside_seconds(processes) - before)


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
    # A request may last no longer than this: each would begin with a reading.
    await asyncio.sleep(random.uniform(0, _SCRAPE_SECONDS))
    while True:
        for target in targets:
            async with session.get(f"http://{target}/metrics") as answer:
                await answer.read()
        await asyncio.sleep(_SCRAPE_SECONDS)


async def _look(session: aiohttp.ClientSession, page: str) -> None:
    async with session.get(f"{page}/api/events", timeout=aiohttp.ClientTimeout(total=None)) as events:
        async for _ in events.content:
            pass


async def measure(
    router: str, token_ids: list[int], processes: list[psutil.Process], runs: int, console: Console
) -> list[dict[str, Run]]:
    """Watched and unwatched requests, round by round."""
    # Short, so that page tables, connections and allocators are warm.
    await ask(router, token_ids[: len(token_ids) // 8], processes, sampled=True)
    rounds = []
    for number in range(runs):
        seen: dict[str, Run] = {}
        for name in ("plain", "observed") if number % 2 else ("observed", "plain"):
            if name == "plain":
                seen[name] = await ask(router, token_ids, processes, sampled=False)
            else:
                async with watched(router):
                    seen[name] = await ask(router, token_ids, processes, sampled=True)
        rounds.append(seen)
        said = (f"{key} {run.seconds:.2f} s, {run.beside:.2f} s beside" for key, run in seen.items())
        console.print(f"round {number + 1}/{runs}: " + "; ".join(said))
    return rounds


def seconds_of_a_line() -> float:
    """What it takes to log an event to a file."""
    code = (
        "import time; from headwater.lifecycle import Event, configure_logging, get_logger; "
        "configure_logging('pp2', 'info', 0); log, began = get_logger('x'), time.perf_counter(); "
        "[log.event(Event.CHUNK_WRITTEN, request='r' * 32, transfer='t' * 32, tokens=[0, 512]) for _ in range(5000)]; "
        "print((time.perf_counter() - began) / 5000)"
    )
    with tempfile.TemporaryFile() as lines:
        return float(subprocess.run([sys.executable, "-c", code], stdout=-1, stderr=lines, check=True).stdout)


def lines_of_a_rank(log: Path, num_requests: int) -> float:
    """Of the rank that writes most, for a request."""
    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    counts = collections.Counter(entry["rank"] for entry in entries if "rank" in entry and "request" in entry)
    return max(counts.values()) / num_requests


def summary(rounds: list[dict[str, Run]], num_tokens: int, log_seconds: float) -> dict[str, float]:
    """The published keys.

    Args:
        log_seconds: that the rank which logs most spends on its lines of one request.
    """
    every = [run for seen in rounds for run in seen.values()]
    speeds = {
        name: num_tokens / statistics.median(seen[name].seconds for seen in rounds) for name in ("plain", "observed")
    }
    ratios = [seen["plain"].seconds / seen["observed"].seconds for seen in rounds]
    seconds = statistics.median(run.seconds for run in every)
    watching = statistics.median(seen["observed"].beside - seen["plain"].beside for seen in rounds)
    pairs = sorted(math.sqrt(one * other) for one, other in zip(ratios[::2], ratios[1::2], strict=True))
    # No more values than these are on the one side of the true median in 2.5 % of samples.
    outside = max(0, math.floor((len(pairs) - 1.96 * math.sqrt(len(pairs))) / 2) - 1)
    return {
        "plain_tokens_per_s": round(speeds["plain"], 1),
        "observed_tokens_per_s": round(speeds["observed"], 1),
        "watching_share": round(watching / seconds / _CORES + log_seconds / seconds, 5),
        "watching_share_of_logs": round(log_seconds / seconds, 5),
        "observed_over_plain": round(statistics.median(pairs), 4),
        "observed_over_plain_low": round(pairs[outside], 4),
        "observed_over_plain_high": round(pairs[-1 - outside], 4),
        "ttft_parts_over_client_median": round(statistics.median(run.ttft.total / run.seconds for run in every), 4),
        "ttft_parts_over_client_worst": round(
            min((run.ttft.total / run.seconds for run in every), key=lambda ratio: -abs(1 - ratio)), 4
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observe", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    console = Console()
    model = model_folder()
    token_ids = prompt(model, arguments.tokens)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        traces = stack.enter_context(collector())
        os.environ[_TRACES] = traces.endpoint
        path = cluster_file(folder, model, arguments.tokens, arguments.chunk, level="info", groups=("pp2",))
        supervisor = stack.enter_context(Supervisor.of_cluster(path, folder))
        supervisor.wait_ready(_START_SECONDS)
        processes = psutil.Process().children(recursive=True)
        router = load_cluster(path).router.address
        rounds = asyncio.run(measure(router, token_ids, processes, 2 * arguments.pairs, console))
        log_seconds = lines_of_a_rank(folder / "pp2.log", 4 * arguments.pairs + 1) * seconds_of_a_line()
    numbers = summary(rounds, arguments.tokens, log_seconds) | {"spans": len(traces.spans)}
    print_figures(
        f"Watching, {arguments.tokens} tokens in chunks of {arguments.chunk}, {2 * arguments.pairs} rounds",
        numbers,
        {"observed_over_plain": "≥ 0.99", "ttft_parts_over_client_worst": "0.98 to 1.02"},
    )
    if arguments.json:
        settings = {"tokens": arguments.tokens, "chunk_tokens": arguments.chunk, "rounds": 2 * arguments.pairs}
        seconds = {name: [seen[name].seconds for seen in rounds] for name in ("plain", "observed")}
        write_json(arguments.json, {**numbers, **settings, "seconds": seconds})


if __name__ == "__main__":
    main()
