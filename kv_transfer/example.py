"""One request's KV from one process to another, over Mooncake: python -m kv_transfer.example."""

from __future__ import annotations

import asyncio
import os
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from headwater.rpc import Server
from headwater.v1 import common_pb2, transfer_pb2_grpc
from kv_transfer import memory
from kv_transfer.geometry import CellSize, PagedLayout, Span
from kv_transfer.incoming import PagedDestination
from kv_transfer.mooncake import MooncakeEngine
from kv_transfer.receiver import Receiver, TransferServicer
from kv_transfer.sender import PagedSource, Sender, WriterRank
from kv_transfer.slots import SlotArena
from kv_transfer.writer import Writer

GEOMETRY = common_pb2.Geometry(num_layers=4, num_kv_heads=2, key_size=64, value_size=64, dtype="bfloat16", page_size=16)
# Eight pages of sixteen tokens on both sides; the request has four of them, in any order.
LAYOUT = PagedLayout(Span(0, 4), Span(0, 2), 16, 8, CellSize.of(GEOMETRY))
PREFILL_PAGES, DECODE_PAGES, NUM_TOKENS = [5, 0, 3, 2], [1, 2, 3, 4], 60


async def decode(prefill: Connection) -> None:
    """Grants one transfer, tells the other process, and waits until the KV is there and verified."""
    engine = MooncakeEngine("127.0.0.1", "auto", write_seconds=30)
    writer, arena = Writer(engine, write_seconds=30, max_bytes_in_flight=2**24), SlotArena(engine, 8, 2**20)
    server, kv = Server("127.0.0.1:0", ["headwater.v1.TransferService"]), memory.HostBuffer(LAYOUT.total_bytes)
    receiver = Receiver(engine, arena, writer, epoch="epoch-1", address=server.address, geometry=GEOMETRY)
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(TransferServicer(receiver), server.grpc_server)
    await server.start()
    incoming = receiver.expect("transfer-1", 1, NUM_TOKENS, PagedDestination(LAYOUT, DECODE_PAGES, kv.address))
    prefill.send_bytes(receiver.grant(incoming).SerializeToString())
    delivery = await incoming.committed()
    print(f"{delivery.num_bytes} bytes over {engine.transport}, first token {delivery.first_token}")  # noqa: T201
    await server.stop(5)
    await receiver.close()


async def prefill(grant: common_pb2.Grant) -> None:
    """Sends two chunks as they are computed, then the token that was sampled."""
    engine, kv = MooncakeEngine("127.0.0.1", "auto", write_seconds=30), memory.HostBuffer(LAYOUT.total_bytes)
    writer, arena = Writer(engine, write_seconds=30, max_bytes_in_flight=2**24), SlotArena(engine, 8, 2**20)
    sender = Sender(writer, arena, PagedSource(LAYOUT, kv.address), GEOMETRY, WriterRank(0, "epoch-2"))
    outgoing = sender.open(grant, PREFILL_PAGES, on_failure=print)
    outgoing.send(Span(0, 32))
    outgoing.send(Span(32, NUM_TOKENS))
    outgoing.finish(first_token=42)
    await outgoing.ended()


if __name__ == "__main__":
    here, there = Pipe()
    asyncio.run(decode(there) if os.fork() else prefill(common_pb2.Grant.FromString(here.recv_bytes())))
