"""The cluster's processes as Prometheus's HTTP service discovery wants them. Pure.

https://prometheus.io/docs/prometheus/latest/http_sd/
"""

from __future__ import annotations

from typing import TypedDict

from router.snapshot import Snapshot


class TargetGroup(TypedDict):
    """One process."""

    # One "host:port" that serves /metrics.
    targets: list[str]
    # role: "router", "prefill" (a leader), "worker" or "decode"; node: its name in the cluster file; rank: of a worker;
    # __scheme__: "https" where that is spoken.
    labels: dict[str, str]


def prometheus_targets(snapshot: Snapshot, router: str, metrics_address: str, *, tls: bool) -> list[TargetGroup]:
    """Every process that is known now: this router, and those of the groups that it has ever heard from.

    Args:
        router: the router's name.
        metrics_address: the router's own.
        tls: the cluster has certificates.
    """
    scheme = {"__scheme__": "https"} if tls else {}

    def target(address: str, role: str, node: str, **more: str) -> TargetGroup:
        return {"targets": [address], "labels": {"role": role, "node": node, **more, **scheme}}

    found = [target(metrics_address, "router", router)]
    for group in snapshot.prefill:
        # The leader's, then those of its workers in the order of their ranks.
        for number, address in enumerate(group.description.metrics_addresses if group.description else ()):
            if number == 0:
                found.append(target(address, "prefill", group.name))
            else:
                found.append(target(address, "worker", group.name, rank=str(number - 1)))
    for node in snapshot.decode:
        addresses = node.description.metrics_addresses if node.description else ()
        found.extend(target(address, "decode", node.name) for address in addresses)
    return found
