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
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from headwater.errors import PeerUnavailable
from headwater.lifecycle import get_logger
from headwater.rpc import open_channel
from headwater.v1 import worker_pb2, worker_pb2_grpc

log = get_logger(__name__)

LEADER_LOST_EXIT_CODE = 75


class Control:
    """The log and the reports of one worker.

    Args:
        leader: "host:port".
        hello: who attaches.
    """

    def __init__(self, leader: str, hello: worker_pb2.Hello) -> None:
        self._leader = leader
        self._hello = hello
        self._entries: queue.SimpleQueue[worker_pb2.AttachResponse | PeerUnavailable] = queue.SimpleQueue()
        self._reports: asyncio.Queue[worker_pb2.AttachRequest | None] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._attached = False
        self._closing = False
        self._thread.start()

    def next(self) -> worker_pb2.AttachResponse:
        """The next entry of the log; waits for it.

        Raises:
            PeerUnavailable: the leader is not there, or refused this worker.
        """
        entry = self._entries.get()
        if isinstance(entry, PeerUnavailable):
            raise entry
        return entry

    def next_if_any(self) -> worker_pb2.AttachResponse | None:
        """The next entry if it has already come."""
        try:
            entry = self._entries.get_nowait()
        except queue.Empty:
            return None
        if isinstance(entry, PeerUnavailable):
            raise entry
        return entry

    def report(self, report: worker_pb2.AttachRequest) -> None:
        """Queues a report. From any thread."""
        self._loop.call_soon_threadsafe(self._reports.put_nowait, report)

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
        self._loop.call_soon_threadsafe(self._reports.put_nowait, None)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._attach())
            reason = "the leader closed the stream"
        except grpc.RpcError as error:
            details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            reason = details or "the leader is gone"
        finally:
            self._loop.close()
        if self._attached and not self._closing:
            log.error("the leader was lost; ending", leader=self._leader, reason=reason)
            os._exit(LEADER_LOST_EXIT_CODE)
        self._entries.put(PeerUnavailable(f"leader at {self._leader}: {reason}. Is its group running?"))

    async def _attach(self) -> None:
        async with open_channel(self._leader) as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).Attach(self._outgoing())
            async for entry in call:
                self._attached = True
                self._entries.put(entry)

    async def _outgoing(self) -> AsyncIterator[worker_pb2.AttachRequest]:
        yield worker_pb2.AttachRequest(hello=self._hello)
        while (report := await self._reports.get()) is not None:
            yield report
