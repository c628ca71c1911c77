"""RouterService: translates between gRPC streams and `router.flow`. Decides nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from headwater import tracing
from headwater.errors import CapacityError, InvalidRequest, PeerUnavailable, RequestCancelled
from headwater.v1 import router_pb2, router_pb2_grpc
from router import metrics
from router.flow import Flow
from router.peers import Peers
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


class RegistryServicer(router_pb2_grpc.RegistryServiceServicer):
    """Where groups join by themselves."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def Register(  # noqa: N802 - gRPC's name
        self, request: router_pb2.RegisterRequest, context: object
    ) -> router_pb2.RegisterResponse:
        lease = await self._registry.register(request.name, request.role, request.address)
        return router_pb2.RegisterResponse(lease_seconds=lease)


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """The public API over one flow and one registry."""

    def __init__(
        self,
        flow: Flow,
        registry: Registry,
        peers: Peers,
        metrics_address: str,
        page_address: str,
        *,
        max_requests: int,
    ) -> None:
        self._flow = flow
        self._registry = registry
        self._peers = peers
        self._metrics_address = metrics_address
        self._page_address = page_address
        self._max_requests = max_requests
        self._draining = False
        # Flows that run, some of them after the client has its answer, and their requests.
        self._running: dict[asyncio.Task[None], str] = {}
        self._cancelled: set[asyncio.Task[None]] = set()

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: router_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        if self._draining:
            raise PeerUnavailable("the router is draining: it takes no new requests; use another one.")
        if len(self._running) >= self._max_requests:
            # The flow, which counts how requests end, does not see this one.
            metrics.REQUESTS.labels(CapacityError.__name__).inc()
            raise CapacityError(
                f"{self._max_requests} requests are under way (max_requests). Try again later, or add a router."
            )
        outbox = _Outbox()
        request_id = request.request_id or uuid.uuid4().hex
        with tracing.within(tracing.caller(context)):
            flow = asyncio.create_task(self._flow.run(request, request_id, outbox))
        self._running[flow] = request_id
        flow.add_done_callback(self._running.pop)
        flow.add_done_callback(lambda _: outbox.close())
        try:
            async for response in outbox.responses():
                yield response
            if not outbox.complete:
                await asyncio.wait({flow})
                if flow in self._cancelled:
                    raise RequestCancelled(f"request {request_id} was cancelled at the router.")
                await flow
        finally:
            # The server closes this generator when the client is gone.
            self._cancelled.discard(flow)
            outbox.close()
            if not outbox.complete:
                flow.cancel()

    async def Status(  # noqa: N802
        self, request: router_pb2.StatusRequest, context: object
    ) -> router_pb2.StatusResponse:
        return router_pb2.StatusResponse(
            groups=describe_groups(self._registry.snapshot()),
            metrics_address=self._metrics_address,
            page_address=self._page_address,
        )

    async def Drain(  # noqa: N802
        self, request: router_pb2.DrainRequest, context: object
    ) -> router_pb2.DrainResponse:
        await self._peers.drain(request.group, draining=request.draining)
        self._registry.refresh(request.group)
        return router_pb2.DrainResponse()

    async def Cancel(  # noqa: N802
        self, request: router_pb2.CancelRequest, context: object
    ) -> router_pb2.CancelResponse:
        flows = [flow for flow, request_id in self._running.items() if request_id == request.request_id]
        if not flows:
            raise InvalidRequest(f"no request {request.request_id!r} is under way here.")
        for flow in flows:
            self._cancelled.add(flow)
            flow.cancel()
        return router_pb2.CancelResponse()

    async def drained(self) -> None:
        """Takes no new request from now on, and returns when none is under way."""
        self._draining = True
        while self._running:
            await asyncio.wait(self._running)

    async def close(self, deadline_seconds: float) -> None:
        """Waits for flows whose client has its answer and whose prefill still quiesces; then cancels."""
        if not self._running:
            return
        _, late = await asyncio.wait(self._running, timeout=deadline_seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
