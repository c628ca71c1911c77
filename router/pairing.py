"""Which prefill and which decode group a request goes to: pure functions of a snapshot.

Here is decided who can take a request at all; a policy (`router.policies`) chooses among those.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from headwater.errors import GeometryMismatch, InvalidRequest, PeerUnavailable
from headwater.v1 import prefill_pb2
from router.compatibility import reason_against_alone, reason_against_pair, reason_against_prefill
from router.policies import Candidate, Policy
from router.snapshot import DecodeGroup, PrefillGroup, Snapshot

_AnyGroup = TypeVar("_AnyGroup", PrefillGroup, DecodeGroup)


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How large a request is, in tokens."""

    num_prompt_tokens: int
    max_tokens: int
    # The prompt may be computed by the decode group.
    is_short: bool = False

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def needs_decode(self) -> bool:
        """The first token is prefill's; an answer of one token needs no KV elsewhere."""
        return self.max_tokens > 1

    @property
    def wants(self) -> tuple[bool, bool]:
        """Requests with the same are served by the same groups, if those are large enough."""
        return self.needs_decode, self.is_short


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Where a request goes. `decode` is None when prefill alone answers it."""

    prefill: PrefillGroup
    decode: DecodeGroup | None


@dataclasses.dataclass(frozen=True, slots=True)
class Alone:
    """Where a request with a short prompt goes: the decode group computes the prompt as well."""

    decode: DecodeGroup


@dataclasses.dataclass(frozen=True, slots=True)
class Policies:
    """Of each role."""

    prefill: Policy
    decode: Policy


def choose_route(
    snapshot: Snapshot, size: Size, policies: Policies, turn: int, *, patient: bool = False
) -> Pair | Alone:
    """A decode group alone for a short prompt, where one can; else as `choose_pair`."""
    if size.is_short:
        with contextlib.suppress(InvalidRequest, PeerUnavailable):
            decode = candidates("decode", snapshot.decode, size.num_tokens, patient=patient)
            able = [group for group in decode if not reason_against_alone(snapshot, group)]
            if able:
                return Alone(_chosen(able, [as_decode(group) for group in able], policies.decode, turn))
    return choose_pair(snapshot, size, policies, turn, patient=patient)


def choose_pair(snapshot: Snapshot, size: Size, policies: Policies, turn: int, *, patient: bool = False) -> Pair:
    """The prefill group that the one policy chooses, and of the decode groups that can take its KV the other's choice.

    Args:
        turn: counts the router's requests; ties are resolved round robin by it.
        patient: rather none than a group whose breaker is open.

    Raises:
        InvalidRequest: the request is larger than any group's pool.
        PeerUnavailable: no group of one role is serving, or, for the patient, none that has not failed lately.
        GeometryMismatch: groups are serving, but none of them can be paired.
    """
    prefill = candidates("prefill", snapshot.prefill, size.num_prompt_tokens, patient=patient)
    if not size.needs_decode:
        usable = [group for group in prefill if not reason_against_prefill(snapshot, group)]
        if not usable:
            raise GeometryMismatch(reason_against_prefill(snapshot, prefill[0]))
        return Pair(_chosen(usable, [as_prefill(group, size) for group in usable], policies.prefill, turn), None)
    decode = candidates("decode", snapshot.decode, size.num_tokens, patient=patient)
    partners = {
        group.name: [other for other in decode if not reason_against_pair(snapshot, group, other)] for group in prefill
    }
    paired = [group for group in prefill if partners[group.name]]
    if not paired:
        raise GeometryMismatch(reason_against_pair(snapshot, prefill[0], decode[0]))
    chosen = _chosen(paired, [as_prefill(group, size) for group in paired], policies.prefill, turn)
    others = partners[chosen.name]
    return Pair(chosen, _chosen(others, [as_decode(group) for group in others], policies.decode, turn))


def may_come(snapshot: Snapshot, size: Size) -> bool:
    """Whether groups that are known could take the request, whatever keeps them from it now."""
    prefill = [group for group in snapshot.prefill if _may_hold(group, size.num_prompt_tokens)]
    decode = [group for group in snapshot.decode if _may_hold(group, size.num_tokens)]
    if size.is_short and any(not reason_against_alone(snapshot, group) for group in decode):
        return True
    if not size.needs_decode:
        return any(not reason_against_prefill(snapshot, group) for group in prefill)
    return any(not reason_against_pair(snapshot, group, other) for group in prefill for other in decode)


def _may_hold(group: PrefillGroup | DecodeGroup, num_tokens: int) -> bool:
    return group.description is None or group.description.capacity_tokens >= num_tokens


def candidates(role: str, groups: Sequence[_AnyGroup], num_tokens: int, *, patient: bool = False) -> list[_AnyGroup]:
    """The serving groups whose pool can hold `num_tokens`, without those that have failed lately.

    Args:
        patient: if those are all, then none.

    Raises:
        InvalidRequest: no group that ever answered has such a pool.
        PeerUnavailable: none of those that have is serving, or left.
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
    admitting = [group for group in found if group.admits]
    if patient and not admitting:
        names = ", ".join(map(str, found))
        raise PeerUnavailable(f"every {role} group that serves has failed several requests in a row: {names}.")
    # When no breaker lets a request through, refusing it would only make a likely failure a certain one.
    return admitting or found


