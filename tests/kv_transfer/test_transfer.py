"""Sender and receiver together: real gRPC on loopback, in-memory engine, injected faults."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator

import numpy as np
import pytest

from headwater.errors import HeadwaterError, PeerUnavailable, StalePeer, TransferFailed
from headwater.rpc import Server
from headwater.v1 import common_pb2, transfer_pb2_grpc
from kv_transfer.engine import WriteFailed
from kv_transfer.geometry import Box, CellSize, PagedLayout, Span
from kv_transfer.incoming import Incoming, PagedDestination
from kv_transfer.memory_engine import Faults, MemoryFabric
from kv_transfer.receiver import Receiver, TransferServicer
from kv_transfer.sender import SEGMENT_BYTES, Outgoing, PagedSource, Sender
from kv_transfer.slots import SlotArena

GEOMETRY = common_pb2.Geometry(num_layers=5, num_kv_heads=4, key_size=8, value_size=6, dtype="float32", page_size=4)
CELL = CellSize.of(GEOMETRY)
NUM_TOKENS = 37


class Rank:
    """A source rank: random KV in scattered pages."""

    def __init__(self, world: World, rank: int, layers: Span, heads: Span) -> None:
        self.layout = PagedLayout(layers, heads, page_size=4, num_pages=16, cell=CELL)
        random = np.random.default_rng(rank)
        self.pages = random.permutation(16)[:10].tolist()
        self.pool = random.integers(0, 256, self.layout.total_bytes, dtype=np.uint8)
        engine = world.fabric.engine(f"rank{rank}")
        self.arena = SlotArena(engine, 2, SEGMENT_BYTES)
        self.sender = Sender(
            engine,
            self.arena,
            PagedSource(self.layout, self.pool.ctypes.data),
            rank=rank,
            epoch=f"e{rank}",
            reply_seconds=5,
            acknowledge_seconds=5,
        )
        self.failures: list[HeadwaterError] = []

    def open(self, grant: common_pb2.Grant) -> Outgoing:
        return self.sender.open(grant, self.pages, self.failures.append)


@dataclasses.dataclass
class World:
    """A receiver and the ranks of a PP2·TP2 prefill group."""

    fabric: MemoryFabric
    receiver: Receiver
    arena: SlotArena
    target: np.ndarray  # type: ignore[type-arg]
    ranks: list[Rank] = dataclasses.field(default_factory=list)

    def expect(self, name: str = "t1") -> Incoming:
        layout = PagedLayout(Span(0, 5), Span(0, 4), page_size=NUM_TOKENS, num_pages=1, cell=CELL)
        return self.receiver.expect(name, 1, NUM_TOKENS, PagedDestination(layout, [0], self.target.ctypes.data))

    def check_landed(self) -> None:
        """Every cell of the destination equals its source."""
        for rank in self.ranks:
            for layer, part in itertools.product(range(rank.layout.layers.start, rank.layout.layers.end), (0, 1)):
                source = _part(rank.pool, rank.layout, layer, part)
                slots = [rank.pages[token // 4] * 4 + token % 4 for token in range(NUM_TOKENS)]
                layout = PagedLayout(Span(0, 5), Span(0, 4), NUM_TOKENS, 1, CELL)
                landed = _part(self.target, layout, layer, part)
                heads = slice(rank.layout.heads.start, rank.layout.heads.end)
                np.testing.assert_array_equal(landed[:, heads], source[slots])


def _part(pool: np.ndarray, layout: PagedLayout, layer: int, part: int) -> np.ndarray:  # type: ignore[type-arg]
    size = (CELL.key_bytes, CELL.value_bytes)[part]
    start = (layer - layout.layers.start) * layout.layer_bytes + part * layout.part_bytes[0]
    slots = layout.num_pages * layout.page_size
    flat = pool[start : start + slots * len(layout.heads) * size]
    return flat.reshape(slots, len(layout.heads), size)


@contextlib.asynccontextmanager
async def world(faults: Faults = Faults(), slot_bytes: int = 400) -> AsyncIterator[World]:  # noqa: B008 - frozen
    fabric = MemoryFabric(faults)
    engine = fabric.engine("decode")
    arena = SlotArena(engine, 8, slot_bytes)
    server = Server("127.0.0.1:0", ["headwater.v1.TransferService"])
    receiver = Receiver(
        engine,
        arena,
        epoch="now",
        address=server.address,
        geometry=GEOMETRY,
        slots_per_writer=2,
        reply_seconds=5,
        acknowledge_seconds=5,
        stop_seconds=5,
    )
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(TransferServicer(receiver), server.grpc_server)
    await server.start()
    layout = PagedLayout(Span(0, 5), Span(0, 4), page_size=NUM_TOKENS, num_pages=1, cell=CELL)
    made = World(fabric, receiver, arena, np.zeros(layout.total_bytes, dtype=np.uint8))
    for rank, (layers, heads) in enumerate(itertools.product((Span(0, 2), Span(2, 5)), (Span(0, 2), Span(2, 4)))):
        made.ranks.append(Rank(made, rank, layers, heads))
    try:
        yield made
    finally:
        await server.stop(5)
        receiver.close()
        arena.check()
        assert receiver.open_transfers == 0
        assert arena.held == 0
        for rank in made.ranks:
            rank.sender.close()
            rank.arena.check()
            assert rank.arena.held == 0


def chunks() -> list[Span]:
    return [Span(start, min(start + 10, NUM_TOKENS)) for start in range(0, NUM_TOKENS, 10)]


async def deliver(made: World, incoming: Incoming) -> list[Outgoing]:
    outgoing = [rank.open(incoming.grant) for rank in made.ranks]
    for tokens in chunks():
        for transfer in outgoing:
            transfer.send(tokens)
    for transfer in outgoing:
        transfer.finish(99 if transfer is outgoing[2] else None)
    return outgoing


@pytest.mark.parametrize("faults", [Faults(), Faults(seed=3, overtaken_by=3)])
def test_all_ranks_deliver_and_every_byte_is_right(faults: Faults) -> None:
    async def run() -> None:
        async with world(faults) as made:
            incoming = made.expect()
            outgoing = await deliver(made, incoming)
            delivery = await incoming.committed()
            assert delivery.first_token == 99
            assert delivery.num_bytes == NUM_TOKENS * 5 * 4 * CELL.total
            made.check_landed()
            for transfer in outgoing:
                sent = await transfer.ended()
                assert sent.error is None
            assert made.arena.quarantined == 0

    asyncio.run(run())


def test_nothing_commits_before_the_last_cell_and_the_first_token() -> None:
    async def run() -> None:
        async with world() as made:
            incoming = made.expect()
            outgoing = [rank.open(incoming.grant) for rank in made.ranks]
            for transfer in outgoing[:3]:
                for tokens in chunks():
                    transfer.send(tokens)
                transfer.finish(99 if transfer is outgoing[2] else None)
            for transfer in outgoing[:3]:
                assert (await transfer.ended()).error is None
            assert not incoming.session.terminal
            assert incoming.coverage.missing == NUM_TOKENS * 3 * 2
            for tokens in chunks():
                outgoing[3].send(tokens)
            outgoing[3].finish(None)
            assert (await incoming.committed()).first_token == 99

    asyncio.run(run())


def test_a_dropped_write_is_found_by_its_digest_and_nothing_is_committed() -> None:
    async def run() -> None:
        async with world(Faults(seed=1, drop=0.2)) as made:
            incoming = made.expect()
            outgoing = await deliver(made, incoming)
            with pytest.raises(TransferFailed, match="do not have the digest"):
                await incoming.committed()
            errors = [(await transfer.ended()).error for transfer in outgoing]
            assert any(isinstance(error, TransferFailed) for error in errors)
            # Every writer was told, and vouched for its writes.
            await incoming.abort("over", 5)
            assert made.arena.quarantined == 0

    asyncio.run(run())


def test_a_failed_write_fails_the_transfer_and_quarantines_the_writers_slots() -> None:
    async def run() -> None:
        async with world(Faults(seed=2, late=0.05)) as made:
            incoming = made.expect()
            outgoing = await deliver(made, incoming)
            with pytest.raises(TransferFailed):
                await incoming.committed()
            ended = [await transfer.ended() for transfer in outgoing]
            assert all(sent.error is not None for sent in ended)
            assert any(isinstance(sent.error, WriteFailed) for sent in ended)
            failed_writers = sum(not sent.quiesced for sent in ended)
            await incoming.abort("over", 5)
            assert made.arena.quarantined == 2 * failed_writers
            # The bytes land after all, and hit nothing that is in use.
            before = made.target.copy()
            assert made.fabric.land_late() >= 1
            np.testing.assert_array_equal(before, made.target)

    asyncio.run(run())


def test_the_receiver_aborts_and_every_writer_quiesces() -> None:
    async def run() -> None:
        async with world() as made:
            incoming = made.expect()
            outgoing = [rank.open(incoming.grant) for rank in made.ranks]
            for transfer in outgoing:
                transfer.send(chunks()[0])
            await asyncio.sleep(0)
            await incoming.abort("the client left", 5)
            with pytest.raises(TransferFailed, match="the client left"):
                await incoming.committed()
            for transfer in outgoing:
                transfer.abort()
                assert (await transfer.ended()).error is not None
            assert made.arena.quarantined == 0

    asyncio.run(run())


def test_the_sender_aborts_and_the_receiver_learns_why() -> None:
    async def run() -> None:
        async with world() as made:
            incoming = made.expect()
            outgoing = [rank.open(incoming.grant) for rank in made.ranks]
            for transfer in outgoing:
                transfer.send(chunks()[0])
                transfer.abort()
            with pytest.raises(TransferFailed, match="aborted"):
                await incoming.committed()
            for transfer in outgoing:
                await transfer.ended()
            assert [rank.failures for rank in made.ranks] == [[], [], [], []]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": "before"}, "has restarted"),
        ({"attempt": 2}, "attempt 2 is not the current one"),
        ({"token": b"guess"}, "token does not match"),
        ({"transfer_id": "other"}, "not expected here"),
    ],
)
def test_a_grant_of_another_time_is_refused(change: dict[str, object], message: str) -> None:
    async def run() -> None:
        async with world() as made:
            incoming = made.expect()
            forged = common_pb2.Grant()
            forged.CopyFrom(incoming.grant)
            for field, value in change.items():
                setattr(forged, field, value)
            transfer = made.ranks[0].open(forged)
            transfer.finish(None)
            error = (await transfer.ended()).error
            assert isinstance(error, StalePeer)
            assert message in str(error)
            assert made.ranks[0].failures == [error]
            assert not incoming.session.terminal
            await incoming.abort("over", 5)

    asyncio.run(run())


def test_an_unreachable_receiver_fails_the_transfer_at_once() -> None:
    async def run() -> None:
        async with world() as made:
            incoming = made.expect()
            lost = common_pb2.Grant()
            lost.CopyFrom(incoming.grant)
            lost.transfer_address = "127.0.0.1:1"
            transfer = made.ranks[0].open(lost)
            transfer.finish(None)
            error = (await transfer.ended()).error
            assert isinstance(error, PeerUnavailable)
            assert "127.0.0.1:1" in str(error)
            await incoming.abort("over", 5)

    asyncio.run(run())


def test_a_box_that_arrives_twice_fails_the_transfer() -> None:
    async def run() -> None:
        async with world() as made:
            incoming = made.expect()
            transfer = made.ranks[0].open(incoming.grant)
            transfer.send(Span(0, 10))
            transfer.send(Span(5, 15))
            with pytest.raises(TransferFailed, match="overlaps what has already arrived"):
                await incoming.committed()
            transfer.abort()
            await transfer.ended()

    asyncio.run(run())


def test_box_round_trips_through_its_message() -> None:
    box = Box(Span(1, 3), Span(0, 4), Span(7, 9))
    assert Box.from_proto(box.to_proto()) == box
