"""Which processes of a cluster this host runs, and with which arguments. Pure but for asking which hosts are local."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from headwater.cluster import Cluster, Prefill
from headwater.errors import InvalidConfig
from router.hosts import host_of, is_local


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """One process to start here."""

    name: str
    # "router", "prefill" or "decode".
    role: str
    # Arguments of the `headwater` command.
    arguments: tuple[str, ...]
    # Where it serves grpc.health.v1; None for a worker, whose leader speaks for it.
    address: str | None
    # OpenMP threads of each of its processes.
    threads: int = 1


def place(cluster: Cluster, path: Path, local: Callable[[str], bool] = is_local) -> list[Placed]:
    """The processes of this host, the router last.

    A prefill group's leader starts the workers of its own host; the others' are started by their hosts.

    Raises:
        InvalidConfig: nothing is placed here, or an address leaves its port to the system.
    """
    file = ("--cluster", str(path))
    placed: list[Placed] = []
    for group in cluster.prefill:
        if local(host_of(group.address)):
            arguments = ("prefill", "serve", *file, "--name", group.name)
            placed.append(Placed(group.name, "prefill", arguments, group.address, group.threads_per_rank))
        placed.extend(_remote_workers(group, local))
    for node in cluster.decode:
        if local(host_of(node.address)):
            arguments = ("decode", "serve", *file, "--name", node.name)
            placed.append(Placed(node.name, "decode", arguments, node.address, node.threads))
    if local(host_of(cluster.router.address)):
        placed.append(Placed(cluster.router.name, "router", ("router", "serve", *file), cluster.router.address))
    if not placed:
        raise InvalidConfig(f"{path} places nothing on this host: no address in it belongs to a local interface.")
    for process in placed:
        if process.address is not None and process.address.endswith(":0"):
            raise InvalidConfig(f"{process.role} {process.name}: give its address a port; others must find it.")
    return placed


def _remote_workers(group: Prefill, local: Callable[[str], bool]) -> Iterator[Placed]:
    world = group.pp * group.tp
    leader_host = host_of(group.address)
    hosts = group.hosts or (leader_host,)
    for rank in range(world):
        host = hosts[rank * len(hosts) // world]
        if host != leader_host and local(host):
            arguments = ("prefill", "worker", "--leader", group.address, "--rank", str(rank), "--host", host)
            yield Placed(f"{group.name}-{rank}", "prefill", arguments, None, group.threads_per_rank)
