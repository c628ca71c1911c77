"""Serves this process's Prometheus metrics over HTTP at /metrics."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from headwater.errors import InvalidConfig
from headwater.security import credentials


class MetricsServer:
    """Serves from the moment it is made until `stop`.

    Args:
        host: a name or address of this host; IPv6 with or without brackets.
        port: 0 lets the system choose, and `address` says what it chose.
        registry: what is served.

    Raises:
        InvalidConfig: the port is taken, or the host is not this one.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry = REGISTRY) -> None:
        try:
            own = credentials()
            self._server, self._thread = start_http_server(
                port,
                host.strip("[]"),
                registry,
                certfile=own.cert or None,
                keyfile=own.key or None,
                client_cafile=own.ca if own.mutual else None,
                client_auth_required=own.mutual,
            )
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
