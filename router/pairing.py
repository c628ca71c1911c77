"""Which prefill and which decode group a request goes to: pure functions of a snapshot.

Room is not judged here: a snapshot is up to a heartbeat old, and a group that is full says so itself, at
once. Load only orders the candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from headwater.errors import GeometryMismatch, InvalidRequest, PeerUnavailable
from router.compatibility import reason_against_pair, reason_against_prefill
from router.snapshot import DecodeGroup, PrefillGroup, Snapshot

_AnyGroup = TypeVar("_AnyGroup", PrefillGroup, DecodeGroup)


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How large a request is, in tokens."""

    num_prompt_tokens: int
    max_tokens: int

    @property
    def needs_decode(self) -> bool:
        """The first token is prefill's; an answer of one token needs no KV elsewhere."""
        return self.max_tokens > 1


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Where a request goes. `decode` is None when prefill alone answers it."""

    prefill: PrefillGroup
    decode: DecodeGroup | None


def choose_pair(snapshot: Snapshot, size: Size, turn: int) -> Pair:
    """The least loaded prefill group, and the least loaded decode group that can take its KV.

    Args:
        turn: counts the router's requests; ties are resolved round robin by it.

    Raises:
        InvalidRequest: the request is larger than any group's pool.
        PeerUnavailable: no group of one role is serving.
        GeometryMismatch: groups are serving, but none of them can be paired.
    """
    prefill = candidates("prefill", snapshot.prefill, size.num_prompt_tokens)
    if not size.needs_decode:
        usable = [group for group in prefill if not reason_against_prefill(snapshot, group)]
        if not usable:
            raise GeometryMismatch(reason_against_prefill(snapshot, prefill[0]))
        return Pair(least_loaded(usable, prefill_load, turn), None)
    decode = candidates("decode", snapshot.decode, size.num_prompt_tokens + size.max_tokens)
    partners = {
        group.name: [other for other in decode if not reason_against_pair(snapshot, group, other)] for group in prefill
    }
    paired = [group for group in prefill if partners[group.name]]
    if not paired:
        raise GeometryMismatch(reason_against_pair(snapshot, prefill[0], decode[0]))
    chosen = least_loaded(paired, prefill_load, turn)
    return Pair(chosen, least_loaded(partners[chosen.name], decode_load, turn))


def candidates(role: str, groups: Sequence[_AnyGroup], num_tokens: int) -> list[_AnyGroup]:
    """The serving groups whose pool can hold `num_tokens`.

    Raises:
        InvalidRequest: no group that ever answered has such a pool.
        PeerUnavailable: none of those that have is serving.
    """
    capacities = [(int(g.description.capacity_tokens), g) for g in groups if g.description is not None]
    unknown = [group for group in groups if group.description is None]
    if capacities and not unknown:
        capacity, largest = max(capacities, key=lambda entry: entry[0])
        if num_tokens > capacity:
            raise InvalidRequest(
                f"the request needs room for {num_tokens} tokens, and the largest {role} pool ({largest}) holds "
                f"{capacity}. Shorten the prompt, lower max_tokens, or enlarge the pool in the cluster file."
            )
    found = [group for capacity, group in capacities if group.serving and capacity >= num_tokens]
    if not found:
        raise PeerUnavailable(_why_none(role, groups, num_tokens))
    return found


def _why_none(role: str, groups: Sequence[PrefillGroup | DecodeGroup], num_tokens: int) -> str:
    if not groups:
        return f"the cluster file lists no {role} group; add one and restart the router."
    states = "; ".join(
        f"{group}: {group.state}: {group.detail}" if not group.serving else f"{group}: smaller than {num_tokens} tokens"
        for group in groups
    )
    return f"no {role} group is serving: {states}"


def least_loaded(groups: Sequence[_AnyGroup], load: Callable[[_AnyGroup], tuple[int, int]], turn: int) -> _AnyGroup:
    """One of the groups with the smallest load, by turns."""
    least = min(load(group) for group in groups)
    tied = [group for group in groups if load(group) == least]
    return tied[turn % len(tied)]


def prefill_load(group: PrefillGroup) -> tuple[int, int]:
    """Requests there, by its own count or by what this router sent since; then the fewest free tokens."""
    assert group.description is not None
    reported = group.description.queued_requests + group.description.running_requests
    return max(reported, group.in_flight), -int(group.description.free_tokens)


def decode_load(group: DecodeGroup) -> tuple[int, int]:
    """As `prefill_load`."""
    assert group.description is not None
    return max(group.description.active_requests, group.in_flight), -int(group.description.free_tokens)
