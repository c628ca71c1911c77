"""Groups larger than this machine: stages that wait instead of computing, and everything else for real."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import grpc
import torch

from headwater.cluster import Cluster
from headwater.tokens import pack
from headwater.v1 import prefill_pb2, prefill_pb2_grpc
from tests import tiny_models
from tests.e2e.landing import landed_kv
from tests.harness import GREEDY, Group, assert_balanced, prefill_stub, processes, write_cluster

CHUNK, PAGE, POOL = 2048, 64, 131_072
OPTIONS = (
    ("device", "emulated"),
    ("emulated_time_scale", 0.004),
    ("chunk_tokens", CHUNK),
    ("page_size", PAGE),
    ("pool_tokens", POOL),
    ("max_running_requests", 24),
    ("max_queued_requests", 1000),
)
NUM_REQUESTS = 500


async def one(
    stub: prefill_pb2_grpc.PrefillServiceAsyncStub, number: int, num_tokens: int, patience: float | None
) -> str:
    """How one request ended; one that has patience is cancelled when it is used up. No two begin alike."""
    tokens = pack([2 + number] * num_tokens)
    request = prefill_pb2.PrefillRequest(request_id=f"r{number}", tokens=tokens, sampling=GREEDY)
    call = stub.Prefill(request)
    chunks: list[int] = []
    tokens: list[int] = []

    async def read() -> str:
        async for event in call:
            if event.HasField("chunk_done"):
                chunks.append(event.chunk_done.token_end)
            elif event.HasField("first_token"):
                tokens.append(event.first_token.token_id)
        return "completed"

    try:
        async with asyncio.timeout(patience):
            ended = await read()
    except TimeoutError:
        ended = "cancelled"
    except (grpc.RpcError, asyncio.CancelledError):
        return "failed"
    # In order.
    assert chunks == sorted(set(chunks))
    if ended == "completed":
        # Of the last chunk the first token tells.
        assert all(end < num_tokens for end in chunks)
        assert tokens == [0]
    return ended


async def storm(cluster: Cluster) -> Counter[str]:
    draw = random.Random(3)
    async with prefill_stub(cluster.prefill[0].address) as stub:

        async def later(number: int) -> str:
            await asyncio.sleep(draw.uniform(0, 15))
            num_tokens = draw.choice([100, 1000, 5000, 30_000])
            patience = draw.uniform(0.01, 1.5) if number % 2 else None
            return await one(stub, number, num_tokens, patience)

        return Counter(await asyncio.gather(*(later(number) for number in range(NUM_REQUESTS))))


def test_s10_s11_s14_an_abort_storm_at_eight_stages_and_kv_of_the_models_size(tmp_path: Path) -> None:
    """S10, S11, S14: aborts by the hundred at PP8 must not make stages disagree, and nothing waits for a ring."""
    model = tiny_models.make("llama", tmp_path / "model", num_hidden_layers=8)
    path = tmp_path / "cluster.toml"
    cluster = write_cluster(path, model, [Group("p0", 8, 1, OPTIONS)], num_decode=0, max_context_tokens=40_000)
    with processes(cluster, path, ["p0"], tmp_path):
        ended = asyncio.run(storm(cluster))
        assert set(ended) <= {"completed", "cancelled"}
        assert ended["completed"] >= NUM_REQUESTS // 2
        assert ended["cancelled"] > 50
        asyncio.run(assert_balanced(cluster, ["p0"]))
        landed = asyncio.run(landed_kv(cluster, "p0", [2] * 5000))
        assert landed.first_token == 0
        for number, (keys, values) in enumerate(landed.layers):
            assert keys.shape == (2, 5000, 16)
            assert torch.equal(keys, torch.full_like(keys, number + 1))
            assert torch.equal(values, torch.full_like(values, number + 1))
        asyncio.run(assert_balanced(cluster, ["p0"]))
