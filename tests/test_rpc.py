"""Servers as every process opens them: addresses, health, reflection, and calls whose client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headwater import security
from headwater.errors import InvalidConfig
from headwater.rpc import Server, open_channel
from headwater.v1 import prefill_pb2, prefill_pb2_grpc

SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name
NOT_SERVING, SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
PATIENCE_SECONDS = 30


class Endless(prefill_pb2_grpc.PrefillServiceServicer):
    """Answers without end; says when it was made to stop."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def Prefill(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.PrefillRequest, context: object
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        try:
            while True:
                yield prefill_pb2.PrefillResponse()
        finally:
            self.closed.set()

    async def DescribePrefill(  # noqa: N802
        self, request: prefill_pb2.DescribePrefillRequest, context: object
    ) -> prefill_pb2.DescribePrefillResponse:
        return prefill_pb2.DescribePrefillResponse()


@contextlib.asynccontextmanager
async def started(servicer: Endless) -> AsyncIterator[Server]:
    server = Server("127.0.0.1:0", [SERVICE])
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server.grpc_server)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await server.start()
        try:
            yield server
        finally:
            await server.stop(0)


def test_health_starts_as_not_serving_and_is_watched() -> None:
    async def run() -> None:
        async with started(Endless()) as server, open_channel(server.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", SERVICE):
                assert (await health.Check(health_pb2.HealthCheckRequest(service=service))).status == NOT_SERVING
            watch = aiter(health.Watch(health_pb2.HealthCheckRequest(service=SERVICE)))
            assert (await anext(watch)).status == NOT_SERVING
            await server.set_serving(serving=True)
            assert (await anext(watch)).status == SERVING
            await server.set_health("p0", serving=True)
            assert (await health.Check(health_pb2.HealthCheckRequest(service="p0"))).status == SERVING

    asyncio.run(run())


def test_watcher_that_leaves_takes_no_other_with_it() -> None:
    async def run() -> None:
        async with started(Endless()) as server, open_channel(server.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            calls = [health.Watch(health_pb2.HealthCheckRequest(service="p0")) for _ in range(2)]
            left, stays = [aiter(call) for call in calls]
            assert [(await anext(watch)).status for watch in (left, stays)] == [SERVICE_UNKNOWN] * 2
            calls[0].cancel()
            for serving, status in ((True, SERVING), (False, NOT_SERVING)):
                await server.set_health("p0", serving=serving)
                assert (await anext(stays)).status == status

    asyncio.run(run())


def test_stopping_tells_watchers_and_does_not_wait_for_them() -> None:
    async def run() -> None:
        async with started(Endless()) as server, open_channel(server.address) as channel:
            await server.set_serving(serving=True)
            await server.set_health("p0", serving=True)
            health = health_pb2_grpc.HealthStub(channel)
            watches = [aiter(health.Watch(health_pb2.HealthCheckRequest(service=name))) for name in ("", "p0")]
            assert [(await anext(watch)).status for watch in watches] == [SERVING] * 2
            # Longer than the test has.
            stopping = asyncio.create_task(server.stop(10 * PATIENCE_SECONDS))
            for watch in watches:
                assert [answer.status async for answer in watch] == [NOT_SERVING]
            await stopping

    asyncio.run(run())


def test_check_of_an_unknown_service_is_not_found() -> None:
    async def run() -> None:
        async with started(Endless()) as server, open_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="p0"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    asyncio.run(run())


def test_reflection_lists_the_services() -> None:
    async def run() -> None:
        async with started(Endless()) as server, open_channel(server.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            (answer,) = [one async for one in stub.ServerReflectionInfo(iter([request]))]
            names = {service.name for service in answer.list_services_response.service}
            assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}

    asyncio.run(run())


def test_generator_is_closed_when_its_client_leaves() -> None:
    async def run() -> None:
        servicer = Endless()
        async with started(servicer) as server, open_channel(server.address) as channel:
            call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(prefill_pb2.PrefillRequest())
            await anext(aiter(call))
            call.cancel()
            await servicer.closed.wait()

    asyncio.run(run())


def test_taken_port_is_refused_with_a_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        async def run() -> None:
            Server(f"127.0.0.1:{port}", [])

        with pytest.raises(InvalidConfig) as caught:
            asyncio.run(run())
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port}: Address already in use. Stop the process that uses the port "
        f"(ss -ltnp 'sport = :{port}') or choose another address in the cluster file."
    )


@pytest.mark.parametrize("address", ["192.0.2.1:0", "192.0.2.1:50000", "no-such-host.invalid:50000"])
def test_address_of_another_host_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "_current", security.Credentials(allow_plain_text=True))

    async def run() -> None:
        Server(address, [])

    with pytest.raises(InvalidConfig, match=f"^cannot listen on {address}: "):
        asyncio.run(run())