def _why_none(role: str, groups: Sequence[PrefillGroup | DecodeGroup], num_tokens: int) -> str:
    if not groups:
        return f"the cluster file lists no {role} group; add one and restart the router."
    states = "; ".join(
        f"{group}: {group.state}: {group.detail}" if not group.serving else f"{group}: smaller than {num_tokens} tokens"
        for group in groups
    )
    return f"no {role} group is serving: {states}"


def _chosen(groups: Sequence[_AnyGroup], known: Sequence[Candidate], policy: Policy, turn: int) -> _AnyGroup:
    return groups[policy(known, turn)]


def as_prefill(group: PrefillGroup, size: Size) -> Candidate:
    """What a policy may know of a prefill group."""
    said = group.description
    assert said is not None
    known = bool(said.costs)
    saved = saved_seconds(said, size.num_prompt_tokens, group.cached_tokens) if group.cached_tokens and known else 0.0
    return Candidate(
        requests=max(said.queued_requests + said.running_requests + len(group.sent_since), len(group.sent)),
        tokens_ahead=max(int(said.backlog_tokens) + sum(group.sent_since), sum(group.sent)),
        free_tokens=int(said.free_tokens) - sum(group.sent_since),
        seconds_ahead=said.backlog_seconds + sum(prefill_seconds(said, sent) for sent in group.sent_since)
        if known
        else None,
        own_seconds=prefill_seconds(said, size.num_prompt_tokens) - saved + said.transfer_seconds if known else None,
        cached_tokens=group.cached_tokens,
        saved_seconds=saved,
    )


def as_decode(group: DecodeGroup) -> Candidate:
    """What a policy may know of a decode group."""
    said = group.description
    assert said is not None
    free = int(said.free_tokens) - sum(group.sent_since)
    return Candidate(
        requests=max(said.active_requests + len(group.sent_since), len(group.sent)),
        tokens_ahead=int(said.capacity_tokens) - free,
        free_tokens=free,
    )


def prefill_seconds(group: prefill_pb2.DescribePrefillResponse, num_tokens: int) -> float:
    """Predicted seconds of a prompt, alone, from its first step to its first token, cut into equal chunks.

    The slowest stage computes all chunks one after the other, and the last chunk goes through the other stages.
    """
    count = -(-num_tokens // group.chunk_tokens)
    last_prefix = (count - 1) * group.chunk_tokens
    last = num_tokens - last_prefix
    chunk = max(
        cost.base
        + cost.per_prefix_token * last_prefix
        + cost.per_token * last
        + cost.per_pair * (2 * last_prefix + last) * last
        for cost in group.costs
    )
    return _slowest_stage_seconds(group, 0, num_tokens) + (len(group.costs) - 1) * chunk


def saved_seconds(group: prefill_pb2.DescribePrefillResponse, num_tokens: int, cached_tokens: int) -> float:
    """How much sooner a prompt is computed whose beginning is cached: what the slowest stage does not compute."""
    rest = _slowest_stage_seconds(group, cached_tokens, num_tokens)
    return max(0.0, _slowest_stage_seconds(group, 0, num_tokens) - rest)


def _slowest_stage_seconds(group: prefill_pb2.DescribePrefillResponse, start: int, end: int) -> float:
    """For the tokens [start, end) of a prompt, in equal chunks. In chunks of x, Σ(2·L·x + x²) = end² - start²."""
    count = -(-(end - start) // group.chunk_tokens)
    prefixes = start * count + group.chunk_tokens * count * (count - 1) / 2
    return max(
        cost.base * count
        + cost.per_prefix_token * prefixes
        + cost.per_token * (end - start)
        + cost.per_pair * (end**2 - start**2)
        for cost in group.costs
    )
