"""A worker's link to the leader: an event loop on a thread of its own, beside the compute thread.

The log comes in order; reports go out in order. Transfers run on the same loop. When the leader is lost the
process ends: nobody would ever ask it for anything again, and its compute thread may be waiting for a peer
that is ending too.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import grpc

from headwater.errors import PeerUnavailable
from headwater.exits import Exit
from headwater.lifecycle import get_logger
from headwater.rpc import open_channel
from headwater.security import credentials
from headwater.v1 import worker_pb2, worker_pb2_grpc
from prefill_node.frames import Frames

log = get_logger(__name__)


class Control:
    """The log and the reports of one worker.

    Args:
        leader: "host:port".
        who: this worker.
    """

    def __init__(self, leader: str, who: worker_pb2.JoinRequest) -> None:
        self._leader = leader
        self._who = who
        self._entries: queue.SimpleQueue[worker_pb2.LogRecord | PeerUnavailable] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._frames: Frames | None = None
        self._leaving = asyncio.Event()
        # The number of the next record.
        self._expected = 0
        self._attached = False
        self._closing = False
        self._thread.start()

    def next(self) -> worker_pb2.LogRecord:
        """The next entry of the log; waits for it.

        Raises:
            PeerUnavailable: the leader is not there, or refused this worker.
        """
        entry = self._entries.get()
        if isinstance(entry, PeerUnavailable):
            raise entry
        return entry

    def next_if_any(self) -> worker_pb2.LogRecord | None:
        """The next entry if it has already come."""
        try:
            entry = self._entries.get_nowait()
        except queue.Empty:
            return None
        if isinstance(entry, PeerUnavailable):
            raise entry
        return entry

    def report(self, report: worker_pb2.Report) -> None:
        """Queues a report. From any thread."""
        self._loop.call_soon_threadsafe(self._send, report)

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Runs `function` on the loop, in order with the other calls and reports. From any thread."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def call_and_wait(self, function: Callable[[], Any]) -> Any:
        """Runs `function` on the loop and returns its result. From the compute thread."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def close(self) -> None:
        """Sends what is queued, leaves the leader and ends the thread."""
        self._closing = True
        self._loop.call_soon_threadsafe(self._leaving.set)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            reason = self._loop.run_until_complete(self._attach())
        except grpc.aio.AioRpcError as error:
            reason = error.details() or "the leader is gone"
        except OSError as error:
            reason = f"its port for workers cannot be reached ({error})"
        if self._attached and not self._closing:
            log.error("the leader was lost; ending", leader=self._leader, reason=reason)
            os._exit(Exit.LEADER_LOST)
        self._entries.put(PeerUnavailable(f"leader at {self._leader}: {reason}. Is its group running?"))

    async def _attach(self) -> str:
        """Stays until the connection is over, or this worker leaves. Returns why."""
        async with open_channel(self._leader) as channel:
            joined = await worker_pb2_grpc.WorkerServiceStub(channel).Join(self._who)
        ended: asyncio.Future[str] = self._loop.create_future()
        frames = self._frames = Frames(self._take, ended.set_result, joined.silence_seconds)
        host = self._leader.rpartition(":")[0].strip("[]")
        secure = credentials().context(server=False)
        await self._loop.create_connection(
            lambda: frames, host, joined.port, ssl=secure, server_hostname=host if secure else None
        )
        frames.send(joined.token)
        leaving: asyncio.Future[Any] = asyncio.ensure_future(self._leaving.wait())
        either: set[asyncio.Future[Any]] = {ended, leaving}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._closing:
            # Deliveries that end after the leader has gone still need this loop.
            await leaving
            frames.close()
        leaving.cancel()
        return await ended

    def _take(self, message: bytes) -> None:
        record = worker_pb2.LogRecord.FromString(message)
        if record.sequence != self._expected:
            raise AssertionError(f"record {record.sequence} of the log came where {self._expected} should")
        self._expected += 1
        self._attached = True
        # From here on the leader may leave.
        self._closing |= record.HasField("shutdown")
        self._entries.put(record)

    def _send(self, report: worker_pb2.Report) -> None:
        if self._frames is not None:
            self._frames.send(report.SerializeToString())
