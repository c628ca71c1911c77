"""Groups whose stages wait as long as the fitted profile of H20 + Qwen3-235B-A22B-FP8 says. Part of
`benchmarks.pipeline`.

Leader, workers and activations are real. 128K tokens, TTFT alone and throughput of 16 requests, at PP1, PP4 and PP8,
for each policy. All groups run side by side: waiting takes no processor, and one after the other they would take an
hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from rich.console import Console

from headwater.cluster import load_cluster
from headwater.rpc import open_channel
from headwater.tokens import pack
from headwater.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from router.supervisor import Supervisor
from tests import tiny_models
from tests.harness import free_ports

PROFILE = "h20-qwen3-235b-a22b-fp8-tp4"
TOKENS = 131_072
# (policy, chunk_tokens, smoothing): the best of the published fixed sizes, the published dynamic setting, ours.
POLICIES = {"fixed": (6144, 0.75), "dynamic": (18_432, 0.8), "optimal": (18_432, 0.75)}
START_SECONDS = 600
_NUM_REQUESTS = 16


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


def emulated_cluster(folder: Path, pp: int, tp: int, policy: str, *, level: str = "warning", more: str = "") -> Path:
    """A file with one group.

    Args:
        more: further lines of the group's section.
    """
    # Small KV: what it says is not looked at, and 17 prompts of each group are in memory at once.
    model = tiny_models.make("llama", folder / "model", num_hidden_layers=8, num_key_value_heads=tp, head_dim=4)
    chunk_tokens, smoothing = POLICIES[policy]
    path = folder / "cluster.toml"
    path.write_text(
        f'log_level = "{level}"\n[model]\npath = "{model}"\nmax_context_tokens = {2 * TOKENS}\ndtype = "float32"\n'
        f'[router]\naddress = "127.0.0.1:{free_ports(1)[0]}"\n'
        f'[[prefill]]\nname = "p"\naddress = "127.0.0.1:{free_ports(1)[0]}"\npp = {pp}\ntp = {tp}\n'
        f'device = "emulated"\nemulated_profile = "{PROFILE}"\n'
        f'chunk_policy = "{policy}"\nchunk_tokens = {chunk_tokens}\nchunk_smoothing = {smoothing}\n'
        f"pool_tokens = {(_NUM_REQUESTS + 1) * TOKENS}\nmax_running_requests = {_NUM_REQUESTS + 1}\n"
        f"prefix_cache = false\n{more}",
        encoding="utf-8",
    )
    return path


async def measure_emulated(name: str, address: str, console: Console) -> dict[str, float]:
    """One request alone, and 16 that are asked at once."""
    token_ids = [2] * TOKENS
    await ttft(address, token_ids[:1000])
    alone = await ttft(address, token_ids)
    started = time.perf_counter()
    await asyncio.gather(*(ttft(address, token_ids) for _ in range(_NUM_REQUESTS)))
    sixteen = time.perf_counter() - started
    found = {"ttft_s": round(alone, 3), "tokens_per_s": round(_NUM_REQUESTS * TOKENS / sixteen, 1)}
    console.print(f"{name}: {found}")
    return found


def emulated(console: Console) -> dict[str, Any]:
    layouts = [(1, "optimal"), *((pp, policy) for pp in (4, 8) for policy in POLICIES)]
    addresses: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for pp, policy in layouts:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            path = emulated_cluster(folder, pp, 1, policy)
            stack.enter_context(Supervisor.of_cluster(path, folder)).wait_ready(START_SECONDS)
            addresses[f"pp{pp} {policy}"] = load_cluster(path).prefill[0].address

        async def measure() -> list[dict[str, float]]:
            return await asyncio.gather(*(measure_emulated(*group, console) for group in addresses.items()))

        found = dict(zip(addresses, asyncio.run(measure()), strict=True))
    numbers: dict[str, Any] = {"emulated": found}
    for pp in (4, 8):
        best = max(found[f"pp{pp} {policy}"]["tokens_per_s"] for policy in POLICIES)
        numbers[f"emulated_efficiency_pp{pp}"] = round(best / found["pp1 optimal"]["tokens_per_s"] / pp, 4)
        for policy in POLICIES:
            numbers[f"ttft_{policy}_pp{pp}_s"] = found[f"pp{pp} {policy}"]["ttft_s"]
    return numbers
