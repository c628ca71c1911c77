"""A worker's transfers, by request: opened, fed with computed chunks, closed, reported as released.

Lives on the control loop; the compute thread only hands over what has been computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headwater.errors import HeadwaterError
from headwater.v1 import worker_pb2
from kv_transfer.geometry import Span
from kv_transfer.sender import Outgoing, Sender


class Deliveries:
    """What this rank still owes each request.

    Args:
        report: sends a report to the leader.
    """

    def __init__(self, sender: Sender, report: Callable[[worker_pb2.AttachRequest], None]) -> None:
        self._sender = sender
        self._report = report
        self._open: dict[str, Outgoing | None] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def open(self, request: worker_pb2.OpenRequest) -> None:
        """A request begins. Without a grant there is nothing to send."""
        request_id = request.request_id

        def failed(error: HeadwaterError) -> None:
            failure = worker_pb2.RequestFailed(
                request_id=request_id, error=str(error), error_class=type(error).__name__
            )
            self._report(worker_pb2.AttachRequest(request_failed=failure))

        outgoing = None
        if request.HasField("grant"):
            outgoing = self._sender.open(request.grant, list(request.pages), failed, request_id)
        self._open[request_id] = outgoing

    def computed(self, request_id: str, tokens: Span) -> None:
        """The KV of `tokens` is complete in this rank's pool."""
        outgoing = self._open[request_id]
        if outgoing is not None:
            outgoing.send(tokens)

    def close(self, request_id: str, first_token: int | None, *, abort: bool) -> None:
        """The log says that the request ends. A second close may turn a normal end into an abort."""
        outgoing = self._open.get(request_id)
        if outgoing is not None and abort:
            outgoing.abort()
        elif outgoing is not None:
            outgoing.finish(first_token)
        if request_id in self._open:
            task = asyncio.ensure_future(self._release(request_id, outgoing))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _release(self, request_id: str, outgoing: Outgoing | None) -> None:
        released = worker_pb2.Released(request_id=request_id)
        if outgoing is not None:
            sent = await outgoing.ended()
            released.bytes_sent = sent.num_bytes
            released.num_receipts = sent.num_receipts
        # Of two closes, only the first to get here reports.
        if request_id in self._open:
            del self._open[request_id]
            self._report(worker_pb2.AttachRequest(released=released))
