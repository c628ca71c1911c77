"""What the page is sent, as types: their fields are the JSON's. Pure.

Ages and durations are seconds of the router's clock, from before the answer is made: no reader compares clocks.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from msgspec import Struct

from headwater.v1 import common_pb2, prefill_pb2
from router.compatibility import unpaired
from router.history import History, Record
from router.snapshot import DecodeGroup, PrefillGroup, Snapshot
from router.ttft import PARTS

# Requests that a snapshot holds: of those that run, and of those that have ended.
_SHOWN = 60


class RouterView(Struct, frozen=True):
    """The router itself."""

    name: str
    model: str
    version: str


class StageView(Struct, frozen=True):
    """The layers [first_layer, end_layer) on `ranks`."""

    first_layer: int
    end_layer: int
    ranks: list[int]
    # What a full chunk at the beginning of a prompt takes, by the group's own costs; null before any are measured.
    chunk_seconds: float | None


class PrefixCacheView(Struct, frozen=True):
    """As PrefixCache in prefill.proto."""

    cached_tokens: int
    query_tokens: int
    hit_tokens: int


class GroupView(Struct, frozen=True):
    """A group as last heard of. What only one role has is empty or 0 for the other; so is all but the first six before
    the group has answered once.
    """

    name: str
    # "prefill" or "decode"
    role: str
    address: str
    # As in GroupStatus.
    state: str
    # Why it does not serve, or is not paired.
    detail: str
    breaker: str
    epoch: str = ""
    # Of prefill: "PP2 TP1"; of decode: its engine.
    layout: str = ""
    transport: str = ""
    used_tokens: int = 0
    capacity_tokens: int = 0
    page_tokens: int = 0
    running_requests: int = 0
    queued_requests: int = 0
    # Of prefill.
    stages: list[StageView] = []
    chunk_tokens: int = 0
    chunk_policy: str = ""
    backlog_tokens: int = 0
    backlog_seconds: float = 0.0
    # Null: it keeps none.
    prefix_cache: PrefixCacheView | None = None
    # Of decode: landing slots.
    slots_free: int = 0
    slots_held: int = 0
    slots_quarantined: int = 0


class RequestView(Struct, frozen=True):
    """A request. `number` is unlike any other's in this router; `id` comes from the client and may come again."""

    number: int
    id: str
    # The newest lifecycle event (`headwater.lifecycle.Event`): "finished", "cancelled" or "failed" when it has ended.
    event: str
    # Since it was received, and from then to its end or until now.
    age_seconds: float
    seconds: float
    num_prompt_tokens: int
    num_tokens_done: int
    num_generated_tokens: int
    prefill: str
    decode: str
    # Prefill groups that were asked.
    num_legs: int
    # "total" and its parts (`router.ttft.PARTS`) in seconds; null before the first token.
    ttft: dict[str, float] | None
    # A finish reason, "cancelled", or the class of the error; and its message.
    outcome: str
    detail: str


class PageSnapshot(Struct, frozen=True):
    """The cluster at one moment. Requests: those that run, then those that have ended, each with the newest first."""

    router: RouterView
    groups: list[GroupView]
    num_running: int
    requests: list[RequestView]


class EventView(Struct, frozen=True):
    """A lifecycle event, so long after the request was received."""

    event: str
    seconds: float


class StageSpanView(Struct, frozen=True):
    """A chunk on a stage; `own` is false for another request's."""

    stage: int
    start: float
    end: float
    token_start: int
    token_end: int
    own: bool


class TransferSpanView(Struct, frozen=True):
    """KV of some tokens on its way from a rank."""

    rank: int
    start: float
    end: float
    token_start: int
    token_end: int
    num_bytes: int


class TraceView(Struct, frozen=True):
    """What one prefill group did for the request, in seconds of the leader's clock since it queued it.

    `error` says why there is nothing; then the rest is empty.
    """

    prefill: str
    error: str = ""
    num_stages: int = 0
    stages: list[StageSpanView] = []
    transfers: list[TransferSpanView] = []


class RequestDetail(Struct, frozen=True):
    """One request with all that is known of it; a trace for each prefill group that was asked, in order."""

    request: RequestView
    events: list[EventView]
    traces: list[TraceView]


def describe_router(name: str, model: str) -> RouterView:
    return RouterView(name, model, importlib.metadata.version("headwater"))


