"""Serves this process's Prometheus metrics over HTTP at /metrics."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping

from prometheus_client import Info, make_wsgi_app, start_http_server

from headwater.errors import InvalidConfig
from headwater.security import credentials

_BUILD = Info("headwater_build", "Version of this process, its role and node in the cluster file.")
_CONFIG = Info("headwater_config", "What this process was told in the cluster file.")


class MetricsServer:
    """Serves from the moment it is made until `stop`.

    Args:
        host: a name or address of this host; IPv6 with or without brackets.
        port: 0 lets the system choose, and `address` says what it chose.
        role: "router", "prefill", "worker" or "decode".
        node: its name in the cluster file.
        config: what else of the cluster file its figures depend on.

    Raises:
        InvalidConfig: the port is taken, or the host is not this one.
    """

    def __init__(self, host: str, port: int, *, role: str, node: str, config: Mapping[str, object]) -> None:
        version = importlib.metadata.version("headwater")
        _BUILD.info({"version": version, "python": platform.python_version(), "role": role, "node": node})
        _CONFIG.info({name: str(value) for name, value in config.items()})
        try:
            own = credentials()
            self._server, self._thread = start_http_server(
                port,
                host.strip("[]"),
                certfile=own.cert or None,
                keyfile=own.key or None,
                client_cafile=own.ca if own.mutual else None,
                client_auth_required=own.mutual,
            )
            # Readers ask for gzip, which would take time from computing to save a few dozen kilobytes.
            self._server.set_app(make_wsgi_app(disable_compression=True))
        except OSError as error:
            raise InvalidConfig(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}. "
                "Choose another metrics_port in the cluster file; 0 takes a free one."
            ) from error
        self.address = f"{host}:{self._server.server_port}"

    def stop(self) -> None:
        """Closes the port and ends the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
