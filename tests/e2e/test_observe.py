"""`headwater up --observe`: a real Prometheus on a real cluster has data for every query of every panel."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from headwater.cluster import Cluster
from headwater.rpc import open_channel
from headwater.v1 import router_pb2, router_pb2_grpc
from tests import tiny_models
from tests.harness import START_SECONDS, Group, ask, assert_balanced, no_leaks, write_cluster
from tests.observe.debian import prometheus_folder
from tests.observe.test_dashboards import queries

PATIENCE_SECONDS = 30
# A leader, two workers, a decode node and the router.
NUM_PROCESSES = 5
# What Grafana would put in their place.
VARIABLES = {"$__rate_interval": "1m", "$node": ".*"}


class Observed:
    """A cluster and the Prometheus that looks at it."""

    def __init__(self, cluster: Cluster, address: str) -> None:
        self.cluster = cluster
        self.address = address

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of Prometheus's API."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
            answer = json.load(response)
        assert answer["status"] == "success"
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        """Of an expression now; what is not a number is left out, as Grafana does."""
        result = self.get("query", query=expression)["result"]
        return [value for series in result if math.isfinite(value := float(series["value"][1]))]

    def rules(self) -> list[dict[str, Any]]:
        """All, with their health."""
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def names(self, kind: str) -> list[str]:
        """Of "recording" or "alerting" rules."""
        return [rule["name"] for rule in self.rules() if rule["type"] == kind]


def until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> bool:
    """Whether it came true. Prometheus tells nobody when it has looked."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    programs = prometheus_folder()
    folder = tmp_path_factory.mktemp("observe")
    model = tiny_models.make("llama", folder / "model")
    path, log, temporary = folder / "cluster.toml", folder / "up.log", folder / "tmp"
    temporary.mkdir()
    options = (("chunk_tokens", 64), ("page_size", 16), ("pool_tokens", 2048))
    cluster = write_cluster(path, model, [Group("p0", 2, 1, options)])
    command = [sys.executable, "-m", "router", "up", str(path), "--observe", "--scrape-interval", "1"]
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(temporary)}
    ports = [int(s.address.rpartition(":")[2]) for s in (cluster.router, cluster.prefill[0], cluster.decode[0])]
    with no_leaks(ports), log.open("w") as output:
        with subprocess.Popen(command, stderr=output, env=environment) as up:
            try:
                address = _prometheus_address(up, log)
                yield Observed(cluster, address)
            finally:
                up.send_signal(signal.SIGINT)
                assert up.wait(60) == 0, log.read_text()
    assert list(temporary.iterdir()) == []
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{address}/-/ready", timeout=5)


def _prometheus_address(up: subprocess.Popen[bytes], log: Path) -> str:
    """From the table that `up` prints when everything serves."""

    def served() -> bool:
        assert up.poll() is None, log.read_text()
        return "page: http://" in log.read_text()

    assert until(served, START_SECONDS), log.read_text()
    (address,) = re.findall(r"prometheus .* http://(\S+)", log.read_text())
    return str(address)


async def _ask_for_everything(router: str) -> None:
    """Two answers, a client that leaves, and a request that is refused."""
    prompt = tiny_models.prompts([300])[0]
    await asyncio.gather(ask(router, prompt, 4), ask(router, prompt[:200], 4))
    async with open_channel(router) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        ids = router_pb2.TokenIds(ids=prompt)
        call = stub.Generate(router_pb2.GenerateRequest(token_ids=ids, max_tokens=1700, ignore_eos=True))
        async for response in call:
            if response.HasField("token"):
                break
        call.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in stub.Generate(router_pb2.GenerateRequest(text="", max_tokens=4)):
                pass
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_every_query_of_every_panel_has_data_and_every_rule_works(observed: Observed) -> None:
    assert until(lambda: observed.values('up{job="headwater"}') == [1.0] * NUM_PROCESSES)
    asyncio.run(_ask_for_everything(observed.cluster.router.address))
    asyncio.run(assert_balanced(observed.cluster, ["p0"]))

    expected = {"length": 2.0, "cancelled": 1.0, "InvalidRequest": 1.0, "CapacityError": 0.0}
    for outcome, count in expected.items():
        expression = f'headwater_requests_total{{outcome="{outcome}"}}'
        assert until(lambda expression=expression, count=count: observed.values(expression) == [count]), outcome  # type: ignore[misc]

    # What a rule records appears when its group is evaluated next.
    without = dict(queries()) | {name: name for name in observed.names("recording")}
    for name, value in VARIABLES.items():
        without = {where: expression.replace(name, value) for where, expression in without.items()}

    def has_data() -> bool:
        for where in [where for where, expression in without.items() if observed.values(expression)]:
            del without[where]
        return not without

    assert until(has_data), f"no data for {without}"

    assert until(lambda: all(rule["health"] == "ok" for rule in observed.rules())), observed.rules()
    assert (len(observed.names("recording")), len(observed.names("alerting"))) == (19, 13)
    # Nothing is wrong with this cluster; what they would say otherwise is in tests/observe.
    alerting = [rule for rule in observed.rules() if rule["type"] == "alerting"]
    assert [rule["name"] for rule in alerting if rule["state"] == "firing"] == []
    for rule in alerting:
        observed.get("query", query=rule["query"])


def test_processes_are_labelled_by_what_they_are(observed: Observed) -> None:
    series = observed.get("query", query="headwater_build_info")["result"]
    labels = {(one["metric"]["role"], one["metric"]["node"], one["metric"].get("rank")) for one in series}
    assert labels == {
        ("router", "router", None),
        ("prefill", "p0", None),
        ("worker", "p0", "0"),
        ("worker", "p0", "1"),
        ("decode", "d0", None),
    }
    # Labels of a metric's own are kept: the group's role, and not the router's.
    states = observed.get("query", query='headwater_group_state{state="serving"}')["result"]
    assert {(one["metric"]["group"], one["metric"]["role"]) for one in states} == {("p0", "prefill"), ("d0", "decode")}
