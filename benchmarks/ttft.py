"""Time to first token: PP1 on one core against PP2 on two, and PP2 with and without streaming its KV.

    python -m benchmarks.ttft [--tokens 8192] [--chunk 512] [--runs 5] [--json FILE]

All groups run at once, pinned, one core a stage, and take turns (PP1, PP2, PP2 without a transfer, PP1, …), so
that the machine's drift hits all alike; ratios are taken within a round and their median is quoted. TTFT is
measured by the client, from its call to the first token. With a transfer, a decode node on the same two cores
takes delivery meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
import uuid
from pathlib import Path

import grpc.aio
import psutil
import tokenizers
from rich.console import Console

from benchmarks.report import print_figures, write_json
from headwater.cluster import Cluster, load_cluster
from headwater.rpc import open_channel
from headwater.tokens import pack
from headwater.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from router.supervisor import Supervisor
from tests.harness import free_ports, model_folder

_START_SECONDS = 300


def cluster_file(
    folder: Path,
    model: Path,
    num_tokens: int,
    chunk_tokens: int,
    *,
    level: str = "warning",
    groups: tuple[str, ...] = ("pp1", "pp2"),
) -> Path:
    """A router, groups PP1 and PP2 (or one of them) and a decode node on this machine."""
    ports = free_ports(4)
    pool = -(-num_tokens // 64) * 64
    group = f"chunk_tokens = {chunk_tokens}\npool_tokens = {pool}\nprefix_cache = false"
    layouts = {"pp1": "pp = 1\ncores = [0]", "pp2": "pp = 2\ncores = [0, 1]"}
    path = folder / "cluster.toml"
    path.write_text(
        f'log_level = "{level}"\n'
        f'[model]\npath = "{model}"\nmax_context_tokens = {max(8192, 2 * num_tokens)}\n'
        f'[router]\naddress = "127.0.0.1:{ports[0]}"\n'
        + "".join(
            f'[[prefill]]\nname = "{name}"\naddress = "127.0.0.1:{port}"\n{layouts[name]}\n{group}\n'
            for name, port in zip(groups, ports[2:], strict=False)
        )
        + f'[[decode]]\nname = "d0"\naddress = "127.0.0.1:{ports[1]}"\ncapacity_tokens = {2 * pool}\n',
        encoding="utf-8",
    )
    return path


def prompt(model: Path, num_tokens: int) -> list[int]:
    """Token ids of real text: sources of the standard library."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(argparse.__file__).parent.glob("a*.py")))
    return tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids[:num_tokens]


async def ttft(cluster: Cluster, name: str, token_ids: list[int], *, transfer: bool) -> float:
    """Seconds from asking group `name` to its first token."""
    request = prefill_pb2.PrefillRequest(
        request_id=uuid.uuid4().hex, tokens=pack(token_ids), sampling=common_pb2.SamplingParams()
    )
    async with (
        open_channel(cluster.prefill_named(name).address) as prefill_channel,
        open_channel(cluster.decode[0].address) as decode_channel,
    ):
        prefill = prefill_pb2_grpc.PrefillServiceStub(prefill_channel)
        described = await prefill.DescribePrefill(prefill_pb2.DescribePrefillRequest())
        landing = None
        if transfer:
            landing = decode_pb2_grpc.DecodeServiceStub(decode_channel).Decode(
                decode_pb2.DecodeRequest(
                    request_id=request.request_id,
                    transfer_id=request.request_id,
                    attempt=1,
                    num_prompt_tokens=len(token_ids),
                    stop=common_pb2.StopConditions(max_tokens=1),
                    source=described.geometry,
                )
            )
            request.grant.CopyFrom((await landing.read()).grant)
        started = time.perf_counter()
        seconds = 0.0
        async for event in prefill.Prefill(request):
            if event.HasField("first_token"):
                seconds = time.perf_counter() - started
        if landing is not None:
            committed = await landing.read()
            if committed is grpc.aio.EOF or not committed.HasField("committed"):
                raise RuntimeError(f"the decode node did not commit the KV: {await landing.details()}")
            await landing.read()
    return seconds


async def measure(cluster: Cluster, token_ids: list[int], runs: int, console: Console) -> dict[str, list[float]]:
    """Seconds of each run by configuration."""
    configurations = {"pp1": ("pp1", True), "pp2": ("pp2", True), "pp2_without_transfer": ("pp2", False)}
    # Short, so that page tables, connections and allocators are warm.
    for name, transfer in configurations.values():
        await ttft(cluster, name, token_ids[: len(token_ids) // 8], transfer=transfer)
    seconds: dict[str, list[float]] = {key: [] for key in configurations}
    for run in range(runs):
        for key, (name, transfer) in configurations.items():
            seconds[key].append(await ttft(cluster, name, token_ids, transfer=transfer))
        console.print(
            f"run {run + 1}/{runs}: " + ", ".join(f"{key} {times[-1]:.2f} s" for key, times in seconds.items())
        )
    return seconds


def summary(seconds: dict[str, list[float]], num_tokens: int, leader_rss_mb: float) -> dict[str, float]:
    """The published keys."""
    ratios = [one / two for one, two in zip(seconds["pp1"], seconds["pp2"], strict=True)]
    streaming = [
        with_ / without for with_, without in zip(seconds["pp2"], seconds["pp2_without_transfer"], strict=True)
    ]
    return {
        "pp1_tokens_per_s": round(num_tokens / statistics.median(seconds["pp1"]), 1),
        "pp2_tokens_per_s": round(num_tokens / statistics.median(seconds["pp2"]), 1),
        "pp2_over_pp1": round(statistics.median(ratios), 3),
        "streaming_over_none": round(statistics.median(streaming), 3),
        "leader_rss_mb": round(leader_rss_mb, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ttft", description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    console = Console()
    model = model_folder()
    token_ids = prompt(model, arguments.tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = cluster_file(Path(folder), model, arguments.tokens, arguments.chunk)
        with Supervisor.of_cluster(path, Path(folder)) as supervisor:
            supervisor.wait_ready(_START_SECONDS)
            seconds = asyncio.run(measure(load_cluster(path), token_ids, arguments.runs, console))
            leader_rss_mb = psutil.Process(supervisor.children["pp2"].pid).memory_info().rss / 1e6
    numbers = summary(seconds, arguments.tokens, leader_rss_mb)
    print_figures(
        f"TTFT, {arguments.tokens} tokens in chunks of {arguments.chunk}, median of {arguments.runs} rounds",
        numbers,
        {"pp2_over_pp1": "≥ 1.55", "streaming_over_none": "≤ 1.05", "leader_rss_mb": "≤ 150"},
    )
    if arguments.json:
        settings = {"tokens": arguments.tokens, "chunk_tokens": arguments.chunk, "runs": arguments.runs}
        write_json(arguments.json, {**numbers, **settings, "seconds": seconds})


if __name__ == "__main__":
    main()
