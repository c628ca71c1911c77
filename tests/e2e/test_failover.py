"""A group is lost while KV is on its way: another one goes on, and the answer is the same."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from headwater.cluster import Cluster
from headwater.rpc import open_channel
from headwater.v1 import router_pb2, router_pb2_grpc
from router.supervisor import Supervisor
from tests import tiny_models
from tests.harness import Group, ask, assert_balanced, events, processes, until_paired, write_cluster
from tests.oracle import Oracle

CHUNK, NUM_TOKENS, NUM_ANSWER = 16, 1500, 24
OPTIONS = (("chunk_tokens", CHUNK), ("page_size", 16), ("pool_tokens", 4096))


class Site:
    """Two prefill groups of different layouts and two decode nodes."""

    def __init__(self, folder: Path, cluster: Cluster, supervisor: Supervisor, oracle: Oracle) -> None:
        self.folder, self.cluster, self.supervisor, self.oracle = folder, cluster, supervisor, oracle
        self.router = cluster.router.address


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("failover")
    model = tiny_models.make("llama", folder / "model")
    path = folder / "cluster.toml"
    groups = [Group("p0", 2, 1, OPTIONS), Group("p1", 1, 2, OPTIONS)]
    cluster = write_cluster(path, model, groups, num_decode=2)
    with processes(cluster, path, ["p0", "p1", "d0", "d1", "router"], folder) as supervisor:
        for name in ("p0", "p1", "d0", "d1"):
            asyncio.run(until_paired(cluster.router.address, name))
        yield Site(folder, cluster, supervisor, Oracle(model))


def ask_and_kill(site: Site, prompt: list[int], victim: Callable[[router_pb2.Accepted], int]) -> tuple[list[int], str]:
    """One request; a process is killed when KV of both ranks has been verified. Returns the tokens and the request's
    id.
    """

    async def run() -> tuple[list[int], str]:
        accepted, tokens = router_pb2.Accepted(), []

        async def kill() -> None:
            log = site.folder / f"{accepted.decode_group}.log"
            while True:
                receipts = events(log, event="chunk_landed", transfer=accepted.transfer_id)
                if {entry["rank"] for entry in receipts} == {0, 1}:
                    os.kill(victim(accepted), signal.SIGKILL)
                    return
                await asyncio.sleep(0.01)

        async with open_channel(site.router) as channel, asyncio.TaskGroup() as killing:
            ids = router_pb2.TokenIds(ids=prompt)
            call = router_pb2_grpc.RouterServiceStub(channel).Generate(
                router_pb2.GenerateRequest(token_ids=ids, max_tokens=NUM_ANSWER, ignore_eos=True)
            )
            async for response in call:
                if response.HasField("accepted"):
                    accepted = response.accepted
                    killing.create_task(kill())
                elif response.HasField("token"):
                    tokens.append(response.token.id)
        return tokens, accepted.request_id

    return asyncio.run(run())


def test_prefill_dies_and_another_group_goes_on_from_the_last_verified_chunk(site: Site) -> None:
    (prompt,) = tiny_models.prompts([NUM_TOKENS])

    def worker_of(accepted: router_pb2.Accepted) -> int:
        return psutil.Process(site.supervisor.children[accepted.prefill_group].pid).children()[0].pid

    tokens, request_id = ask_and_kill(site, prompt, worker_of)
    assert tokens == site.oracle.greedy(prompt, NUM_ANSWER)
    (resumed,) = events(site.folder / "router.log", event="resumed", request=request_id)
    verified = resumed["verified_tokens"]
    assert 0 < verified < NUM_TOKENS
    # The second group fetched that much on each rank, and computed the rest only.
    log = site.folder / f"{resumed['prefill']}.log"
    fetched = events(log, event="fetched", request=request_id)
    assert {entry["rank"] for entry in fetched} == {0, 1}
    assert all(entry["tokens"] == [0, verified] for entry in fetched)
    started = events(log, event="chunk_started", request=request_id, rank=0)
    assert started[0]["tokens"][0] == verified
    assert [entry["tokens"][1] for entry in started[:-1]] == [entry["tokens"][0] for entry in started[1:]]
    asyncio.run(assert_balanced(site.cluster, [resumed["prefill"]]))
    # The next request does not need the lost group.
    assert len(asyncio.run(ask(site.router, prompt[:50], 3)).tokens) == 3


def test_decode_dies_and_the_kv_goes_to_another_node_from_pages_still_held(site: Site) -> None:
    # Not the prompt of the test before, some of which may be cached.
    _, prompt = tiny_models.prompts([NUM_TOKENS, NUM_TOKENS])
    tokens, request_id = ask_and_kill(
        site, prompt, lambda accepted: site.supervisor.children[accepted.decode_group].pid
    )
    assert tokens == site.oracle.greedy(prompt, NUM_ANSWER)
    (resumed,) = events(site.folder / "router.log", event="resumed", request=request_id)
    lost = resumed["instead_of"]
    assert {lost, resumed["decode"]} == {"d0", "d1"}
    # Prefill was not started again: no chunk was computed twice.
    computed = [
        (entry["rank"], *entry["tokens"])
        for name in ("p0", "p1")
        for entry in events(site.folder / f"{name}.log", event="chunk_finished", request=request_id)
    ]
    assert len(computed) == len(set(computed)) == 2 * -(-NUM_TOKENS // CHUNK)
    assert len(asyncio.run(ask(site.router, prompt[:50], 3)).tokens) == 3
