"""What the router answers over HTTP.

| GET | answer |
| --- | --- |
| `/` | the page, which lives on the two below; its script and style are `/page.js` and `/page.css` |
| `/api/snapshot` | the cluster now: `router.page.view.PageSnapshot` as JSON |
| `/api/events` | the same as server-sent events, at once and then once a second, while the connection lasts |
| `/api/requests/ID` | one request: `router.page.view.RequestDetail` as JSON; 404 when it is not remembered |
| `/sd` | every process that serves metrics, for Prometheus's `http_sd_configs` |
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import time
from typing import Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from headwater.errors import HeadwaterError
from headwater.security import credentials
from headwater.v1 import prefill_pb2
from router.history import History, Leg
from router.page.discovery import prometheus_targets
from router.page.view import RouterView, TraceView, view_detail, view_snapshot, view_trace
from router.snapshot import Snapshot

# Between two events of one stream.
_PERIOD_SECONDS = 1.0
# Who watches at the same time; the next one is refused.
_MOST_WATCHERS = 64
# What the page consists of, by path.
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}


class Groups(Protocol):
    """What the page needs of `router.registry.Registry`."""

    def snapshot(self) -> Snapshot: ...


class Tracers(Protocol):
    """What the page needs of `router.peers.Peers`."""

    async def trace_prefill(self, name: str, request_id: str) -> prefill_pb2.TracePrefillResponse: ...


class Routes:
    """Handlers over what the router knows.

    Args:
        metrics_address: the router's own.
    """

    def __init__(
        self, router: RouterView, metrics_address: str, groups: Groups, history: History, tracers: Tracers
    ) -> None:
        self._router = router
        self._metrics_address = metrics_address
        self._groups = groups
        self._history = history
        self._tracers = tracers
        self._num_watchers = 0
        self._newest = b""
        self._newest_at = float("-inf")
        self._closing = asyncio.Event()

    def all(self) -> list[web.RouteDef]:
        return [
            *(web.get(path, _file(*file)) for path, file in _FILES.items()),
            web.get("/api/snapshot", self._snapshot),
            web.get("/api/events", self._events),
            web.get("/api/requests/{id}", self._request),
            web.get("/sd", self._discovery),
        ]

    async def close(self, _: web.Application) -> None:
        """Ends all streams."""
        self._closing.set()

    async def _snapshot(self, _: web.Request) -> web.Response:
        return web.Response(body=self._encoded(), content_type="application/json")

    def _encoded(self) -> bytes:
        return msgspec.json.encode(view_snapshot(self._router, self._groups.snapshot(), self._history))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._num_watchers >= _MOST_WATCHERS:
            raise web.HTTPServiceUnavailable(text=f"{_MOST_WATCHERS} pages are open; close one.\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self._num_watchers += 1
        try:
            await response.prepare(request)
            while not self._closing.is_set():
                await response.write(b"data: " + self._shared() + b"\n\n")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), _PERIOD_SECONDS)
        except ConnectionError:
            # Nobody watches any more.
            pass
        finally:
            self._num_watchers -= 1
        return response

    def _shared(self) -> bytes:
        """A snapshot that is younger than half a period: it is made for all who watch."""
        now = time.monotonic()
        if now - self._newest_at >= _PERIOD_SECONDS / 2:
            self._newest, self._newest_at = self._encoded(), now
        return self._newest

    async def _request(self, request: web.Request) -> web.Response:
        request_id = request.match_info["id"]
        record = self._history.find(request_id)
        if record is None:
            raise web.HTTPNotFound(text=f"no request {request_id!r} is under way here, or has ended lately.\n")
        traces = await asyncio.gather(*(self._trace(leg) for leg in record.legs))
        detail = view_detail(record, self._history.now(), traces)
        return web.Response(body=msgspec.json.encode(detail), content_type="application/json")

    async def _trace(self, leg: Leg) -> TraceView:
        try:
            said = await self._tracers.trace_prefill(leg.prefill, leg.request_id)
        except HeadwaterError as error:
            return TraceView(leg.prefill, str(error))
        return view_trace(leg.prefill, leg.request_id, said)

    async def _discovery(self, _: web.Request) -> web.Response:
        tls = bool(credentials().cert)
        return web.json_response(
            prometheus_targets(self._groups.snapshot(), self._router.name, self._metrics_address, tls=tls)
        )


def _file(name: str, content_type: str) -> Handler:
    body = (importlib.resources.files(__package__) / "static" / name).read_bytes()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    return answer