def view_snapshot(router: RouterView, snapshot: Snapshot, history: History) -> PageSnapshot:
    """The cluster, and the newest requests."""
    reasons = unpaired(snapshot)
    now = history.now()
    running = history.running()
    return PageSnapshot(
        router,
        [
            *(_prefill(group, reasons.get(group.name, "")) for group in snapshot.prefill),
            *(_decode(node, reasons.get(node.name, "")) for node in snapshot.decode),
        ],
        len(running),
        [view_request(record, now) for record in [*running[:_SHOWN], *history.ended()[:_SHOWN]]],
    )


def view_request(record: Record, now: float) -> RequestView:
    ttft = record.ttft
    return RequestView(
        number=record.number,
        id=record.request_id,
        event=record.event,
        age_seconds=now - record.received,
        seconds=(record.events[-1][1] if record.ended else now) - record.received,
        num_prompt_tokens=record.num_prompt_tokens,
        num_tokens_done=record.num_tokens_done,
        num_generated_tokens=record.num_generated_tokens,
        prefill=record.prefill,
        decode=record.decode,
        num_legs=len(record.legs),
        ttft=None if ttft is None else {name: getattr(ttft, name) for name in ("total", *PARTS)},
        outcome=record.outcome,
        detail=record.detail,
    )


def view_detail(record: Record, now: float, traces: Sequence[TraceView]) -> RequestDetail:
    events = [EventView(event, at - record.received) for event, at in record.events]
    return RequestDetail(view_request(record, now), events, list(traces))


def view_trace(prefill: str, request_id: str, said: prefill_pb2.TracePrefillResponse) -> TraceView:
    """Args: `request_id` is the one by which the group knows the request."""
    stages = [
        StageSpanView(span.stage, span.start, span.end, span.token_start, span.token_end, span.request_id == request_id)
        for span in said.stages
    ]
    transfers = [
        TransferSpanView(span.rank, span.start, span.end, span.token_start, span.token_end, span.num_bytes)
        for span in said.transfers
    ]
    return TraceView(prefill, "", said.num_stages, stages, transfers)


def _prefill(group: PrefillGroup, reason: str) -> GroupView:
    said = group.description
    known = (group.name, "prefill", group.address, group.state.value, group.detail or reason, group.breaker.value)
    if said is None:
        return GroupView(*known)
    return GroupView(
        *known,
        epoch=said.epoch,
        layout=f"PP{said.pp} TP{said.tp}",
        transport=said.transport,
        used_tokens=said.capacity_tokens - said.free_tokens,
        capacity_tokens=said.capacity_tokens,
        page_tokens=said.geometry.page_size,
        running_requests=said.running_requests,
        queued_requests=said.queued_requests,
        stages=_stages(said),
        chunk_tokens=said.chunk_tokens,
        chunk_policy=said.chunk_policy,
        backlog_tokens=said.backlog_tokens,
        backlog_seconds=said.backlog_seconds,
        prefix_cache=_prefix_cache(said.prefix_cache) if said.HasField("prefix_cache") else None,
    )


def _prefix_cache(said: prefill_pb2.PrefixCache) -> PrefixCacheView:
    return PrefixCacheView(said.cached_tokens, said.query_tokens, said.hit_tokens)


def _stages(said: prefill_pb2.DescribePrefillResponse) -> list[StageView]:
    ends = said.layer_boundaries
    return [
        StageView(
            ends[stage],
            ends[stage + 1],
            list(range(stage * said.tp, (stage + 1) * said.tp)),
            _chunk_seconds(said.costs[stage], said.chunk_tokens) if len(said.costs) == said.pp else None,
        )
        for stage in range(len(ends) - 1)
    ]


def _chunk_seconds(cost: common_pb2.StageCost, count: int) -> float:
    """As common.proto says, without a prefix."""
    return cost.base + cost.per_token * count + cost.per_pair * count * count


def _decode(node: DecodeGroup, reason: str) -> GroupView:
    said = node.description
    known = (node.name, "decode", node.address, node.state.value, node.detail or reason, node.breaker.value)
    if said is None:
        return GroupView(*known)
    return GroupView(
        *known,
        epoch=said.epoch,
        layout=said.engine,
        transport=said.transport,
        used_tokens=said.capacity_tokens - said.free_tokens,
        capacity_tokens=said.capacity_tokens,
        page_tokens=said.geometry.page_size,
        running_requests=said.active_requests,
        slots_free=said.slots_free,
        slots_held=said.slots_held,
        slots_quarantined=said.slots_quarantined,
    )
