"""Servers and channels as every Headwater process opens them.

Decides channel options, health, reflection and the mapping of exceptions to gRPC status codes. A servicer
only raises `HeadwaterError`s; it never calls `context.abort` itself.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headwater.errors import (
    ERROR_CLASS_KEY,
    RETRY_AFTER_KEY,
    CapacityError,
    HeadwaterError,
    InvalidConfig,
    Unauthenticated,
)
from headwater.health import Health
from headwater.lifecycle import get_logger
from headwater.security import credentials

log = get_logger(__name__)

# A prompt of a million token ids is 4 MB packed; room for eight of them.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

# gRPC drops a status whose headers exceed 8 KB, and a byte outside of ASCII takes three there.
_LONGEST_MESSAGE_BYTES = 2048
_CUT = " … (cut; the rest is in the log of the process that failed)"

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Reconnect soon after a peer comes back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Notice a silent peer.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # One process asks several servers on one host; never through a proxy of the environment.
    ("grpc.enable_http_proxy", 0),
]

SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A second server on the same port must fail, not share it.
    ("grpc.so_reuseport", 0),
    # Notice a silent peer: a worker that is stopped holds its stream open.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to `address` ("host:port"), with this process's credentials. Connects on first use."""
    secret = credentials().channel_credentials
    if secret is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, secret, options=CHANNEL_OPTIONS)


def open_blocking_channel(address: str) -> grpc.Channel:
    """As `open_channel`, for threads."""
    secret = credentials().channel_credentials
    if secret is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, secret, options=CHANNEL_OPTIONS)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: HeadwaterError) -> None:
    trailing = [(ERROR_CLASS_KEY, type(error).__name__)]
    if isinstance(error, CapacityError):
        trailing.append((RETRY_AFTER_KEY, str(round(1e3 * error.retry_after_seconds))))
    await context.abort(error.code, _sendable(str(error)), tuple(trailing))


def _sendable(message: str) -> str:
    """As much of a message as a status can carry; what is cut is logged.

    A longer status is dropped as a whole, class and all, and the client sees RESOURCE_EXHAUSTED.
    """
    encoded = message.encode("utf-8", errors="replace")
    if len(encoded) > _LONGEST_MESSAGE_BYTES:
        log.error("an error's message is too long to be sent whole", error=message)
        return encoded[:_LONGEST_MESSAGE_BYTES].decode("utf-8", errors="ignore") + _CUT
    return encoded.decode("utf-8")


def _unary(behaviour: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(request, context)
        except HeadwaterError as error:
            return await _abort(context, error)

    return call


def _streaming(behaviour: Callable[[Any, Any], AsyncGenerator[Any, None]]) -> Callable[[Any, Any], Awaitable[None]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            # Closed here and now when the call is cancelled, not whenever the generator is collected.
            async with contextlib.aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    await context.write(response)
        except HeadwaterError as error:
            await _abort(context, error)

    return call


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns a raised `HeadwaterError` into its status code, message and class name."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        # None, for a method that does not exist, is passed on; the types do not know that it may be.
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler  # type: ignore[return-value]
        parts = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary), *parts)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(_streaming(handler.unary_stream), *parts)
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(_streaming(handler.stream_stream), *parts)
        return handler  # type: ignore[no-any-return]


def authorization(token: str | None = None) -> tuple[tuple[str, str], ...]:
    """Metadata with the token of a router's API; None: this process's, if it has one."""
    token = credentials().token if token is None else token
    return (("authorization", f"Bearer {token}"),) if token else ()


class _TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls of some services without the token."""

    def __init__(self, services: Iterable[str], token: str) -> None:
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler: Any = await continuation(handler_call_details)
        if handler is None or not str(handler_call_details.method).startswith(self._prefixes):
            return handler  # type: ignore[no-any-return]
        sent = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        if isinstance(sent, str) and secrets.compare_digest(sent.encode(), self._expected):
            return handler  # type: ignore[no-any-return]

        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await _abort(
                context,
                Unauthenticated("this router asks for a token: set HEADWATER_TOKEN_FILE, or pass it to the client."),
            )

        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(refuse, handler.request_deserializer, handler.response_serializer)


class Server:
    """A gRPC server with health and reflection.

    Health starts as NOT_SERVING; call `set_serving` when the process can take requests.

    Args:
        address: "host:port"; port 0 lets the system choose, and `self.address` says what it chose.
        services: full service names, for health and reflection.
        token: what the services ask for; empty: nothing.

    Raises:
        InvalidConfig: the address is taken, or not to be listened on without a certificate.
    """

    def __init__(self, address: str, services: Iterable[str], token: str = "") -> None:
        self._services = list(services)
        credentials().check_listening(address)
        secret = credentials().server_credentials()
        interceptors: list[grpc.aio.ServerInterceptor] = [_ErrorInterceptor()]
        if token:
            interceptors.insert(0, _TokenInterceptor(self._services, token))
        self._server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        self._health = Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [*self._services, "grpc.health.v1.Health", reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        require_free_port(address)
        try:
            if secret is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, secret)
        except RuntimeError as error:
            raise InvalidConfig(f"cannot listen on {address}: {error}. Choose another address.") from error
        self.address = f"{address.rpartition(':')[0]}:{port}"

    @property
    def grpc_server(self) -> grpc.aio.Server:
        """For the generated `add_…Servicer_to_server` functions."""
        return self._server

    async def start(self) -> None:
        await self.set_serving(serving=False)
        await self._server.start()

    async def set_serving(self, *, serving: bool) -> None:
        """Sets grpc.health.v1 for the server ("") and each of its services."""
        for name in ["", *self._services]:
            self._health.set(name, serving=serving)

    async def set_health(self, name: str, *, serving: bool) -> None:
        """Sets grpc.health.v1 for a name that is not one of the services."""
        self._health.set(name, serving=serving)

    async def stop(self, grace_seconds: float) -> None:
        """NOT_SERVING first, then no new calls; running calls get `grace_seconds` to end."""
        self._health.end()
        await self._server.stop(grace_seconds)


def require_free_port(address: str) -> None:
    """GRPC's own message for a taken port names neither the port nor the way out.

    Raises:
        InvalidConfig: "host:port" cannot be listened on.
    """
    host, _, wanted = address.rpartition(":")
    port = int(wanted)
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As gRPC does: connections of an earlier server in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise InvalidConfig(
                f"cannot listen on {address}: {error.strerror}. Stop the process that uses the port "
                f"(ss -ltnp 'sport = :{port}') or choose another address in the cluster file."
            ) from error
