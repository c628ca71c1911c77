"""The leader's links to its workers: processes, the ordered log, the reports.

A worker opens one stream (`WorkerService.Attach`) and lives as long as it does. `WorkerLinks` starts the
workers that belong on this host, waits for all ranks, brings them up together, and from then on appends
entries to every rank's log. What the entries mean is not known here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable

from headwater.errors import DeadlinePassed, InvalidConfig, PeerUnavailable, StalePeer
from headwater.lifecycle import get_logger
from headwater.v1 import worker_pb2

log = get_logger(__name__)

Entry = (
    worker_pb2.Rendezvous
    | worker_pb2.OpenRequest
    | worker_pb2.Step
    | worker_pb2.AbortRequest
    | worker_pb2.RedirectDelivery
    | worker_pb2.ForgetRequest
    | worker_pb2.Shutdown
)
_FIELDS: dict[type, str] = {
    worker_pb2.Rendezvous: "rendezvous",
    worker_pb2.OpenRequest: "open",
    worker_pb2.Step: "step",
    worker_pb2.AbortRequest: "abort",
    worker_pb2.RedirectDelivery: "redirect",
    worker_pb2.ForgetRequest: "forget",
    worker_pb2.Shutdown: "shutdown",
}


class _Link:
    """One worker's log."""

    def __init__(self, hello: worker_pb2.Hello) -> None:
        self.host = hello.host
        self.pid = hello.pid
        # None: the worker has left.
        self.queue: asyncio.Queue[worker_pb2.AttachResponse | None] = asyncio.Queue()
        self._sequence = 0

    def append(self, entry: worker_pb2.AttachResponse) -> None:
        entry.sequence = self._sequence
        self._sequence += 1
        self.queue.put_nowait(entry)


