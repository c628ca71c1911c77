"""A prefill group whose worker dies or stalls says so, fails its requests at once, and comes back by itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import grpc
import psutil
import pytest

from headwater.cluster import parse_cluster
from headwater.errors import HeadwaterError, PeerUnavailable, TransferFailed, from_rpc_error
from headwater.rpc import open_channel
from headwater.v1 import prefill_pb2, prefill_pb2_grpc, router_pb2, router_pb2_grpc
from tests import tiny_models
from tests.harness import Group, ask, assert_balanced, processes, until_paired, write_cluster
from tests.oracle import Oracle

OPTIONS = (
    ("chunk_tokens", 16),
    ("page_size", 16),
    ("pool_tokens", 4096),
    ("chunk_policy", "optimal"),
    ("measure_layers", True),
)


async def described(address: str) -> prefill_pb2.DescribePrefillResponse:
    async with open_channel(address) as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        return await stub.DescribePrefill(prefill_pb2.DescribePrefillRequest())


async def fails(router: str, prompt: list[int], pid: int, number: signal.Signals) -> HeadwaterError:
    """Sends `number` to a worker once a request has had a chunk; what the request ends with."""
    sent = False
    try:
        async with open_channel(router) as channel:
            call = router_pb2_grpc.RouterServiceStub(channel).Generate(
                router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=prompt), max_tokens=5)
            )
            async for event in call:
                if event.HasField("progress") and not sent:
                    sent = True
                    os.kill(pid, number)
    except grpc.RpcError as error:
        assert sent
        return from_rpc_error(error, "router")
    raise AssertionError("the request was completed")


async def back(address: str, epoch: str) -> prefill_pb2.DescribePrefillResponse:
    """Waits for the group's next incarnation to serve."""
    async with asyncio.timeout(120):
        while True:
            answer = await described(address)
            if answer.serving and answer.epoch != epoch:
                return answer
            await asyncio.sleep(0.1)


def test_s10_a_worker_dies_or_stalls_and_the_group_comes_back_as_a_new_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S10: ranks that wait for each other for ever, while health says that all is well.

    The group measures its layers and costs at the first start, and finds them at the others.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tiny_models.make("llama", tmp_path / "model")
    path = tmp_path / "cluster.toml"
    write_cluster(path, model, [Group("p0", 2, 1, OPTIONS)])
    # The router would keep a request that was lost until the group is back.
    text = path.read_text().replace("[router]\n", "[router]\nmax_waiting = 0\n")
    path.write_text(text + "[deadlines]\nstep = 3\nsilence = 6\n")
    cluster = parse_cluster(path.read_text())
    address = cluster.prefill[0].address
    (prompt,) = tiny_models.prompts([2000])
    oracle = Oracle(model)
    with processes(cluster, path, ["p0", "d0", "router"], tmp_path) as supervisor:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            asyncio.run(until_paired(cluster.router.address, "p0"))
            before = asyncio.run(described(address))
            assert before.chunk_policy == "optimal"
            assert len(before.costs) == 2
            assert all(cost.per_token > 0 or cost.base > 0 for cost in before.costs)
            files = sorted(path.parent.name for path in (tmp_path / "cache").rglob("*.json"))
            assert files == ["costs", "layers"]
            workers = psutil.Process(supervisor.children["p0"].pid).children()
            error = asyncio.run(fails(cluster.router.address, prompt, workers[0].pid, number))
            # Decode sees its writer go and ends the other rank's delivery; the leader sees its worker go: whichever the
            # router hears of first.
            assert isinstance(error, PeerUnavailable | TransferFailed)
            assert "was lost" in str(error) or "stopped serving" in str(error)
            after = asyncio.run(back(address, before.epoch))
            assert (after.running_requests, after.free_tokens) == (0, after.capacity_tokens)
            assert list(after.layer_boundaries) == list(before.layer_boundaries)
            # Neither the router nor the decode node was touched.
            asyncio.run(until_paired(cluster.router.address, "p0"))
            answer = asyncio.run(ask(cluster.router.address, prompt[:100], 5))
            assert answer.tokens == oracle.greedy(prompt[:100], 5)
        # Nothing was asked of this one, and its connection stands.
        before = asyncio.run(described(address))
        os.kill(psutil.Process(supervisor.children["p0"].pid).children()[1].pid, signal.SIGSTOP)
        asyncio.run(back(address, before.epoch))
        asyncio.run(assert_balanced(cluster, ["p0"]))
    log = (tmp_path / "p0.log").read_text(encoding="utf-8")
    reasons = [json.loads(line)["reason"] for line in log.splitlines() if '"the group is lost"' in line]
    assert len(reasons) == 3
    assert "no stage finished a step within 3 s (deadlines.step)" in reasons[1]
    assert "rank 1 " in reasons[2]
    assert "nothing was heard for 6 s (deadlines.silence)" in reasons[2]
