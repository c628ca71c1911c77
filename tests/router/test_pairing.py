"""Pairing policies, by table."""

from __future__ import annotations

import dataclasses

import pytest

from headwater.errors import GeometryMismatch, InvalidRequest, PeerUnavailable
from headwater.v1 import common_pb2, decode_pb2, prefill_pb2
from router.compatibility import mismatches, unpaired
from router.pairing import Policies, Size, as_decode, as_prefill, choose_pair, prefill_seconds, saved_seconds
from router.policies.named import POLICIES
from router.snapshot import DecodeGroup, PrefillGroup, Snapshot, State
from tests.router.fakes import tiny_geometry

SIZE = Size(num_prompt_tokens=10, max_tokens=5)
LEAST_LOADED = Policies(POLICIES["least_loaded"], POLICIES["least_loaded"])


def prefill(name: str, *, running: int = 0, free: int = 100, capacity: int = 100, key_size: int = 8) -> PrefillGroup:
    description = prefill_pb2.DescribePrefillResponse(
        geometry=tiny_geometry(key_size=key_size), running_requests=running, free_tokens=free, capacity_tokens=capacity
    )
    return PrefillGroup(name, f"{name}:1", State.SERVING, "", description)


def decode(name: str, *, active: int = 0, free: int = 100, capacity: int = 100, key_size: int = 8) -> DecodeGroup:
    description = decode_pb2.DescribeDecodeResponse(
        geometry=tiny_geometry(key_size=key_size, page_size=1),
        active_requests=active,
        free_tokens=free,
        capacity_tokens=capacity,
    )
    return DecodeGroup(name, f"{name}:1", State.SERVING, "", description)


def snapshot(prefills: list[PrefillGroup], decodes: list[DecodeGroup]) -> Snapshot:
    return Snapshot(tuple(prefills), tuple(decodes), "tokenizer")


def chosen(it: Snapshot, size: Size = SIZE, turn: int = 0) -> tuple[str, str]:
    pair = choose_pair(it, size, LEAST_LOADED, turn)
    return pair.prefill.name, pair.decode.name if pair.decode else ""


@pytest.mark.parametrize(
    ("prefills", "decodes", "expected"),
    [
        ([prefill("p0", running=2), prefill("p1", running=1)], [decode("d0")], ("p1", "d0")),
        ([prefill("p0", free=50), prefill("p1", free=60)], [decode("d0")], ("p1", "d0")),
        ([prefill("p0")], [decode("d0", active=1), decode("d1", free=1)], ("p0", "d1")),
        ([prefill("p0", capacity=9), prefill("p1", running=9)], [decode("d0")], ("p1", "d0")),
        ([prefill("p0")], [decode("d0", capacity=14), decode("d1", active=9)], ("p0", "d1")),
        ([prefill("p0"), prefill("p1", running=9, key_size=32)], [decode("d0", key_size=32)], ("p1", "d0")),
        (
            [prefill("p0", running=9, key_size=32), prefill("p1")],
            [decode("d0", key_size=32), decode("d1", active=9)],
            ("p1", "d1"),
        ),
    ],
)
def test_least_loaded_of_those_that_fit(
    prefills: list[PrefillGroup], decodes: list[DecodeGroup], expected: tuple[str, str]
) -> None:
    assert chosen(snapshot(prefills, decodes)) == expected


def test_ties_go_by_turns() -> None:
    it = snapshot([prefill("p0"), prefill("p1")], [decode("d0")])
    assert [chosen(it, turn=turn)[0] for turn in range(4)] == ["p0", "p1", "p0", "p1"]


def test_s22_requests_sent_since_the_last_heartbeat_count() -> None:
    busy = dataclasses.replace(prefill("p0"), sent=(10,), sent_since=(10,))
    assert chosen(snapshot([busy, prefill("p1")], [decode("d0")])) == ("p1", "d0")


def test_one_token_needs_no_decode_group() -> None:
    assert chosen(snapshot([prefill("p0")], []), Size(10, 1)) == ("p0", "")


def test_request_that_no_pool_can_hold() -> None:
    with pytest.raises(InvalidRequest, match=r"needs room for 101 tokens, and the largest prefill pool \(p0 at p0:1\)"):
        choose_pair(snapshot([prefill("p0")], [decode("d0")]), Size(101, 5), LEAST_LOADED, 0)
    with pytest.raises(InvalidRequest, match=r"needs room for 103 tokens, and the largest decode pool \(d0 at d0:1\)"):
        choose_pair(snapshot([prefill("p0")], [decode("d0")]), Size(98, 5), LEAST_LOADED, 0)


def test_pool_of_a_group_that_is_away_may_come_back() -> None:
    away = dataclasses.replace(prefill("p1", capacity=200), state=State.UNREACHABLE, detail="connection refused")
    with pytest.raises(
        PeerUnavailable, match="p0 at p0:1: smaller than 150 tokens; p1 at p1:1: unreachable: connection"
    ):
        choose_pair(snapshot([prefill("p0"), away], [decode("d0", capacity=200)]), Size(150, 5), LEAST_LOADED, 0)


def test_nothing_to_choose_from() -> None:
    with pytest.raises(PeerUnavailable, match="lists no decode group"):
        choose_pair(snapshot([prefill("p0")], []), SIZE, LEAST_LOADED, 0)


