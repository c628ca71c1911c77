"""The leader's links to its workers: processes, the ordered log, the reports.

A worker asks to join (`WorkerService.Join`), opens one connection, and lives as long as it does. `WorkerLinks` starts
the workers that belong on this host, waits for all ranks, brings them up together, and from then on appends entries to
the logs of the stages. What the entries mean is not known here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import signal
import sys
from collections.abc import Callable

from headwater.errors import DeadlinePassed, InvalidConfig, PeerUnavailable, StalePeer
from headwater.lifecycle import get_logger
from headwater.security import credentials
from headwater.v1 import worker_pb2
from prefill_node.frames import Frames

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


@dataclasses.dataclass(frozen=True)
class _Link:
    """A worker that asked to join; attached when its connection is there."""

    process: worker_pb2.JoinRequest
    token: bytes
    frames: Frames | None = None


class WorkerLinks:
    """All ranks of the group.

    Args:
        configs: one per rank.
        local_ranks: ranks that this host must start.
        silence_seconds: a worker that is not heard of for so long is lost.
        on_report: called on the event loop for each report once all ranks are ready.
        on_lost: called once, when a worker that had attached is lost or failed.
    """

    def __init__(
        self,
        configs: list[worker_pb2.WorkerConfig],
        *,
        local_ranks: list[int],
        start_seconds: float,
        silence_seconds: float,
        on_report: Callable[[int, worker_pb2.Report], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._configs = configs
        self._local_ranks = local_ranks
        self._start_seconds = start_seconds
        self._silence_seconds = silence_seconds
        self.on_report = on_report
        self._on_lost = on_lost
        self._links: dict[int, _Link] = {}
        self._server: asyncio.Server | None = None
        # Of the next record of each stage; the ranks' configuration is record 0.
        self._sequences = [1] * configs[0].pp
        self._joined: dict[int, worker_pb2.Joined] = {}
        self.ready: dict[int, worker_pb2.Ready] = {}
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._lost = ""
        self._stopping = False

    @property
    def world_size(self) -> int:
        return len(self._configs)

    @property
    def listening(self) -> bool:
        """Whether workers can join."""
        return self._server is not None and self._server.is_serving()

    async def start(self, address: str) -> None:
        """Starts this host's workers and brings all ranks up.

        Args:
            address: of the leader's gRPC server.

        Raises:
            PeerUnavailable: a worker ended or failed; the message is the worker's own.
            DeadlinePassed: not all ranks were ready in time.
        """
        host = address.rpartition(":")[0].strip("[]")
        self._server = await asyncio.get_running_loop().create_server(
            self._connection, host, 0, ssl=credentials().context(server=True)
        )
        for rank in self._local_ranks:
            await self._spawn(rank, address)
        try:
            async with asyncio.timeout(self._start_seconds):
                await self._until(lambda: len(self._joined) == self.world_size)
                store = worker_pb2.Rendezvous(
                    store_host=self._links[0].process.host, store_port=self._joined[0].store_port
                )
                self.append(store)
                await self._until(lambda: len(self.ready) == self.world_size)
        except TimeoutError:
            missing = sorted(set(range(self.world_size)) - set(self.ready))
            raise DeadlinePassed(
                f"ranks {missing} were not ready within {self._start_seconds:g} s (deadlines.worker_start). Start the "
                f"workers of other hosts with `headwater prefill worker --leader {address} --rank R`."
            ) from None

    def append(self, entry: Entry, stage: int | None = None) -> None:
        """Adds an entry to the logs of all stages, or of one."""
        tp = self._configs[0].tp
        for number in range(len(self._sequences)) if stage is None else (stage,):
            record = worker_pb2.LogRecord(
                sequence=self._sequences[number],
                **{_FIELDS[type(entry)]: entry},  # type: ignore[arg-type]
            ).SerializeToString()
            self._sequences[number] += 1
            for rank in range(number * tp, (number + 1) * tp):
                frames = self._links[rank].frames
                if frames is not None:
                    frames.send(record)

    def join(self, request: worker_pb2.JoinRequest) -> worker_pb2.JoinResponse:
        """A worker asks to be a rank.

        Raises:
            InvalidConfig: the group has no such rank.
            StalePeer: the rank is taken, or the group is ending.
        """
        rank = request.rank
        if rank >= self.world_size:
            raise InvalidConfig(f"rank {rank} does not exist in a group of {self.world_size} ranks (pp × tp).")
        if self._server is None or not self.listening or self._lost:
            raise StalePeer("this incarnation of the group takes no workers (any more); try again.")
        if request.epoch not in ("", self._configs[0].epoch):
            # Its leader was killed while it came up, and this one listens where that one did.
            raise StalePeer(f"process {request.pid} was started by another incarnation of the group, which is over.")
        taken = self._links.get(rank)
        if taken is not None and taken.frames is not None:
            raise StalePeer(f"rank {rank} is already attached, from process {taken.process.pid}.")
        self._links[rank] = _Link(request, secrets.token_bytes(16))
        return worker_pb2.JoinResponse(
            port=self._server.sockets[0].getsockname()[1],
            token=self._links[rank].token,
            silence_seconds=self._silence_seconds,
        )

    def _connection(self) -> Frames:
        """Somebody has connected, and should say the token of a rank next."""

        def first(message: bytes) -> None:
            for rank, link in self._links.items():
                if link.frames is None and secrets.compare_digest(link.token, message):
                    self._attach(rank, link, frames)
                    return
            log.warning("a connection to the workers' port did not begin with a rank's token, and is closed")
            frames.close()

        frames = Frames(first, lambda _: None, self._silence_seconds)
        return frames

    def _attach(self, rank: int, link: _Link, frames: Frames) -> None:
        self._links[rank] = dataclasses.replace(link, frames=frames)
        who = f"rank {rank} (process {link.process.pid} on {link.process.host})"
        frames.on_message = lambda message: self._report(rank, worker_pb2.Report.FromString(message))
        frames.on_end = lambda reason: self.lose(f"{who} left the group: {reason}")
        frames.send(worker_pb2.LogRecord(config=self._configs[rank]).SerializeToString())

    def lose(self, reason: str) -> None:
        """The group cannot go on."""
        if self._stopping or self._lost:
            return
        log.error("the group is lost", reason=reason)
        self._lost = reason
        self._changed.set()
        self._on_lost(reason)

    async def kill(self) -> None:
        """Ends this host's workers at once: their group is lost. Others end by themselves, with their connection."""
        self._close()
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def stop(self, deadline_seconds: float) -> None:
        """Shuts every worker down; kills those of this host that do not end in time, or are only coming up."""
        if len(self.ready) < self.world_size:
            await self.kill()
            return
        self.append(worker_pb2.Shutdown())
        self._close()
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
        command += ["--epoch", self._configs[rank].epoch]
        threads = str(self._configs[rank].num_threads)
        # Passive waiting: a spinning OpenMP thread takes the core of the process it waits for.
        environment = os.environ | {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
        environment |= credentials().environment()
        # Own session: Ctrl-C in a terminal reaches the leader only, which then ends its workers in order.
        process = await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True)
        self._processes[rank] = process
        self._watchers.append(asyncio.ensure_future(self._watch(rank, process)))

    async def _watch(self, rank: int, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self.lose(f"the worker process of rank {rank} ended ({how}); its log says why")

    def _report(self, rank: int, report: worker_pb2.Report) -> None:
        match report.WhichOneof("message"):
            case "joined":
                self._joined[rank] = report.joined
                self._changed.set()
            case "ready":
                self.ready[rank] = report.ready
                self._changed.set()
            case "failed":
                self.lose(f"rank {rank}: {report.failed.error}")
            case _:
                self.on_report(rank, report)

    def _close(self) -> None:
        """Nobody joins any more, and whoever leaves may."""
        self._stopping = True
        if self._server is not None:
            self._server.close()
        for task in self._watchers:
            # Without this, a worker that ended would still be waited for by its watcher.
            task.cancel()
        for link in self._links.values():
            if link.frames is not None:
                link.frames.close()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not self._lost and not condition():
            self._changed.clear()
            await self._changed.wait()
        if self._lost:
            raise PeerUnavailable(f"the group cannot start: {self._lost}")
