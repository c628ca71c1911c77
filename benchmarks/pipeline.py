"""The pipeline: real stages against the ideal, emulated ones against what was published, a million tokens simulated.

    python -m benchmarks.pipeline [--only real|emulated|simulated|control ...] [--runs 5] [--scale 0.1] [--json FILE]

real: SmolLM2-135M, one core a stage; PP1 and PP2 take turns, and so do one and two PP1 groups side by side, which shows
    what two busy cores lose to each other without any pipeline. TTFT by the client; policy "optimal".
emulated: stages that wait as long as the fitted profile of H20 + Qwen3-235B-A22B-FP8 says, times --scale; leader,
    workers and activations are real. 128K tokens, TTFT alone and throughput of 16 requests, at PP1, PP4 and PP8, for
    each policy.
simulated: 2²⁰ tokens at PP8·TP4 in the simulator, as published and with "optimal".
control: PP8·TP4 emulated: how long after its input is there a stage begins, and what the leader costs: idle, and a
    step, from which 50 steps/s follow.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import tokenizers
from rich.console import Console
from rich.table import Table

from benchmarks.report import write_json
from headwater.cluster import load_cluster
from headwater.lifecycle import Event
from headwater.rpc import open_channel
from headwater.tokens import pack
from headwater.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from prefill_node.chunking.policies import make_policy
from prefill_node.profiles import PROFILES
from prefill_node.scheduler import Limits
from prefill_node.simulator import Arrival, Hardware, simulate
from router.supervisor import Supervisor
from tests import tiny_models
from tests.harness import free_ports, model_folder

PROFILE = "h20-qwen3-235b-a22b-fp8-tp4"
TOKENS = 131_072
NUM_REQUESTS = 16
# (policy, chunk_tokens, smoothing): the best of the published fixed sizes, the published dynamic setting, ours.
POLICIES = {"fixed": (6144, 0.75), "dynamic": (18_432, 0.8), "optimal": (18_432, 0.75)}
_START_SECONDS, _IDLE_SECONDS = 600, 20
# Of control. 32 ranks are 2 ms of processor time each for every step: a scale that keeps two cores from being what the
# stages wait for, and is still five times as fast as what is emulated.
_CONTROL_REQUESTS, _CONTROL_SCALE = 10, 0.2


async def ttft(address: str, token_ids: list[int], request_id: str = "") -> float:
    """Seconds from asking to the first token, without a transfer."""
    request = prefill_pb2.PrefillRequest(
        request_id=request_id or uuid.uuid4().hex, tokens=pack(token_ids), sampling=common_pb2.SamplingParams()
    )
    started = time.perf_counter()
    seconds = 0.0
    async with open_channel(address) as channel:
        async for event in prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(request):
            if event.HasField("first_token"):
                seconds = time.perf_counter() - started
    return seconds


async def trace(address: str, request_id: str) -> prefill_pb2.TracePrefillResponse:
    async with open_channel(address) as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        return await stub.TracePrefill(prefill_pb2.TracePrefillRequest(request_id=request_id))


def bubble(response: prefill_pb2.TracePrefillResponse) -> float:
    """Share of stage time without work, from the first stage's first start to the last stage's last end."""
    whole = max(span.end for span in response.stages) - min(span.start for span in response.stages)
    busy = sum({(span.stage, span.sequence): span.end - span.start for span in response.stages}.values())
    return 1 - busy / (whole * response.num_stages)


# --- real


def real_cluster(folder: Path, model: Path, num_tokens: int) -> Path:
    ports = free_ports(4)
    pool = -(-num_tokens // 64) * 64
    # Each run asks for the same prompt.
    common = f'chunk_policy = "optimal"\nchunk_tokens = 1024\npool_tokens = {pool}\nprefix_cache = false\n'
    groups = {"pp1": (1, [0]), "pp1b": (1, [1]), "pp2": (2, [0, 1])}
    path = folder / "cluster.toml"
    path.write_text(
        f'log_level = "warning"\n[model]\npath = "{model}"\nmax_context_tokens = {max(8192, 2 * num_tokens)}\n'
        f'[router]\naddress = "127.0.0.1:{ports[0]}"\n'
        + "".join(
            f'[[prefill]]\nname = "{name}"\naddress = "127.0.0.1:{port}"\npp = {pp}\ncores = {cores}\n{common}'
            for (name, (pp, cores)), port in zip(groups.items(), ports[1:], strict=True)
        ),
        encoding="utf-8",
    )
    return path


async def measure_real(addresses: dict[str, str], token_ids: list[int], runs: int, console: Console) -> dict[str, Any]:
    pp1, both, pp2, bubbles, ideals = [], [], [], [], []
    for _ in range(runs):
        pp1.append(await ttft(addresses["pp1"], token_ids))
        request_id = uuid.uuid4().hex
        pp2.append(await ttft(addresses["pp2"], token_ids, request_id))
        response = await trace(addresses["pp2"], request_id)
        bubbles.append(bubble(response))
        num_chunks = len({span.sequence for span in response.stages})
        ideals.append(1 / (1 + num_chunks))
        both.append(max(await asyncio.gather(ttft(addresses["pp1"], token_ids), ttft(addresses["pp1b"], token_ids))))
        console.print(f"PP1 {pp1[-1]:.2f} s, PP2 {pp2[-1]:.2f} s, two PP1 at once {both[-1]:.2f} s")
    return {
        "pp2_over_pp1": round(statistics.median(a / b for a, b in zip(pp1, pp2, strict=True)), 3),
        # What two busy cores lose to each other, with no pipeline between them.
        "slower_cores": round(statistics.median(b / a for a, b in zip(pp1, both, strict=True)), 3),
        "bubble": round(statistics.median(bubbles), 4),
        "ideal_bubble": round(statistics.median(ideals), 4),
        "seconds": {"pp1": pp1, "pp2": pp2, "two_pp1": both},
    }


def real(runs: int, sizes: list[int], console: Console) -> dict[str, Any]:
    model = model_folder()
    text = "".join(
        path.read_text(encoding="utf-8") for path in sorted(Path(argparse.__file__).parent.glob("[a-d]*.py"))
    )
    ids = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    numbers: dict[str, Any] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            path = real_cluster(Path(folder), model, size)
            cluster = load_cluster(path)
            with Supervisor.of_cluster(path, Path(folder)) as supervisor:
                supervisor.wait_ready(_START_SECONDS)
                addresses = {group.name: group.address for group in cluster.prefill}
                found = asyncio.run(measure_real(addresses, ids[:size], runs, console))
        numbers[f"pp2_over_pp1_{size // 1024}k"] = found.pop("pp2_over_pp1")
        numbers[f"real_{size // 1024}k"] = found
    return numbers


# --- emulated


def emulated_cluster(folder: Path, pp: int, tp: int, scale: float, policy: str) -> Path:
    model = tiny_models.make("llama", folder / "model", num_hidden_layers=8, num_key_value_heads=4)
    chunk_tokens, smoothing = POLICIES[policy]
    path = folder / "cluster.toml"
    path.write_text(
        f'log_level = "warning"\n[model]\npath = "{model}"\nmax_context_tokens = {2 * TOKENS}\ndtype = "float32"\n'
        f'[router]\naddress = "127.0.0.1:{free_ports(1)[0]}"\n'
        f'[[prefill]]\nname = "p"\naddress = "127.0.0.1:{free_ports(1)[0]}"\npp = {pp}\ntp = {tp}\n'
        f'device = "emulated"\nemulated_profile = "{PROFILE}"\nemulated_time_scale = {scale}\n'
        f'chunk_policy = "{policy}"\nchunk_tokens = {chunk_tokens}\nchunk_smoothing = {smoothing}\n'
        f"pool_tokens = {(NUM_REQUESTS + 1) * TOKENS}\nmax_running_requests = {NUM_REQUESTS + 1}\n"
        "prefix_cache = false\n",
        encoding="utf-8",
    )
    return path


async def measure_emulated(address: str) -> tuple[float, float]:
    """Seconds of one request alone, and of 16 that are asked at once."""
    token_ids = [2] * TOKENS
    await ttft(address, token_ids[:1000])
    alone = await ttft(address, token_ids)
    started = time.perf_counter()
    await asyncio.gather(*(ttft(address, token_ids) for _ in range(NUM_REQUESTS)))
    return alone, time.perf_counter() - started


def emulated(scale: float, console: Console) -> dict[str, Any]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for pp, policies in ((1, ["optimal"]), (4, list(POLICIES)), (8, list(POLICIES))):
        for policy in policies:
            with tempfile.TemporaryDirectory() as folder:
                path = emulated_cluster(Path(folder), pp, 1, scale, policy)
                with Supervisor.of_cluster(path, Path(folder)) as supervisor:
                    supervisor.wait_ready(_START_SECONDS)
                    alone, sixteen = asyncio.run(measure_emulated(load_cluster(path).prefill[0].address))
            found.setdefault(f"pp{pp}", {})[policy] = {
                "ttft_s": round(alone / scale, 3),
                "tokens_per_s": round(NUM_REQUESTS * TOKENS / sixteen * scale, 1),
            }
            console.print(f"PP{pp} {policy}: {found[f'pp{pp}'][policy]}")
    base = found["pp1"]["optimal"]["tokens_per_s"]
    numbers: dict[str, Any] = {"emulated": found}
    for pp in (4, 8):
        best = max(one["tokens_per_s"] for one in found[f"pp{pp}"].values())
        numbers[f"emulated_efficiency_pp{pp}"] = round(best / base / pp, 4)
    for policy in POLICIES:
        numbers[f"ttft_{policy}_pp8_s"] = found["pp8"][policy]["ttft_s"]
        numbers[f"ttft_{policy}_pp4_s"] = found["pp4"][policy]["ttft_s"]
    return numbers


# --- simulated


def simulated() -> dict[str, Any]:
    cost = PROFILES[PROFILE].cost(8)
    numbers = {}
    # The published loop has one step a stage in flight.
    for key, policy, look_ahead in (("simulated_1m_s", "dynamic", 0), ("simulated_1m_optimal_s", "optimal", 1)):
        chunk_tokens, smoothing = POLICIES[policy]
        result = simulate(
            [Arrival("r", 0.0, 2**20)],
            Hardware(cost),
            cuts=make_policy(policy, lambda: cost, chunk_tokens=chunk_tokens, page_size=64, smoothing=smoothing),  # type: ignore[arg-type]
            limits=Limits(chunk_tokens, look_ahead, 1, 1, 1e9),
            num_pages=2**20 // 64,
            page_size=64,
        )
        numbers[key] = round(result.outcomes[0].ttft, 2)
    return numbers


# --- control


def stage_starts(log: str, tp: int) -> list[float]:
    """Seconds from when a rank had both its input and nothing else to do until it began to compute, of every step but a
    request's first. From the ranks' own log lines; they all read one machine's clock.
    """
    spans: dict[str, dict[tuple[int, int], dict[str, float]]] = {}
    for line in log.splitlines():
        if not line.startswith("{"):
            # Of a library.
            continue
        entry = json.loads(line)
        if entry["message"] in (Event.CHUNK_STARTED.value, Event.CHUNK_FINISHED.value):
            chunk = spans.setdefault(entry["request"], {}).setdefault((entry["tokens"][0], entry["rank"]), {})
            chunk[entry["message"]] = entry["monotonic"]
    late = []
    for chunks in spans.values():
        starts = sorted({start for start, _ in chunks})
        for before, start in itertools.pairwise(starts):
            for rank in {rank for _, rank in chunks}:
                inputs = [chunks[before, rank]] + ([chunks[start, rank - tp]] if rank >= tp else [])
                ready = max(chunk[Event.CHUNK_FINISHED.value] for chunk in inputs)
                late.append(max(0.0, chunks[start, rank][Event.CHUNK_STARTED.value] - ready))
    return sorted(late)


def control(console: Console) -> dict[str, Any]:
    """PP8·TP4, requests of 128K one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        path = emulated_cluster(Path(folder), 8, 4, _CONTROL_SCALE, "fixed")
        path.write_text(path.read_text(encoding="utf-8").replace('"warning"', '"info"'), encoding="utf-8")
        with Supervisor.of_cluster(path, Path(folder)) as supervisor:
            supervisor.wait_ready(_START_SECONDS)
            leader = psutil.Process(supervisor.children["p"].pid)
            address = load_cluster(path).prefill[0].address
            asyncio.run(ttft(address, [2] * 20_000))
            before = sum(leader.cpu_times()[:2])
            time.sleep(_IDLE_SECONDS)
            idle = (sum(leader.cpu_times()[:2]) - before) / _IDLE_SECONDS
            before, started = sum(leader.cpu_times()[:2]), time.perf_counter()
            for _ in range(_CONTROL_REQUESTS):
                asyncio.run(ttft(address, [2] * TOKENS))
            cpu, wall = sum(leader.cpu_times()[:2]) - before, time.perf_counter() - started
        late = stage_starts((Path(folder) / "p.log").read_text(encoding="utf-8"), 4)
    steps = _CONTROL_REQUESTS * -(-TOKENS // POLICIES["fixed"][0])
    console.print(f"{steps} steps in {wall:.1f} s, {len(late)} stage starts")
    return {
        "control_p50_ms": round(late[len(late) // 2] * 1e3, 3),
        "control_p99_ms": round(late[len(late) * 99 // 100] * 1e3, 3),
        "control_steps_per_s": round(steps / wall, 1),
        "leader_cpu_share_idle": round(idle, 4),
        "leader_cpu_share": round(cpu / wall, 4),
        "leader_cpu_share_at_50_steps_per_s": round(idle + (cpu - idle * wall) / steps * 50, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=["real", "emulated", "simulated", "control"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 16_384], help="of real")
    parser.add_argument("--scale", type=float, default=0.1, help="of emulated time")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    console = Console()
    wanted = arguments.only or ["real", "emulated", "simulated", "control"]
    numbers: dict[str, Any] = {}
    if "simulated" in wanted:
        numbers |= simulated()
    if "control" in wanted:
        numbers |= control(console)
    if "emulated" in wanted:
        numbers |= emulated(arguments.scale, console)
    if "real" in wanted:
        numbers |= real(arguments.runs, arguments.tokens, console)
    bounds = {
        "pp2_over_pp1_8k": "≥ 1.75",
        "pp2_over_pp1_16k": "≥ 1.80",
        "emulated_efficiency_pp4": "≥ 0.90",
        "emulated_efficiency_pp8": "≥ 0.85",
        "simulated_1m_s": "420.91 ± 10 %",
        "control_p99_ms": "≤ 5",
        "leader_cpu_share_at_50_steps_per_s": "≤ 0.10",
    }
    table = Table("figure", "measured", "bound")
    for key, value in numbers.items():
        if not isinstance(value, dict):
            table.add_row(key, f"{value:g}", bounds.get(key, ""))
    console.print(table)
    if arguments.json:
        write_json(arguments.json, numbers | {"scale": arguments.scale, "runs": arguments.runs})


if __name__ == "__main__":
    main()
