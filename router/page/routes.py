"""What the router answers over HTTP.

| GET | answer |
| --- | --- |
| `/sd` | every process that serves metrics, for Prometheus's `http_sd_configs` |
"""

from __future__ import annotations

from aiohttp import web

from headwater.security import credentials
from router.page.discovery import prometheus_targets
from router.registry import Registry


class Routes:
    """Handlers over what the router knows.

    Args:
        name: the router's, in the cluster file.
        metrics_address: the router's own.
    """

    def __init__(self, name: str, metrics_address: str, registry: Registry) -> None:
        self._name = name
        self._metrics_address = metrics_address
        self._registry = registry

    def all(self) -> list[web.RouteDef]:
        return [web.get("/sd", self._discovery)]

    async def _discovery(self, _: web.Request) -> web.Response:
        tls = bool(credentials().cert)
        return web.json_response(
            prometheus_targets(self._registry.snapshot(), self._name, self._metrics_address, tls=tls)
        )
