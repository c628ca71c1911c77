"""A receiver inside the test process: takes delivery of KV from a real prefill group and lets the test read it."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence

import torch

from headwater.cluster import Cluster
from headwater.rpc import Server
from headwater.tokens import pack
from headwater.v1 import prefill_pb2, transfer_pb2_grpc
from kv_transfer.connectors.ragged import RequestKv
from kv_transfer.mooncake import MooncakeEngine
from kv_transfer.receiver import Receiver, ReceiverOptions, TransferServicer
from kv_transfer.slots import SlotArena
from kv_transfer.writer import Writer
from tests.harness import GREEDY, prefill_stub


@dataclasses.dataclass(frozen=True)
class Landed:
    """Keys and values of each layer, [heads, tokens, size], and the first token."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    first_token: int


async def landed_kv(cluster: Cluster, group: str, token_ids: Sequence[int], *, direct: bool = False) -> Landed:
    """Runs one prompt on `group` and has its KV delivered here, over Mooncake."""
    engine = MooncakeEngine("127.0.0.1", "auto", cluster.deadlines.write)
    arena = SlotArena(engine, 64, 4 * 1024 * 1024)
    writer = Writer(engine, write_seconds=cluster.deadlines.write, max_bytes_in_flight=arena.slot_bytes)
    server = Server("127.0.0.1:0", ["headwater.v1.TransferService"])
    async with prefill_stub(cluster.prefill_named(group).address) as stub:
        described = await stub.DescribePrefill(prefill_pb2.DescribePrefillRequest())
        receiver = Receiver(
            engine,
            arena,
            writer,
            epoch="test",
            address=server.address,
            geometry=described.geometry,
            options=ReceiverOptions(direct=direct),
        )
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(TransferServicer(receiver), server.grpc_server)
        await server.start()
        try:
            kv = RequestKv(described.geometry, len(token_ids))
            incoming = receiver.expect(uuid.uuid4().hex, 1, len(token_ids), kv)
            request = prefill_pb2.PrefillRequest(
                request_id=uuid.uuid4().hex, tokens=pack(token_ids), sampling=GREEDY, grant=receiver.grant(incoming)
            )
            events = [event async for event in stub.Prefill(request)]
            delivery = await incoming.committed()
            assert events[-1].completed.bytes_sent == delivery.num_bytes
        finally:
            await server.stop(5)
            await receiver.close()
            writer.close()
            arena.check()
            assert (arena.held, arena.quarantined) == (0, 0)
            arena.close()
            engine.close()
    layers = [
        (keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in zip(kv.keys_CHK, kv.values_CHV, strict=True)
    ]
    return Landed(layers, delivery.first_token)
