"""What runs on which host."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headwater.cluster import parse_cluster
from headwater.errors import InvalidConfig
from router.hosts import is_local
from router.placement import place

FILE = Path("/somewhere/cluster.toml")
CLUSTER = parse_cluster("""
    [model]
    path = "unused"
    [router]
    address = "node-a:7000"
    [[prefill]]
    name = "p0"
    address = "node-a:7001"
    pp = 2
    tp = 2
    hosts = ["node-a", "node-b"]
    threads_per_rank = 3
    [[decode]]
    name = "d0"
    address = "node-b:7002"
    threads = 4
""")


def placed_on(*hosts: str) -> list[tuple[str, str]]:
    return [(process.name, " ".join(process.arguments)) for process in place(CLUSTER, FILE, lambda h: h in hosts)]


def test_leader_starts_the_workers_of_its_own_host() -> None:
    assert placed_on("node-a") == [
        ("p0", f"prefill serve --cluster {FILE} --name p0"),
        ("router", f"router serve --cluster {FILE}"),
    ]


def test_other_hosts_start_their_own_ranks() -> None:
    assert placed_on("node-b") == [
        ("p0-2", "prefill worker --leader node-a:7001 --rank 2 --host node-b"),
        ("p0-3", "prefill worker --leader node-a:7001 --rank 3 --host node-b"),
        ("d0", f"decode serve --cluster {FILE} --name d0"),
    ]


def test_threads_and_health() -> None:
    by_name = {process.name: process for process in place(CLUSTER, FILE, lambda _: True)}
    assert {name: process.threads for name, process in by_name.items()} == {
        "p0": 3,
        "p0-2": 3,
        "p0-3": 3,
        "d0": 4,
        "router": 1,
    }
    assert by_name["p0"].address == "node-a:7001"
    assert by_name["p0-2"].address is None


def test_nothing_here() -> None:
    with pytest.raises(InvalidConfig, match="places nothing on this host"):
        place(CLUSTER, FILE, lambda _: False)


def test_port_must_be_known() -> None:
    cluster = parse_cluster('[model]\npath = "unused"\n[router]\naddress = "127.0.0.1:0"')
    with pytest.raises(InvalidConfig, match="router router: give its address a port"):
        place(cluster, FILE)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "[::1]", "0.0.0.0"])
def test_loopback_is_here(host: str) -> None:
    assert is_local(host)


def test_own_addresses_are_here() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Chooses the interface; sends nothing.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no route")
        assert is_local(probe.getsockname()[0])


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_others_are_not(host: str) -> None:
    assert not is_local(host)
