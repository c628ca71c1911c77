"""The registry over groups that answer from a script."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headwater.cluster import parse_cluster
from headwater.errors import PeerUnavailable
from headwater.v1 import decode_pb2, prefill_pb2
from router.registry import Registry
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
        raise NotImplementedError


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