class WorkerLinks:
    """All ranks of the group.

    Args:
        configs: one per rank.
        local_ranks: ranks that this host must start.
        address: of the leader, for the workers it starts.
        on_report: called on the event loop for each report once all ranks are ready.
        on_lost: called once, when a worker that had attached is lost or failed.
    """

    def __init__(
        self,
        configs: list[worker_pb2.WorkerConfig],
        *,
        local_ranks: list[int],
        start_seconds: float,
        on_report: Callable[[int, worker_pb2.AttachRequest], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._configs = configs
        self._local_ranks = local_ranks
        self._start_seconds = start_seconds
        self.on_report = on_report
        self._on_lost = on_lost
        self._links: dict[int, _Link] = {}
        self._joined: dict[int, worker_pb2.Joined] = {}
        self.ready: dict[int, worker_pb2.Ready] = {}
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()
        self._lost = ""
        self._losing: asyncio.Future[None] | None = None
        self._stopping = False

    @property
    def world_size(self) -> int:
        return len(self._configs)

    async def start(self, address: str) -> None:
        """Starts this host's workers and brings all ranks up.

        Raises:
            PeerUnavailable: a worker ended or failed; the message is the worker's own.
            DeadlinePassed: not all ranks were ready in time.
        """
        for rank in self._local_ranks:
            await self._spawn(rank, address)
        try:
            async with asyncio.timeout(self._start_seconds):
                await self._until(lambda: len(self._joined) == self.world_size)
                store = worker_pb2.Rendezvous(store_host=self._links[0].host, store_port=self._joined[0].store_port)
                self.append(store)
                await self._until(lambda: len(self.ready) == self.world_size)
        except TimeoutError:
            missing = sorted(set(range(self.world_size)) - set(self.ready))
            raise DeadlinePassed(
                f"ranks {missing} were not ready within {self._start_seconds:g} s (deadlines.worker_start). Start the "
                f"workers of other hosts with `headwater prefill worker --leader {address} --rank R`."
            ) from None

    def append(self, entry: Entry, stage: int | None = None) -> None:
        """Adds an entry to the log of every rank, or of the ranks of one stage."""
        tp = self._configs[0].tp
        for rank, link in self._links.items():
            if stage is None or rank // tp == stage:
                link.append(worker_pb2.AttachResponse(**{_FIELDS[type(entry)]: entry}))  # type: ignore[arg-type]

    async def attach(
        self, requests: AsyncIterator[worker_pb2.AttachRequest]
    ) -> AsyncIterator[worker_pb2.AttachResponse]:
        """One worker's stream."""
        first = await anext(requests, None)
        if first is None or not first.HasField("hello"):
            raise StalePeer("a worker must begin with `hello`.")
        rank = first.hello.rank
        if rank >= self.world_size:
            raise InvalidConfig(f"rank {rank} does not exist in a group of {self.world_size} ranks (pp × tp).")
        if rank in self._links:
            raise StalePeer(f"rank {rank} is already attached, from process {self._links[rank].pid}.")
        link = _Link(first.hello)
        self._links[rank] = link
        link.append(worker_pb2.AttachResponse(config=self._configs[rank]))
        reading = asyncio.ensure_future(self._read(rank, requests))
        reading.add_done_callback(lambda _: link.queue.put_nowait(None))
        try:
            while (entry := await link.queue.get()) is not None:
                yield entry
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await self._lose(f"rank {rank} (process {link.pid} on {link.host}) left the group")

    def lose(self, reason: str) -> None:
        """The group cannot go on, though every worker is still attached."""
        self._losing = asyncio.ensure_future(self._lose(reason))

    async def kill(self) -> None:
        """Ends this host's workers at once: their group is lost. Others end by themselves, with their stream."""
        self._stopping = True
        for task in self._watchers:
            task.cancel()
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def stop(self, deadline_seconds: float) -> None:
        """Shuts every worker down; kills those of this host that do not end in time, or are only coming up."""
        if len(self.ready) < self.world_size:
            await self.kill()
            return
        self._stopping = True
        self.append(worker_pb2.Shutdown())
        for task in self._watchers:
            # Without this, a worker that ended would still be waited for by its watcher.
            task.cancel()
        end = asyncio.get_running_loop().time() + deadline_seconds
        for rank, process in self._processes.items():
            try:
                async with asyncio.timeout_at(end):
                    await process.wait()
            except TimeoutError:
                log.warning("worker did not stop in time and is killed", rank=rank, pid=process.pid)
                process.kill()
                await process.wait()

    async def _spawn(self, rank: int, address: str) -> None:
        command = [sys.executable, "-m", "prefill_node.worker", "--leader", address, "--rank", str(rank)]
        threads = str(self._configs[rank].num_threads)
        # Passive waiting: a spinning OpenMP thread takes the core of the process it waits for.
        environment = os.environ | {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
        # Own session: Ctrl-C in a terminal reaches the leader only, which then ends its workers in order.
        process = await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True)
        self._processes[rank] = process
        self._watchers.append(asyncio.ensure_future(self._watch(rank, process)))

    async def _watch(self, rank: int, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        await self._lose(f"the worker process of rank {rank} ended ({how}); its log says why")

    async def _read(self, rank: int, requests: AsyncIterator[worker_pb2.AttachRequest]) -> None:
        async for report in requests:
            if report.HasField("joined"):
                await self._note(self._joined, rank, report.joined)
            elif report.HasField("ready"):
                await self._note(self.ready, rank, report.ready)
            elif report.HasField("failed"):
                await self._lose(f"rank {rank}: {report.failed.error}")
            else:
                self.on_report(rank, report)

    async def _note(
        self, table: dict[int, worker_pb2.Joined] | dict[int, worker_pb2.Ready], rank: int, what: object
    ) -> None:
        async with self._changed:
            table[rank] = what  # type: ignore[assignment]
            self._changed.notify_all()

    async def _lose(self, reason: str) -> None:
        if self._stopping or self._lost:
            return
        log.error("the group is lost", reason=reason)
        async with self._changed:
            self._lost = reason
            self._changed.notify_all()
        self._on_lost(reason)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._lost) or condition())
        if self._lost:
            raise PeerUnavailable(f"the group cannot start: {self._lost}")
