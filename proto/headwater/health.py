"""grpc.health.v1 for one server.

Not `grpc_health`'s own servicer: there, one watcher that leaves takes the notices of all others of the same
service with it, and a watcher holds a draining server up for its whole grace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # has no types
    """What this server says of its services, by name; "" is the server as a whole."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        # Set, and replaced, at every change.
        self._changed = asyncio.Event()
        self._ended = False

    def set(self, name: str, *, serving: bool) -> None:
        """Changes nothing after `end`."""
        if not self._ended:
            self._serving[name] = serving
            self._tell()

    def end(self) -> None:
        """Nothing serves any more: watchers hear it, and their calls end."""
        self._serving = dict.fromkeys(self._serving, False)
        self._ended = True
        self._tell()

    async def Check(  # noqa: N802 - gRPC's name
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"this server has no service {request.service!r}.")
        return self._answer(request.service)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: object
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        told: health_pb2.HealthCheckResponse | None = None
        while True:
            changed = self._changed
            answer = self._answer(request.service)
            if answer != told:
                yield answer
                told = answer
            elif self._ended:
                return
            else:
                await changed.wait()

    def _answer(self, name: str) -> health_pb2.HealthCheckResponse:
        serving = self._serving.get(name)
        if serving is None:
            return _Status(status=_Status.SERVICE_UNKNOWN)
        return _Status(status=_Status.SERVING if serving else _Status.NOT_SERVING)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
