"""The router's HTTP server. Decides who may ask, and with which headers; what is answered is its handlers' business.

Read-only: whatever is not a GET of a path that exists is refused (404, 405). With [security] it speaks TLS, and asks
for certificates if the cluster does; the token of the public API is not asked for, because browsers do not send it and
nothing here tells what prompts or answers say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web
from aiohttp.typedefs import Handler

from headwater.errors import InvalidConfig
from headwater.security import credentials, is_loopback

# What a page of ours may do: load its own files and ask its own server; nothing is fetched from anywhere else.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class PageServer:
    """Serves from `start` to `stop`, in the event loop that calls them.

    Args:
        address: "host:port"; port 0 lets the system choose, and `self.address` says what it chose.
        routes: what it answers.
        on_stop: told when it stops, to end answers that go on.
        stop_seconds: what answers have to end.

    Raises:
        InvalidConfig: plain text may not be spoken there, or the TLS files cannot be used.
    """

    def __init__(
        self,
        address: str,
        routes: Iterable[web.AbstractRouteDef],
        on_stop: Callable[[web.Application], Awaitable[None]],
        stop_seconds: float,
    ) -> None:
        credentials().check_listening(address)
        self.address = address
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._tls = credentials().context(server=True)
        application = web.Application(middlewares=[_own_name_only] if is_loopback(self._host) else [])
        application.add_routes(routes)
        application.on_response_prepare.append(_add_headers)
        application.on_shutdown.append(on_stop)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=stop_seconds)

    async def start(self) -> None:
        """Raises InvalidConfig when the address cannot be listened on."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host.strip("[]"), self._port, ssl_context=self._tls)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise InvalidConfig(
                f"cannot serve the page on {self.address}: {error.strerror or error}. "
                "Choose another page_address in the cluster file; port 0 takes a free one."
            ) from error
        self.address = f"{self._host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Closes the port and ends all answers."""
        await self._runner.cleanup()


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


@web.middleware
async def _own_name_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """On loopback: refuses who calls us by the name of another host, as a browser of this host does for the page of a
    stranger whose name was made to lead here (DNS rebinding).
    """
    if not is_loopback(request.url.host or ""):
        raise web.HTTPMisdirectedRequest(text=f"{request.host} is not this server: it listens on loopback only.\n")
    return await handler(request)
