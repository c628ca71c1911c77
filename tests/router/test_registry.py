"""The registry over groups that answer from a script."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from headwater.cluster import parse_cluster
from headwater.errors import GeometryMismatch, InvalidConfig, PeerUnavailable
from headwater.v1 import decode_pb2, prefill_pb2
from router.registry import LEASE_SECONDS, Registry
from router.snapshot import Snapshot, State
from tests.router.fakes import PATIENCE_SECONDS, tiny_geometry

# With an hour between heartbeats, only `refresh` asks again.
CLUSTER = parse_cluster("""
    [model]
    path = "unused"
    [[prefill]]
    name = "p0"
    address = "127.0.0.1:1"
    [deadlines]
    heartbeat = 3600
""")


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """One prefill group; `answer` is what it says next, None when it is not there."""

    def __init__(self) -> None:
        self.answer: prefill_pb2.DescribePrefillResponse | None = None
        self.answered = 0
        self.decode: decode_pb2.DescribeDecodeResponse | None = None
        # What was added to the peers, and removed.
        self.known: list[str] = []

    def says(self, epoch: str, *, serving: bool = True) -> None:
        self.answer = prefill_pb2.DescribePrefillResponse(
            epoch=epoch, serving=serving, detail="" if serving else "draining", geometry=tiny_geometry()
        )

    async def describe_prefill(self, name: str) -> prefill_pb2.DescribePrefillResponse:
        if self.answer is None:
            raise PeerUnavailable(f"{name}: connection refused")
        self.answered += 1
        return self.answer

    async def describe_decode(self, name: str) -> decode_pb2.DescribeDecodeResponse:
        if self.decode is None:
            raise PeerUnavailable(f"{name}: connection refused")
        return self.decode

    def add(self, name: str, role: str, address: str) -> None:
        self.known.append(f"+{name} {role} {address}")

    async def remove(self, name: str) -> None:
        self.known.append(f"-{name}")


@contextlib.asynccontextmanager
async def running(
    group: Scripted, clock: Clock | None = None
) -> AsyncIterator[tuple[Registry, asyncio.Queue[Snapshot]]]:
    changes: asyncio.Queue[Snapshot] = asyncio.Queue()
    registry = Registry(CLUSTER, group, "tokenizer", changes.put, clock or Clock())
    async with asyncio.timeout(PATIENCE_SECONDS):
        await registry.start()
        yield registry, changes
        await registry.stop()


def test_every_change_is_seen_and_told() -> None:
    async def run() -> None:
        group = Scripted()
        async with running(group) as (registry, changes):
            (first,) = (await changes.get()).prefill
            assert (first.state, first.detail, first.description) == (
                State.UNREACHABLE,
                "p0: connection refused",
                None,
            )
            group.says("a")
            registry.refresh("p0")
            (there,) = (await changes.get()).prefill
            assert (there.state, there.detail) == (State.SERVING, "")
            group.says("a", serving=False)
            registry.refresh("p0")
            (draining,) = (await changes.get()).prefill
            assert (draining.state, draining.detail) == (State.NOT_SERVING, "draining")
            group.says("b", serving=False)
            registry.refresh("p0")
            (restarted,) = (await changes.get()).prefill
            assert restarted.description is not None
            assert restarted.description.epoch == "b"
            group.answer = None
            registry.refresh("p0")
            (gone,) = (await changes.get()).prefill
            assert gone.state is State.UNREACHABLE
            assert gone.description == restarted.description

    asyncio.run(run())


def test_snapshot_does_not_change_and_counts_what_was_sent() -> None:
    async def run() -> None:
        group, clock = Scripted(), Clock()
        group.says("a")
        async with running(group, clock) as (registry, _):
            before = registry.snapshot()
            with registry.dispatched("p0", 30), registry.dispatched("p0", 20) as computed:
                (it,) = registry.snapshot().prefill
                assert (it.sent, it.sent_since) == ((30, 20), (30, 20))
                # A description that was asked for later counts them itself.
                clock.now = 1.0
                described = group.answered
                registry.refresh("p0")
                while group.answered == described or registry.snapshot().prefill[0].sent_since:
                    await asyncio.sleep(0)
                (it,) = registry.snapshot().prefill
                assert (it.sent, it.sent_since) == ((30, 20), ())
                computed()
                computed()
                assert registry.snapshot().prefill[0].sent == (30,)
            assert registry.snapshot().prefill[0].sent == before.prefill[0].sent == ()

    asyncio.run(run())


def decode_says(**changes: str | int) -> decode_pb2.DescribeDecodeResponse:
    return decode_pb2.DescribeDecodeResponse(epoch="a", serving=True, geometry=tiny_geometry(**changes))


def names(registry: Registry) -> list[str]:
    snapshot = registry.snapshot()
    return [group.name for group in (*snapshot.prefill, *snapshot.decode)]


def test_a_group_that_registers_is_known_as_long_as_its_lease() -> None:
    async def run() -> None:
        group, clock = Scripted(), Clock()
        group.says("a")
        group.decode = decode_says()
        async with running(group, clock) as (registry, changes):
            assert await registry.register("d7", "decode", "h:7") == LEASE_SECONDS
            assert names(registry) == ["p0", "d7"]
            assert group.known == ["+d7 decode h:7"]
            clock.now = LEASE_SECONDS - 1
            await registry.register("d7", "decode", "h:7")
            clock.now = 2 * LEASE_SECONDS - 2
            registry.refresh("d7")
            while not changes.empty():
                changes.get_nowait()
            # What it still has to do is waited for.
            with registry.dispatched("d7", 5):
                clock.now = 2 * LEASE_SECONDS
                registry.refresh("d7")
                while registry.snapshot().decode[0].state is State.SERVING:
                    await asyncio.sleep(0)
                assert registry.snapshot().decode[0].detail == "its lease has ended"
            registry.refresh("d7")
            assert (await changes.get()).decode == ()
            assert group.known == ["+d7 decode h:7", "-d7"]
            with pytest.raises(PeerUnavailable, match="d7 has let its lease end"), registry.dispatched("d7", 5):
                pass
            # The listed one needs no lease.
            assert names(registry) == ["p0"]
            # Nobody minds news of a group that is gone.
            registry.failed("d7", PeerUnavailable("gone"))
            registry.succeeded("d7")

    asyncio.run(run())


def test_who_cannot_be_used_is_refused_with_the_reason_and_forgotten() -> None:
    async def run() -> None:
        group = Scripted()
        group.says("a")
        async with running(group) as (registry, _):
            with pytest.raises(PeerUnavailable, match="cannot reach d7 at h:7: d7: connection refused"):
                await registry.register("d7", "decode", "h:7")
            group.decode = decode_says(key_size=32)
            with pytest.raises(GeometryMismatch, match="key_size is 8 in prefill and 32"):
                await registry.register("d7", "decode", "h:7")
            with pytest.raises(InvalidConfig, match="role 'router' is neither"):
                await registry.register("d7", "router", "h:7")
            assert names(registry) == ["p0"]
            assert group.known == ["+d7 decode h:7", "-d7"] * 2

    asyncio.run(run())


def test_a_name_belongs_to_one_group() -> None:
    async def run() -> None:
        group = Scripted()
        group.says("a")
        group.decode = decode_says()
        async with running(group) as (registry, _):
            with pytest.raises(InvalidConfig, match="the name 'p0' belongs to a group at 127.0.0.1:1"):
                await registry.register("p0", "prefill", "elsewhere:1")
            # A listed group may say so itself.
            await registry.register("p0", "prefill", "127.0.0.1:1")
            await registry.register("d7", "decode", "h:7")
            with pytest.raises(InvalidConfig, match="the name 'd7' belongs to a group at h:7"):
                await registry.register("d7", "decode", "h:8")
            # When it is gone another one may take its place.
            group.decode = None
            registry.refresh("d7")
            while registry.snapshot().decode[0].state is not State.UNREACHABLE:
                await asyncio.sleep(0)
            group.decode = decode_says()
            await registry.register("d7", "decode", "h:8")
            assert registry.snapshot().decode[0].address == "h:8"
            assert group.known == ["+d7 decode h:7", "-d7", "+d7 decode h:8"]

    asyncio.run(run())
