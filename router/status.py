"""What RouterService.Status says of the groups. Pure."""

from __future__ import annotations

from headwater.v1 import router_pb2
from router.compatibility import unpaired
from router.snapshot import DecodeGroup, PrefillGroup, Snapshot


def describe_groups(snapshot: Snapshot) -> list[router_pb2.GroupStatus]:
    """One entry for each group, in the order of the cluster file."""
    reasons = unpaired(snapshot)
    return [
        *(_prefill(group, reasons.get(group.name, "")) for group in snapshot.prefill),
        *(_decode(group, reasons.get(group.name, "")) for group in snapshot.decode),
    ]


def _prefill(group: PrefillGroup, reason: str) -> router_pb2.GroupStatus:
    status = router_pb2.GroupStatus(
        name=group.name,
        role="prefill",
        address=group.address,
        state=group.state,
        detail=group.detail or reason,
        breaker=group.breaker,
    )
    said = group.description
    if said is not None:
        status.epoch = said.epoch
        status.layout = f"PP{said.pp} TP{said.tp}"
        status.used_tokens = said.capacity_tokens - said.free_tokens
        status.capacity_tokens = said.capacity_tokens
        status.active_requests = said.queued_requests + said.running_requests
        status.queued_requests = said.queued_requests
        status.transport = said.transport
        status.metrics_addresses.extend(said.metrics_addresses)
    return status


def _decode(group: DecodeGroup, reason: str) -> router_pb2.GroupStatus:
    status = router_pb2.GroupStatus(
        name=group.name,
        role="decode",
        address=group.address,
        state=group.state,
        detail=group.detail or reason,
        breaker=group.breaker,
    )
    said = group.description
    if said is not None:
        status.epoch = said.epoch
        status.layout = said.engine
        status.used_tokens = said.capacity_tokens - said.free_tokens
        status.capacity_tokens = said.capacity_tokens
        status.active_requests = said.active_requests
        status.transport = said.transport
        status.metrics_addresses.extend(said.metrics_addresses)
    return status
