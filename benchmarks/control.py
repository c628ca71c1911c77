"""What the leader of a PP8·TP4 group costs, and how soon its decisions are carried out. Part of `benchmarks.pipeline`.

starts: emulated ranks at the speed of the profile; how long after its input is there a stage begins.
leader: 50 steps a second, which 32 real ranks would need more than two cores for. The leader is the real one, on a core
    of its own; one other process is all ranks: 32 connections, which take the log and report as workers do and compute
    nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.emulated import POLICIES, START_SECONDS, TOKENS, emulated_cluster, ttft
from benchmarks.report import processor_seconds
from headwater.cluster import load_cluster
from headwater.lifecycle import Event
from headwater.rpc import open_channel
from headwater.v1 import worker_pb2, worker_pb2_grpc
from prefill_node.frames import Frames
from router.placement import place
from router.supervisor import Supervisor

PP, TP = 8, 4
STEPS_PER_S = 50
_IDLE_SECONDS, _BUSY_SECONDS = 20, 30
_REQUESTS = 10


def stage_starts(log: str) -> list[float]:
    """Seconds from when a rank had both its input and nothing else to do until it began to compute, of every step but a
    request's first. From the ranks' own log lines; they all read one machine's clock.
    """
    spans: dict[str, dict[tuple[int, int], dict[str, float]]] = {}
    for line in log.splitlines():
        if not line.startswith("{"):
            # Of a library.
            continue
        entry = json.loads(line)
        if entry["message"] in (Event.CHUNK_STARTED.value, Event.CHUNK_FINISHED.value):
            chunk = spans.setdefault(entry["request"], {}).setdefault((entry["tokens"][0], entry["rank"]), {})
            chunk[entry["message"]] = entry["monotonic"]
    late = []
    for chunks in spans.values():
        starts = sorted({start for start, _ in chunks})
        for before, start in itertools.pairwise(starts):
            for rank in {rank for _, rank in chunks}:
                inputs = [chunks[before, rank]] + ([chunks[start, rank - TP]] if rank >= TP else [])
                ready = max(chunk[Event.CHUNK_FINISHED.value] for chunk in inputs)
                late.append(max(0.0, chunks[start, rank][Event.CHUNK_STARTED.value] - ready))
    return sorted(late)


def measure_starts(console: Console) -> dict[str, Any]:
    """Requests of 128K one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        path = emulated_cluster(Path(folder), PP, TP, "fixed", level="info")
        with Supervisor.of_cluster(path, Path(folder)) as supervisor:
            supervisor.wait_ready(START_SECONDS)
            address = load_cluster(path).prefill[0].address
            for _ in range(_REQUESTS):
                asyncio.run(ttft(address, [2] * TOKENS))
        late = stage_starts((Path(folder) / "p.log").read_text(encoding="utf-8"))
    console.print(f"{len(late)} stage starts")
    return {
        "control_p50_ms": round(late[len(late) // 2] * 1e3, 3),
        "control_p99_ms": round(late[len(late) * 99 // 100] * 1e3, 3),
    }


# --- the leader


class _Ranks:
    """All ranks of a group, as far as the leader can tell."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._frames: dict[int, Frames] = {}
        # Of each stage: steps that it has not begun, when it will have done the newest one, and those that the next
        # stage has not begun.
        self._given: list[collections.deque[worker_pb2.Step]] = [collections.deque() for _ in range(PP)]
        self._free = [0.0] * PP
        self._done_at: list[dict[int, float]] = [{} for _ in range(PP)]
        self.ended = asyncio.Event()

    async def attach(self, rank: int, leader: str) -> None:
        async with open_channel(leader) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            joined = await stub.Join(worker_pb2.JoinRequest(rank=rank, host="127.0.0.1", pid=os.getpid()))
        frames = self._frames[rank] = Frames(
            lambda message: self._take(rank, worker_pb2.LogRecord.FromString(message)),
            lambda _: self.ended.set(),
            joined.silence_seconds,
        )
        await self._loop.create_connection(lambda: frames, "127.0.0.1", joined.port)
        frames.send(joined.token)

    def _report(self, rank: int, **report: Any) -> None:
        self._frames[rank].send(worker_pb2.Report(**report).SerializeToString())

    def _take(self, rank: int, record: worker_pb2.LogRecord) -> None:
        match record.WhichOneof("entry"):
            case "config":
                self._report(rank, joined=worker_pb2.Joined(store_port=1))
            case "rendezvous":
                self._report(rank, ready=worker_pb2.Ready())
            case "step" if rank % TP == 0:
                self._given[rank // TP].append(record.step)
                self._begin(rank // TP)
            case "step":
                self._loop.call_later(1 / STEPS_PER_S, self._release, rank, record.step)

    def _begin(self, stage: int) -> None:
        """What the stage has input for; the ranks of one stage hand to those of the next."""
        given = self._given[stage]
        while given and (stage == 0 or given[0].sequence in self._done_at[stage - 1]):
            step = given.popleft()
            ready = self._done_at[stage - 1].pop(step.sequence) if stage else 0.0
            done_at = max(self._free[stage], ready, self._loop.time()) + 1 / STEPS_PER_S
            self._free[stage] = done_at
            self._loop.call_at(done_at, self._finish, stage, step)
            if stage < PP - 1:
                self._done_at[stage][step.sequence] = done_at
                self._begin(stage + 1)

    def _finish(self, stage: int, step: worker_pb2.Step) -> None:
        sampled = [
            worker_pb2.SampledToken(request_id=chunk.request_id, token_id=2)
            for chunk in step.chunks
            if chunk.last and stage == PP - 1
        ]
        done = worker_pb2.StepDone(
            sequence=step.sequence, sampled=sampled, compute_seconds=1 / STEPS_PER_S, wait_seconds=1e-4
        )
        self._report(stage * TP, step_done=done)
        self._release(stage * TP, step)

    def _release(self, rank: int, step: worker_pb2.Step) -> None:
        for chunk in step.chunks:
            if chunk.last:
                self._report(rank, released=worker_pb2.Released(request_id=chunk.request_id))


async def _be_all_ranks(leader: str) -> None:
    os.sched_setaffinity(0, {1})
    ranks = _Ranks()
    for rank in range(PP * TP):
        await ranks.attach(rank, leader)
    await ranks.ended.wait()


async def _busy(address: str, leader: psutil.Process) -> tuple[float, float]:
    """Share of a core, and steps a second, while two requests are always under way."""
    num_steps = -(-TOKENS // POLICIES["fixed"][0])
    ended = 0

    async def ask() -> None:
        nonlocal ended
        while True:
            await ttft(address, [2] * TOKENS)
            ended += 1

    async with asyncio.TaskGroup() as asking:
        tasks = [asking.create_task(ask()) for _ in range(2)]
        await asyncio.sleep(3)
        cpu, before, started = processor_seconds(leader), ended, time.perf_counter()
        await asyncio.sleep(_BUSY_SECONDS)
        cpu, seconds = processor_seconds(leader) - cpu, time.perf_counter() - started
        for task in tasks:
            task.cancel()
    return cpu / seconds, (ended - before) * num_steps / seconds


def measure_leader() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        # The leader starts no worker: they are another host's.
        path = emulated_cluster(Path(folder), PP, TP, "fixed", more='hosts = ["127.0.0.2"]\n')
        address = load_cluster(path).prefill[0].address
        placed = [process for process in place(load_cluster(path), path) if process.name == "p"]
        with Supervisor(placed, stop_seconds=30, log_dir=Path(folder)) as supervisor:
            leader = psutil.Process(supervisor.children["p"].pid)
            leader.cpu_affinity([0])
            ranks = subprocess.Popen([sys.executable, "-m", "benchmarks.control", address])
            try:
                supervisor.wait_ready(START_SECONDS)
                before = processor_seconds(leader)
                time.sleep(_IDLE_SECONDS)
                idle = (processor_seconds(leader) - before) / _IDLE_SECONDS
                share, steps_per_s = asyncio.run(_busy(address, leader))
            finally:
                ranks.terminate()
                ranks.wait()
    return {
        "leader_cpu_share_idle": round(idle, 4),
        "leader_steps_per_s": round(steps_per_s, 1),
        "leader_cpu_share_at_50_steps_per_s": round(share, 4),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control", description="All ranks of a group.")
    parser.add_argument("leader")
    asyncio.run(_be_all_ranks(parser.parse_args().leader))