def test_no_pair_fits_together() -> None:
    it = snapshot([prefill("p0")], [decode("d0", key_size=32)])
    with pytest.raises(GeometryMismatch, match="p0 at p0:1 and decode d0 at d0:1 .*key_size is 8 in prefill and 32"):
        choose_pair(it, SIZE, LEAST_LOADED, 0)
    assert set(mismatches(it)) == {("p0", "d0")}
    assert set(unpaired(it)) == {"p0", "d0"}


def test_group_with_one_partner_is_not_unpaired() -> None:
    it = snapshot([prefill("p0")], [decode("d0", key_size=32), decode("d1")])
    assert set(unpaired(it)) == {"d0"}


def test_what_was_sent_counts_once_whether_or_not_the_group_has_said_so() -> None:
    # It reports two requests, of which this router sent one; another was sent since.
    group = dataclasses.replace(prefill("p0", running=2, free=60), sent=(30, 20), sent_since=(20,))
    assert group.description is not None
    group.description.backlog_tokens = 40
    known = as_prefill(group, SIZE)
    assert (known.requests, known.tokens_ahead, known.free_tokens) == (3, 60, 40)
    assert (known.seconds_ahead, known.own_seconds) == (None, None)
    # It lost track of this router's two.
    group.description.running_requests = group.description.backlog_tokens = 0
    known = as_prefill(group, SIZE)
    assert (known.requests, known.tokens_ahead) == (2, 50)
    node = dataclasses.replace(decode("d0", active=1, free=70), sent=(30, 20), sent_since=(20,))
    known = as_decode(node)
    assert (known.requests, known.tokens_ahead, known.free_tokens) == (2, 50, 50)


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 64, 100])
def test_predicted_seconds_are_those_of_the_chunks(num_tokens: int) -> None:
    costs = [
        common_pb2.StageCost(base=0.5, per_prefix_token=0.01, per_token=0.1, per_pair=0.002),
        common_pb2.StageCost(base=0.25, per_prefix_token=0.02, per_token=0.05, per_pair=0.003),
    ]
    group = prefill_pb2.DescribePrefillResponse(chunk_tokens=8, costs=costs)
    stages = []
    for cost in costs:
        chunks = []
        for start in range(0, num_tokens, 8):
            count = min(8, num_tokens - start)
            pairs = 2 * start * count + count * count
            chunks.append(cost.base + cost.per_prefix_token * start + cost.per_token * count + cost.per_pair * pairs)
        stages.append(chunks)
    expected = max(sum(chunks) for chunks in stages) + max(chunks[-1] for chunks in stages)
    assert prefill_seconds(group, num_tokens) == pytest.approx(expected)


@pytest.mark.parametrize(("num_tokens", "cached"), [(100, 0), (100, 8), (100, 64), (100, 99), (9, 3), (513, 256)])
def test_what_is_saved_is_what_the_slowest_stage_does_not_compute(num_tokens: int, cached: int) -> None:
    fast = common_pb2.StageCost(base=0.25, per_prefix_token=0.001, per_token=0.05, per_pair=0.002)
    slow = common_pb2.StageCost(base=0.5, per_prefix_token=0.002, per_token=0.1, per_pair=0.004)
    group = prefill_pb2.DescribePrefillResponse(chunk_tokens=8, costs=[fast, slow, fast])

    def computing(start: int) -> float:
        chunks = [(at, min(8, num_tokens - at)) for at in range(start, num_tokens, 8)]
        return sum(
            slow.base + slow.per_prefix_token * at + slow.per_token * count + slow.per_pair * (2 * at + count) * count
            for at, count in chunks
        )

    saved = saved_seconds(group, num_tokens, cached)
    assert saved == pytest.approx(computing(0) - computing(cached))
    prompt = dataclasses.replace(prefill("p0"), description=group, cached_tokens=cached)
    known = as_prefill(prompt, Size(num_tokens, 5))
    assert (known.cached_tokens, known.saved_seconds) == (cached, saved)
    assert known.own_seconds == pytest.approx(prefill_seconds(group, num_tokens) - saved)


def test_predicted_ttft_takes_the_faster_group_until_its_queue_is_longer() -> None:
    def group(name: str, per_token: float, backlog: float, sent_since: tuple[int, ...] = ()) -> PrefillGroup:
        it = prefill(name)
        assert it.description is not None
        it.description.chunk_tokens = 10
        it.description.costs.add(per_token=per_token)
        it.description.backlog_seconds = backlog
        return dataclasses.replace(it, sent=sent_since, sent_since=sent_since)

    policies = Policies(POLICIES["predicted_ttft"], POLICIES["least_loaded"])

    def chosen(*groups: PrefillGroup) -> str:
        return choose_pair(snapshot(list(groups), [decode("d0")]), SIZE, policies, 0).prefill.name

    assert chosen(group("slow", 0.2, 0.0), group("fast", 0.1, 0.0)) == "fast"
    assert chosen(group("slow", 0.2, 0.0), group("fast", 0.1, 0.9)) == "fast"
    assert chosen(group("slow", 0.2, 0.0), group("fast", 0.1, 1.1)) == "slow"
    # Ten tokens that it cannot have told of take it a second.
    assert chosen(group("slow", 0.2, 0.0), group("fast", 0.1, 0.1, sent_since=(10,))) == "slow"
