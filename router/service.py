"""RouterService: translates between gRPC streams and `router.flow`. Decides nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

from headwater.v1 import router_pb2, router_pb2_grpc
from router.flow import Flow
from router.registry import Registry
from router.status import describe_groups


@dataclasses.dataclass(slots=True)
class _Offer:
    response: router_pb2.GenerateResponse
    taken: asyncio.Future[None]


class _Outbox:
    """Hands responses from the flow's task to the call's generator, one at a time, so that a slow client
    slows its own flow down.
    """

    def __init__(self) -> None:
        self._offers: asyncio.Queue[_Offer | None] = asyncio.Queue()
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False
        # The last response has been taken: the client has its answer.
        self.complete = False

    async def send(self, response: router_pb2.GenerateResponse) -> None:
        """Returns when the transport has taken the response, or will take no more."""
        if self._closed:
            return
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(taken)
        self._offers.put_nowait(_Offer(response, taken))
        try:
            await taken
        finally:
            self._waiting.discard(taken)

    def close(self) -> None:
        """No more responses will be offered, or taken."""
        self._closed = True
        self._offers.put_nowait(None)
        for taken in self._waiting:
            if not taken.done():
                taken.set_result(None)

    async def responses(self) -> AsyncIterator[router_pb2.GenerateResponse]:
        """What was sent, up to the end of the answer. Resuming says that the last one was taken."""
        while (offer := await self._offers.get()) is not None:
            if offer.response.HasField("finished"):
                self.complete = True
            yield offer.response
            if not offer.taken.done():
                offer.taken.set_result(None)
            if self.complete:
                return


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """The public API over one flow and one registry."""

    def __init__(self, flow: Flow, registry: Registry, metrics_address: str) -> None:
        self._flow = flow
        self._registry = registry
        self._metrics_address = metrics_address
        self._running: set[asyncio.Task[None]] = set()

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: router_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        outbox = _Outbox()
        flow = asyncio.create_task(self._flow.run(request, outbox))
        self._running.add(flow)
        flow.add_done_callback(self._running.discard)
        flow.add_done_callback(lambda _: outbox.close())
        try:
            async for response in outbox.responses():
                yield response
            if not outbox.complete:
                await flow
        finally:
            # The server closes this generator when the client is gone.
            outbox.close()
            if not outbox.complete:
                flow.cancel()

    async def Status(  # noqa: N802
        self, request: router_pb2.StatusRequest, context: object
    ) -> router_pb2.StatusResponse:
        return router_pb2.StatusResponse(
            groups=describe_groups(self._registry.snapshot()), metrics_address=self._metrics_address
        )

    async def close(self, deadline_seconds: float) -> None:
        """Waits for flows whose client has its answer and whose prefill still quiesces; then cancels."""
        if not self._running:
            return
        _, late = await asyncio.wait(self._running, timeout=deadline_seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
