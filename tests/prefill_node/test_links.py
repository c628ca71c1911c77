"""The leader's side of its workers, with workers that only talk."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from headwater.errors import InvalidConfig, PeerUnavailable, StalePeer
from headwater.v1 import worker_pb2
from prefill_node.frames import Frames
from prefill_node.links import WorkerLinks


class FakeWorker:
    """Attaches, and keeps what comes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.records: asyncio.Queue[worker_pb2.LogRecord] = asyncio.Queue()
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.frames = Frames(
            lambda message: self.records.put_nowait(worker_pb2.LogRecord.FromString(message)),
            self.ended.put_nowait,
            60.0,
        )

    async def attach(self, links: WorkerLinks, token: bytes | None = None) -> None:
        joined = links.join(worker_pb2.JoinRequest(rank=self.rank, host="127.0.0.1", pid=100 + self.rank, epoch="now"))
        await asyncio.get_running_loop().create_connection(lambda: self.frames, "127.0.0.1", joined.port)
        self.frames.send(joined.token if token is None else token)

    def report(self, **what: Any) -> None:
        self.frames.send(worker_pb2.Report(**what).SerializeToString())

    async def come_up(self, links: WorkerLinks) -> None:
        await self.attach(links)
        assert (await self.records.get()).HasField("config")
        self.report(joined=worker_pb2.Joined(store_port=7))
        assert (await self.records.get()).rendezvous.store_port == 7
        self.report(ready=worker_pb2.Ready())


class Site:
    """Links of PP2·TP2 whose workers are on other hosts."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[tuple[int, worker_pb2.Report]] = asyncio.Queue()
        self.lost: list[str] = []
        self.links = WorkerLinks(
            [worker_pb2.WorkerConfig(pp=2, tp=2, group="g", epoch="now")] * 4,
            local_ranks=[],
            start_seconds=20,
            silence_seconds=60,
            on_report=lambda rank, report: self.reports.put_nowait((rank, report)),
            on_lost=self.lost.append,
        )
        self.workers = [FakeWorker(rank) for rank in range(4)]

    async def start(self) -> None:
        starting = asyncio.ensure_future(self.links.start("127.0.0.1:1"))
        while not self.links.listening:
            await asyncio.sleep(0.01)
        await asyncio.gather(starting, *(worker.come_up(self.links) for worker in self.workers))


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def test_every_rank_has_the_log_of_its_stage_without_gaps() -> None:
    async def test() -> None:
        site = Site()
        await site.start()
        site.links.append(worker_pb2.OpenRequest(request_id="r"))
        site.links.append(worker_pb2.Step(sequence=5), stage=1)
        site.links.append(worker_pb2.ForgetRequest(request_id="r"))
        for worker in site.workers:
            kinds = ["open", "step", "forget"] if worker.rank >= 2 else ["open", "forget"]
            for number, kind in enumerate(kinds):
                record = await worker.records.get()
                assert (record.sequence, record.WhichOneof("entry")) == (2 + number, kind)
        site.workers[3].report(step_done=worker_pb2.StepDone(sequence=5))
        rank, report = await site.reports.get()
        assert (rank, report.step_done.sequence) == (3, 5)
        assert site.lost == []
        await site.links.stop(1.0)
        for worker in site.workers:
            assert (await worker.records.get()).HasField("shutdown")
            await worker.ended.get()
        assert site.lost == []

    run(test())


def test_a_worker_that_leaves_loses_the_group_once() -> None:
    async def test() -> None:
        site = Site()
        await site.start()
        site.workers[2].frames.close()
        while not site.lost:
            await asyncio.sleep(0.01)
        site.workers[1].report(failed=worker_pb2.WorkerFailed(error="too"))
        await site.links.kill()
        assert site.lost == ["rank 2 (process 102 on 127.0.0.1) left the group: the other end closed the connection"]
        with pytest.raises(StalePeer, match="takes no workers"):
            site.links.join(worker_pb2.JoinRequest(rank=2))

    run(test())


def test_a_worker_that_fails_while_it_comes_up_fails_the_start() -> None:
    async def test() -> None:
        site = Site()
        starting = asyncio.ensure_future(site.links.start("127.0.0.1:1"))
        while not site.links.listening:
            await asyncio.sleep(0.01)
        await site.workers[0].attach(site.links)
        site.workers[0].report(failed=worker_pb2.WorkerFailed(error="no memory"))
        with pytest.raises(PeerUnavailable, match="rank 0: no memory"):
            await starting
        await site.links.kill()

    run(test())


def test_who_may_not_join_changes_nothing() -> None:
    async def test() -> None:
        site = Site()
        starting = asyncio.ensure_future(site.links.start("127.0.0.1:1"))
        while not site.links.listening:
            await asyncio.sleep(0.01)
        with pytest.raises(InvalidConfig, match="rank 4 does not exist in a group of 4 ranks"):
            site.links.join(worker_pb2.JoinRequest(rank=4))
        with pytest.raises(StalePeer, match="process 9 was started by another incarnation"):
            site.links.join(worker_pb2.JoinRequest(rank=1, pid=9, epoch="before"))
        intruder = FakeWorker(1)
        await intruder.attach(site.links, token=b"guess")
        await intruder.ended.get()
        assert intruder.records.empty()
        await asyncio.gather(starting, *(worker.come_up(site.links) for worker in site.workers))
        with pytest.raises(StalePeer, match="rank 1 is already attached, from process 101"):
            site.links.join(worker_pb2.JoinRequest(rank=1))
        assert site.lost == []
        await site.links.kill()

    run(test())
