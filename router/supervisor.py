"""Starts the processes that a cluster file places on this host, watches them, and ends them all.

    with Supervisor.of_cluster(path) as supervisor:
        supervisor.wait_ready(60)

Children get SIGTERM when the thread that started them is gone, so none outlives a killed supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.cluster import load_cluster
from headwater.errors import DeadlinePassed, PeerUnavailable, from_rpc_error
from headwater.rpc import open_channel
from headwater.security import credentials
from router.child import Child
from router.placement import Placed, place

# -P: a file called router.py in the working directory must not be taken for this package.
_HEADWATER = (sys.executable, "-P", "-m", "router")


class Supervisor:
    """A set of child processes with one beginning and one end.

    Args:
        placed: what to start, in this order.
        stop_seconds: what a child has to end by itself after SIGTERM.
        log_dir: takes each child's output in NAME.log, made when missing; None: standard error does.
        program: what `Placed.arguments` are given to.
    """

    def __init__(
        self,
        placed: Sequence[Placed],
        *,
        stop_seconds: float,
        log_dir: Path | None = None,
        program: Sequence[str] = _HEADWATER,
    ) -> None:
        self.placed = tuple(placed)
        self.children: dict[str, Child] = {}
        self._stop_seconds = stop_seconds
        self._log_dir = log_dir
        self._program = tuple(program)

    @classmethod
    def of_cluster(cls, path: Path, log_dir: Path | None = None) -> Self:
        """For what a cluster file places here.

        Raises:
            InvalidConfig: the file is wrong, or places nothing here.
        """
        cluster = load_cluster(path)
        # A child drains, ends what still runs, and has as long again to give back what it holds.
        stop_seconds = cluster.deadlines.drain + 2 * cluster.deadlines.stop
        return cls(place(cluster, path.resolve()), stop_seconds=stop_seconds, log_dir=log_dir)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts every process. Call it in a thread that lives as long as they shall."""
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            for process in self.placed:
                self.children[process.name] = self._child(process)
        except OSError:
            self.stop()
            raise

    def restart(self, name: str) -> None:
        """Starts a process anew that has ended, or is ending. Call it in the thread that called `start`."""
        self.children[name].reap(self._stop_seconds)
        (process,) = (process for process in self.placed if process.name == name)
        self.children[name] = self._child(process)

    async def add(
        self, name: str, command: Sequence[str], ready: Callable[[], Awaitable[None]], deadline_seconds: float
    ) -> None:
        """Starts one more program, which ends with the others. Returns when `ready` does.

        Raises:
            PeerUnavailable: a process ended; the message has the last lines of its log.
            DeadlinePassed: it is not ready yet.
        """
        assert name not in self.children
        self.children[name] = self._start(name, command, {})
        try:
            async with asyncio.timeout(deadline_seconds), self._while_all_run():
                await ready()
        except TimeoutError:
            raise DeadlinePassed(f"{name} was not ready after {deadline_seconds:g} s; see its log.") from None

    def _child(self, process: Placed) -> Child:
        # A thread that spins while it waits takes the core of the process it waits for.
        # A worker of another host's leader reads no cluster file.
        openmp = {"OMP_NUM_THREADS": str(process.threads), "OMP_WAIT_POLICY": "passive"}
        return self._start(process.name, [*self._program, *process.arguments], credentials().environment() | openmp)

    def _start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        return Child(name, command, environment, self._log_dir / f"{name}.log" if self._log_dir else None)

    def wait_ready(self, deadline_seconds: float) -> None:
        """`ready` for callers without an event loop."""
        asyncio.run(self.ready(deadline_seconds))

    async def ready(self, deadline_seconds: float) -> None:
        """Returns when every server is SERVING, and a router that runs here has found every group that does.

        Raises:
            PeerUnavailable: a process ended; the message has the last lines of its log.
            DeadlinePassed: naming the servers that are not SERVING.
        """
        missing = {process.name for process in self.placed if process.address is not None}
        try:
            async with asyncio.timeout(deadline_seconds), self._while_all_run():
                async with asyncio.TaskGroup() as waiting:
                    for process in self.placed:
                        if process.address is not None:
                            waiting.create_task(_until_serving(process.name, process.address, "", missing))
                for name, address in self._groups_seen_by_router():
                    missing.add(name)
                    await _until_serving(name, address, name, missing)
        except TimeoutError:
            waited_for = ", ".join(sorted(missing))
            raise DeadlinePassed(f"not SERVING after {deadline_seconds:g} s: {waited_for}; see the log.") from None
        for child in self.children.values():
            child.note_descendants()

    async def first_exit(self) -> Child:
        """The first child that ends, or has ended."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Child] = loop.create_future()
        children = list(self.children.values())

        def on_exit(child: Child) -> None:
            if not ended.done():
                ended.set_result(child)

        for child in children:
            loop.add_reader(child.exit_descriptor, on_exit, child)
        try:
            return await ended
        finally:
            for child in children:
                loop.remove_reader(child.exit_descriptor)

    def stop(self) -> list[str]:
        """Ends every process and returns when none is left.

        Returns:
            One sentence for each child of which something had to be killed.
        """
        children, self.children = self.children, {}
        for child in children.values():
            child.terminate()
        end = time.monotonic() + self._stop_seconds
        report = []
        for name, child in children.items():
            killed = child.reap(end - time.monotonic())
            if killed:
                report.append(f"{name} did not end within {self._stop_seconds:g} s of SIGTERM; killed: {killed}")
        return report

    @contextlib.asynccontextmanager
    async def _while_all_run(self) -> AsyncIterator[None]:
        """Raises PeerUnavailable when a process ends meanwhile, and what the block raises, out of its groups."""
        try:
            async with asyncio.TaskGroup() as watching:
                exits = watching.create_task(self._fail_on_exit())
                yield
                exits.cancel()
        except BaseExceptionGroup as group:
            raise _first_error(group) from None

    async def _fail_on_exit(self) -> None:
        child = await self.first_exit()
        # Reading its log may wait for the last line.
        raise PeerUnavailable(await asyncio.to_thread(child.describe_exit))

    def _groups_seen_by_router(self) -> Iterator[tuple[str, str]]:
        for router in (process for process in self.placed if process.role == "router"):
            assert router.address is not None
            for process in self.placed:
                if process.role != "router" and process.address is not None:
                    yield process.name, router.address


async def _until_serving(name: str, address: str, service: str, missing: set[str]) -> None:
    """Returns when grpc.health.v1 at `address` says that `service` is SERVING, and takes `name` from `missing`."""
    request = health_pb2.HealthCheckRequest(service=service)
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            # The channel's back-off sets the pace of connecting.
            call = stub.Watch(request, wait_for_ready=True)
            try:
                async for answer in call:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        missing.discard(name)
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise from_rpc_error(error, f"{name} at {address}") from error
            finally:
                # Closing the channel does not reach the server's side of a stream.
                call.cancel()


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first_error(error) if isinstance(error, BaseExceptionGroup) else error
