"""A group that goes away and comes back as another incarnation."""

from __future__ import annotations

import asyncio

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.errors import PeerUnavailable
from headwater.rpc import Server, open_channel
from headwater.v1 import prefill_pb2_grpc
from tests.router.fakes import FakePrefill, kinds, rig, text_request

ANSWER = [70, 80]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_restarted_group_is_noticed_and_used() -> None:
    async def run() -> None:
        async with rig(ANSWER) as it, open_channel(it.address) as channel:
            request = health_pb2.HealthCheckRequest(service="p0")
            health = aiter(health_pb2_grpc.HealthStub(channel).Watch(request))
            assert (await anext(health)).status == SERVING
            assert kinds(await it.answer(text_request(max_tokens=1)))[-1] == "finished"

            await it.prefill_server.stop(0)
            assert (await anext(health)).status == NOT_SERVING
            (gone, _) = (await it.client.status()).groups
            assert (gone.state, gone.epoch) == ("unreachable", "first")
            with pytest.raises(PeerUnavailable, match=f"p0 at {it.prefill_server.address}: unreachable"):
                await it.answer(text_request(max_tokens=1))

            restarted = FakePrefill([90])
            restarted.description.epoch = "second"
            server = Server(it.prefill_server.address, [])
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(restarted, server.grpc_server)
            await server.start()
            try:
                assert (await anext(health)).status == SERVING
                (back, _) = (await it.client.status()).groups
                assert (back.state, back.epoch) == ("serving", "second")
                responses = await it.answer(text_request(max_tokens=1))
                assert [one.token.id for one in responses if one.HasField("token")] == [90]
            finally:
                await server.stop(0)

    asyncio.run(run())
