"""Pairing policies, by table."""

from __future__ import annotations

import dataclasses

import pytest

from headwater.errors import GeometryMismatch, InvalidRequest, PeerUnavailable
from headwater.v1 import decode_pb2, prefill_pb2
from router.compatibility import mismatches, unpaired
from router.pairing import Size, choose_pair
from router.snapshot import DecodeGroup, PrefillGroup, Snapshot, State
from tests.router.fakes import tiny_geometry

SIZE = Size(num_prompt_tokens=10, max_tokens=5)


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
    pair = choose_pair(it, size, turn)
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
    busy = dataclasses.replace(prefill("p0"), in_flight=1)
    assert chosen(snapshot([busy, prefill("p1")], [decode("d0")])) == ("p1", "d0")


def test_one_token_needs_no_decode_group() -> None:
    assert chosen(snapshot([prefill("p0")], []), Size(10, 1)) == ("p0", "")


def test_request_that_no_pool_can_hold() -> None:
    with pytest.raises(InvalidRequest, match=r"needs room for 101 tokens, and the largest prefill pool \(p0 at p0:1\)"):
        choose_pair(snapshot([prefill("p0")], [decode("d0")]), Size(101, 5), 0)
    with pytest.raises(InvalidRequest, match=r"needs room for 103 tokens, and the largest decode pool \(d0 at d0:1\)"):
        choose_pair(snapshot([prefill("p0")], [decode("d0")]), Size(98, 5), 0)


def test_pool_of_a_group_that_is_away_may_come_back() -> None:
    away = dataclasses.replace(prefill("p1", capacity=200), state=State.UNREACHABLE, detail="connection refused")
    with pytest.raises(
        PeerUnavailable, match="p0 at p0:1: smaller than 150 tokens; p1 at p1:1: unreachable: connection"
    ):
        choose_pair(snapshot([prefill("p0"), away], [decode("d0", capacity=200)]), Size(150, 5), 0)


def test_nothing_to_choose_from() -> None:
    with pytest.raises(PeerUnavailable, match="lists no decode group"):
        choose_pair(snapshot([prefill("p0")], []), SIZE, 0)


def test_no_pair_fits_together() -> None:
    it = snapshot([prefill("p0")], [decode("d0", key_size=32)])
    with pytest.raises(GeometryMismatch, match="p0 at p0:1 and decode d0 at d0:1 .*key_size is 8 in prefill and 32"):
        choose_pair(it, SIZE, 0)
    assert set(mismatches(it)) == {("p0", "d0")}
    assert set(unpaired(it)) == {"p0", "d0"}


def test_group_with_one_partner_is_not_unpaired() -> None:
    it = snapshot([prefill("p0")], [decode("d0", key_size=32), decode("d1")])
    assert set(unpaired(it)) == {"d0"}
