"""Sender and receiver together: real gRPC on loopback, in-memory engine, injected faults."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import numpy as np
import pytest

from headwater.errors import DeadlinePassed, InvalidRequest, PeerUnavailable, StalePeer, TransferFailed, from_rpc_error
from headwater.rpc import open_channel
from headwater.v1 import common_pb2, transfer_pb2, transfer_pb2_grpc
from kv_transfer import memory
from kv_transfer.engine import WriteFailed
from kv_transfer.geometry import Box, Span
from kv_transfer.memory_engine import Faults
from kv_transfer.receiver import ReceiverOptions
from kv_transfer.sender import Outgoing
from kv_transfer.session import ReceiverState
from kv_transfer.wire import choose
from tests.kv_transfer.world import (
    HEADS,
    KEY,
    LAYERS,
    VALUE,
    DecodeGroup,
    PrefillGroup,
    Shape,
    Transfer,
    World,
    assert_landed,
    truth,
    until,
    world,
)

NUM_TOKENS = 37
PAGES = [9, 3, 4, 5, 14, 0, 1, 11, 12, 7]


def chunks(start: int = 0) -> list[Span]:
    return [Span(at, min(at + 10, NUM_TOKENS)) for at in range(start, NUM_TOKENS, 10)]


def start(made: World, name: str = "t1") -> tuple[Transfer, list[Outgoing]]:
    """A transfer that nothing has been sent of; all of its KV is computed."""
    transfer = made.decode.expect(name, NUM_TOKENS, made.prefill.shape.dtype)
    made.prefill.compute(name, NUM_TOKENS, PAGES, range(NUM_TOKENS))
    return transfer, made.prefill.open(transfer.grant, PAGES)


def send_all(outgoing: Sequence[Outgoing], spans: Sequence[Span]) -> None:
    for tokens in spans:
        for one in outgoing:
            one.send(tokens)
    for one in outgoing:
        one.finish(99 if one is outgoing[-1] else None)


async def abort_all(transfer: Transfer) -> None:
    for incoming in transfer.incoming:
        await incoming.abort("over", 5)


@pytest.mark.parametrize("faults", [Faults(), Faults(seed=3, overtaken_by=6), Faults(seed=4, duplicate=0.3)])
def test_all_ranks_deliver_and_every_byte_is_right(faults: Faults) -> None:
    async def run() -> None:
        async with world(faults) as made:
            transfer, outgoing = start(made)
            send_all(outgoing, chunks())
            delivery = await transfer.incoming[0].committed()
            assert delivery.first_token == 99
            assert delivery.num_bytes == NUM_TOKENS * LAYERS * HEADS * (KEY + VALUE) * 4
            assert_landed(transfer, "float32")
            for one in outgoing:
                assert (await one.ended()).error is None
            # Those that land twice hit slots that nobody reads any more.
            made.fabric.land_late()
            assert_landed(transfer, "float32")
            assert made.decode.ranks[0].arena.retired == 0

    asyncio.run(run())


def test_nothing_commits_before_the_last_cell_and_the_first_token() -> None:
    async def run() -> None:
        async with world() as made:
            transfer, outgoing = start(made)
            incoming = transfer.incoming[0]
            send_all(outgoing[1:], chunks())
            for one in outgoing[1:]:
                assert (await one.ended()).error is None
            assert not incoming.session.terminal
            assert incoming.coverage.missing == NUM_TOKENS * 2 * 2
            for tokens in chunks():
                outgoing[0].send(tokens)
            outgoing[0].finish(None)
            assert (await incoming.committed()).first_token == 99

    asyncio.run(run())


def test_a_dropped_write_is_found_by_its_digest_and_nothing_is_committed() -> None:
    async def run() -> None:
        async with world(Faults(seed=1, drop=0.2)) as made:
            transfer, outgoing = start(made)
            send_all(outgoing, chunks())
            with pytest.raises(TransferFailed, match="do not have the digest"):
                await transfer.incoming[0].committed()
            errors = [(await one.ended()).error for one in outgoing]
            assert any(isinstance(error, TransferFailed) for error in errors)
            # Every writer was told, and vouched for its writes.
            await abort_all(transfer)
            assert made.decode.ranks[0].arena.retired == 0

    asyncio.run(run())


def test_what_lands_in_a_slot_while_it_is_unpacked_is_found() -> None:
    """The digest is of what will be read: checking a slot before it is copied would miss this."""

    async def run() -> None:
        async with world() as made:
            transfer, outgoing = start(made)
            unpack = transfer.kv[0].unpack

            def unpack_late(box: Box, address: int) -> None:
                memory.view(address, 4)[:] = b"late"
                unpack(box, address)

            transfer.kv[0].unpack = unpack_late
            send_all(outgoing, chunks())
            with pytest.raises(TransferFailed, match="do not have the digest"):
                await transfer.incoming[0].committed()
            for one in outgoing:
                await one.ended()
            await abort_all(transfer)

    asyncio.run(run())


@pytest.mark.parametrize("faults", [Faults(seed=2, late=0.05), Faults(seed=2, fail=0.05), Faults(seed=2, refuse=0.05)])
def test_a_failed_write_fails_the_transfer_and_its_slots_get_new_memory(faults: Faults) -> None:
    async def run() -> None:
        async with world(faults) as made:
            arena = made.decode.ranks[0].arena
            known = {arena.address(slot) for slot in range(arena.num_slots)}
            transfer, outgoing = start(made)
            send_all(outgoing, chunks())
            with pytest.raises(TransferFailed):
                await transfer.incoming[0].committed()
            ended = [await one.ended() for one in outgoing]
            assert all(sent.error is not None for sent in ended)
            assert any(isinstance(sent.error, WriteFailed) for sent in ended)
            failed_writers = sum(not sent.quiesced for sent in ended)
            # A write that was refused never began.
            assert (failed_writers == 0) == (faults.refuse > 0)
            await abort_all(transfer)
            await until(lambda: arena.quarantined == 0)
            assert arena.retired == ReceiverOptions().slots_per_writer * failed_writers
            assert (
                len(known & {arena.address(slot) for slot in range(arena.num_slots)}) == arena.num_slots - arena.retired
            )
            # The bytes land after all, and hit nothing.
            made.fabric.land_late()
            made.fabric.faults = Faults()
            again, outgoing = start(made, "t2")
            send_all(outgoing, chunks())
            await again.incoming[0].committed()
            assert_landed(again, "float32")

    asyncio.run(run())


def test_a_write_that_fails_is_told_at_once_and_not_with_the_next_chunk() -> None:
    async def run() -> None:
        async with world(Faults(seed=2, fail=1)) as made:
            transfer, outgoing = start(made)
            outgoing[0].send(chunks()[0])
            # Nothing more is computed meanwhile.
            with pytest.raises(TransferFailed, match="rank 0 ended it: .* failed"):
                await asyncio.wait_for(transfer.incoming[0].committed(), 30)
            for one in outgoing:
                one.abort()
                await one.ended()

    asyncio.run(run())


def test_a_write_that_hangs_is_given_up_by_its_deadline_and_what_it_reads_waits_for_it() -> None:
    """S08: neither a segment nor a page goes to somebody else while the engine may read it."""

    async def run() -> None:
        async with world(Faults(seed=2, hang=0.05), write_seconds=0.3) as made:
            transfer, outgoing = start(made)
            send_all(outgoing, chunks())
            with pytest.raises(TransferFailed):
                await transfer.incoming[0].committed()
            late = "not done within 0.3 s (deadlines.write)"
            failures = [rank.failures for rank in made.prefill.ranks]
            await until(lambda: any(late in str(error) for errors in failures for error in errors))
            await abort_all(transfer)
            # Everybody has been told; these are the writes that are still under way.
            waiting = [asyncio.ensure_future(one.ended()) for one in outgoing]
            await asyncio.sleep(0.1)
            held = sum(rank.arena.held for rank in made.prefill.ranks)
            assert held + sum(not one.done() for one in waiting) >= 1
            assert made.fabric.land_late() >= held
            assert any(sent.error is not None for sent in await asyncio.gather(*waiting))
            await until(lambda: all(rank.arena.held == 0 for rank in made.prefill.ranks))

    asyncio.run(run())


def test_the_receiver_aborts_and_every_writer_quiesces() -> None:
    async def run() -> None:
        async with world() as made:
            transfer, outgoing = start(made)
            for one in outgoing:
                one.send(chunks()[0])
            await asyncio.sleep(0)
            await transfer.incoming[0].abort("the client left", 5)
            with pytest.raises(TransferFailed, match="the client left"):
                await transfer.incoming[0].committed()
            for one in outgoing:
                one.abort()
                assert (await one.ended()).error is not None
            assert made.decode.ranks[0].arena.retired == 0

    asyncio.run(run())


def test_the_sender_aborts_and_the_receiver_learns_why() -> None:
    async def run() -> None:
        async with world() as made:
            transfer, outgoing = start(made)
            for one in outgoing:
                one.send(chunks()[0])
                one.abort()
            with pytest.raises(TransferFailed, match="aborted"):
                await transfer.incoming[0].committed()
            for one in outgoing:
                await one.ended()
            assert [rank.failures for rank in made.prefill.ranks] == [[], [], [], []]

    asyncio.run(run())


def test_a_writer_whose_task_is_cancelled_leaves_its_lane_to_the_others() -> None:
    """What waits for a write may be cancelled; the write, and the thread that watches it, may not be hurt."""

    async def run() -> None:
        async with world(
            Faults(seed=2, hang=1.0), Shape(), options=ReceiverOptions(direct=True), write_seconds=0.2
        ) as made:
            transfer, outgoing = start(made)
            send_all(outgoing, chunks())
            with pytest.raises(TransferFailed):
                await transfer.incoming[0].committed()
            await until(lambda: made.prefill.ranks[0].failures)
            # It waits for the engine, which still reads the pages.
            (task,) = outgoing[0]._tasks
            assert not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            made.fabric.faults = Faults()
            made.fabric.land_late()
            await abort_all(transfer)
            again, outgoing = start(made, "t2")
            send_all(outgoing, chunks())
            await again.incoming[0].committed()
            assert_landed(again, "float32")
            for one in outgoing:
                assert (await one.ended()).error is None

    asyncio.run(run())


def forge(grant: common_pb2.Grant, **change: object) -> common_pb2.Grant:
    forged = common_pb2.Grant()
    forged.CopyFrom(grant)
    for field, value in change.items():
        setattr(forged if field in ("attempt", "transfer_id") else forged.targets[0], field, value)
    return forged


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": "before"}, "has restarted"),
        ({"attempt": 2}, "attempt 2 is not the current one"),
        ({"token": b"guess"}, "token does not match"),
        ({"transfer_id": "other"}, "not expected here"),
    ],
)
def test_a_grant_of_another_time_is_refused_and_changes_nothing(change: dict[str, object], message: str) -> None:
    async def run() -> None:
        async with world() as made:
            transfer, outgoing = start(made)
            rank = made.prefill.ranks[0]
            stale = rank.sender.open(forge(transfer.grant, **change), PAGES, rank.failures.append)
            stale.finish(None)
            error = (await stale.ended()).error
            assert isinstance(error, StalePeer)
            assert message in str(error)
            assert rank.failures == [error]
            # The transfer itself goes on as if nothing had been.
            send_all(outgoing, chunks())
            await transfer.incoming[0].committed()
            assert_landed(transfer, "float32")

    asyncio.run(run())


def test_a_replayed_delivery_is_refused() -> None:
    async def run() -> None:
        async with world() as made:
            transfer, outgoing = start(made)
            rank = made.prefill.ranks[0]
            for tokens in chunks():
                outgoing[0].send(tokens)
            outgoing[0].finish(None)
            assert (await outgoing[0].ended()).error is None
            again = rank.sender.open(transfer.grant, PAGES, rank.failures.append)
            again.finish(None)
            assert "rank 0 has already opened a delivery" in str((await again.ended()).error)
            send_all(outgoing[1:], chunks())
            await transfer.incoming[0].committed()
            assert_landed(transfer, "float32")

    asyncio.run(run())


def test_a_grant_whose_transfer_is_over_is_refused() -> None:
    async def run() -> None:
        async with world() as made:
            transfer, outgoing = start(made)
            send_all(outgoing, chunks())
            await transfer.incoming[0].committed()
            for one in outgoing:
                await one.ended()
            late = made.prefill.open(transfer.grant, PAGES)
            for one in late:
                one.finish(None)
                assert isinstance((await one.ended()).error, StalePeer)

    asyncio.run(run())


def test_an_unreachable_receiver_fails_the_transfer_at_once() -> None:
    async def run() -> None:
        async with world() as made:
            transfer, outgoing = start(made)
            rank = made.prefill.ranks[0]
            lost = forge(transfer.grant, transfer_address="127.0.0.1:1")
            one = rank.sender.open(lost, PAGES, rank.failures.append)
            one.finish(None)
            error = (await one.ended()).error
            assert isinstance(error, PeerUnavailable)
            assert "127.0.0.1:1" in str(error)
            for other in outgoing:
                other.abort()
                await other.ended()
            await abort_all(transfer)

    asyncio.run(run())


def test_a_box_that_arrives_twice_fails_the_transfer() -> None:
    async def run() -> None:
        async with world() as made:
            transfer, outgoing = start(made)
            outgoing[0].send(Span(0, 10))
            outgoing[0].send(Span(5, 15))
            with pytest.raises(TransferFailed, match="overlaps what has already arrived"):
                await transfer.incoming[0].committed()
            for one in outgoing:
                one.abort()
                await one.ended()

    asyncio.run(run())


def test_a_lease_starts_with_the_first_chunk_and_runs_out_without_new_work() -> None:
    """S05, S07, S09: what waits for ever is ended by a reaper; what only queues is not."""

    async def run() -> None:
        async with world(options=ReceiverOptions(lease_seconds=0.5)) as made:
            queueing = made.decode.expect("queueing", NUM_TOKENS)
            transfer, outgoing = start(made)
            outgoing[0].send(chunks()[0])
            with pytest.raises(DeadlinePassed, match=r"no chunk came for 0.5 s \(deadlines.lease\)"):
                await transfer.incoming[0].committed()
            for one in outgoing:
                one.abort()
                assert (await one.ended()).error is not None
            # It has been waiting for longer than a lease, and nothing has come yet.
            assert queueing.incoming[0].session.state is ReceiverState.GRANTED
            await abort_all(queueing)

    asyncio.run(run())


def test_the_next_attempt_goes_on_from_the_last_verified_chunk() -> None:
    async def run() -> None:
        options = ReceiverOptions(resume_seconds=30)
        async with world(options=options, target=Shape(page_size=7)) as made:
            transfer, outgoing = start(made)
            for tokens in chunks()[:2]:
                for one in outgoing:
                    one.send(tokens)
            # The third chunk arrives from one rank only, and the group dies.
            outgoing[0].send(chunks()[2])
            await until(lambda: transfer.incoming[0].coverage.prefix() == 20)
            for one in outgoing:
                one.abort()
                await one.ended()
            change = await anext(transfer.incoming[0].changes())
            assert (change.attempt, change.verified_tokens) == (1, 20)  # type: ignore[union-attr]
            grant = await made.decode.regrant(transfer, 2)
            assert (grant.attempt, grant.verified_tokens) == (2, 20)
            # Another group, of another layout, that has computed nothing of this prompt.
            other = PrefillGroup(made.fabric, Shape(3, 1, page_size=16), "p2")
            for rank in other.ranks:
                rank.scribble([2, 1, 0])
                fetched = await rank.fetch(grant, [2, 1, 0])
                assert fetched == 20 * len(rank.layout.layers) * HEADS * (KEY + VALUE) * 4
            other.compute("t1", NUM_TOKENS, [2, 1, 0], range(20, NUM_TOKENS))
            second = other.open(grant, [2, 1, 0])
            send_all(second, chunks(start=20))
            assert (await transfer.incoming[0].committed()).first_token == 99
            assert_landed(transfer, "float32")
            # What was fetched is what the first group computed.
            for rank in other.ranks:
                before = bytes(rank.pool.view())
                rank.compute("t1", NUM_TOKENS, [2, 1, 0], range(NUM_TOKENS))
                assert bytes(rank.pool.view()) == before
            for one in second:
                assert (await one.ended()).error is None
            # The first group is refused from now on.
            stale = made.prefill.ranks[0].sender.open(transfer.grant, PAGES, lambda _: None)
            stale.finish(None)
            assert isinstance((await stale.ended()).error, StalePeer)
            other.close()

    asyncio.run(run())


def test_an_attempt_that_nobody_takes_over_fails_after_a_bounded_time() -> None:
    async def run() -> None:
        async with world(options=ReceiverOptions(resume_seconds=0.3)) as made:
            transfer, outgoing = start(made)
            for one in outgoing:
                one.send(chunks()[0])
                one.abort()
            with pytest.raises(TransferFailed, match="no other began within 0.3 s"):
                await transfer.incoming[0].committed()
            with pytest.raises(StalePeer, match="cannot begin|not expected"):
                await made.decode.regrant(transfer, 2)
            for one in outgoing:
                await one.ended()

    asyncio.run(run())


def test_an_attempt_out_of_turn_is_refused() -> None:
    async def run() -> None:
        async with world(options=ReceiverOptions(resume_seconds=30)) as made:
            transfer, outgoing = start(made)
            for attempt in (0, 1, 3):
                with pytest.raises(StalePeer, match=f"attempt {attempt} cannot begin"):
                    await made.decode.regrant(transfer, attempt)
            send_all(outgoing, chunks())
            await transfer.incoming[0].committed()
            assert_landed(transfer, "float32")

    asyncio.run(run())


def test_the_kv_goes_to_another_decode_group_from_pages_still_held() -> None:
    async def run() -> None:
        async with world() as made:
            transfer, outgoing = start(made)
            for one in outgoing:
                one.send(chunks()[0])
            await abort_all(transfer)
            for one in outgoing:
                one.abort()
                await one.ended()
            # As a decode group of another layout would grant it.
            other = DecodeGroup(made.fabric, Shape(1, 2, page_size=5), "d2")
            await other.start()
            second = other.expect("t1", NUM_TOKENS, attempt=2)
            outgoing = made.prefill.open(second.grant, PAGES)
            send_all(outgoing, [Span(0, 10), *chunks()[1:]])
            for incoming in second.incoming:
                assert (await incoming.committed()).first_token == 99
            assert_landed(second, "float32")
            for one in outgoing:
                assert (await one.ended()).error is None
            await other.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("source", "target"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16"), ("bfloat16", "float16")],
)
def test_element_types_that_differ_are_converted_on_the_way(source: str, target: str) -> None:
    """S26."""

    async def run() -> None:
        async with world(source=Shape(2, 2, dtype=source), target=Shape(2, 2, dtype=target)) as made:
            transfer, outgoing = start(made)
            assert transfer.grant.wire_dtype == choose(source, target)
            send_all(outgoing, chunks())
            for incoming in transfer.incoming:
                await incoming.committed()
            assert_landed(transfer, source)
            for one in outgoing:
                await one.ended()

    asyncio.run(run())


def test_float8_on_the_wire_takes_a_quarter_of_float32_and_keeps_its_bound() -> None:
    async def run() -> None:
        async with world(options=ReceiverOptions(wire_dtype="float8_e4m3fn", resume_seconds=30)) as made:
            transfer, outgoing = start(made)
            send_all(outgoing, chunks())
            delivery = await transfer.incoming[0].committed()
            elements = NUM_TOKENS * LAYERS * HEADS * (KEY + VALUE)
            # And a scale for every layer, part and head of each box.
            assert elements < delivery.num_bytes < elements * 1.5
            for right, got in zip(truth("t1", NUM_TOKENS), transfer.kv[0].content(NUM_TOKENS), strict=True):
                assert (np.abs(got - right) <= np.maximum(np.abs(right) / 16, np.abs(right).max() / 448 / 1024)).all()
            for one in outgoing:
                await one.ended()
            # It could not be given back as it was, so another attempt would begin at the beginning.
            again = made.decode.expect("t2", NUM_TOKENS)
            assert (await made.decode.regrant(again, 2)).verified_tokens == 0
            await abort_all(again)

    asyncio.run(run())


@pytest.mark.parametrize("faults", [Faults(), Faults(seed=5, overtaken_by=5)])
def test_page_to_page_delivery(faults: Faults) -> None:
    async def run() -> None:
        async with world(faults, options=ReceiverOptions(direct=True), target=Shape(page_size=6)) as made:
            transfer, outgoing = start(made)
            send_all(outgoing, chunks())
            await transfer.incoming[0].committed()
            assert_landed(transfer, "float32")
            for one in outgoing:
                assert (await one.ended()).error is None
            # No landing slot was used.
            assert made.decode.ranks[0].arena.free == made.decode.ranks[0].arena.num_slots
            assert not transfer.kv[0].retired

    asyncio.run(run())


def test_page_to_page_delivery_by_a_lost_writer_costs_the_memory_its_addresses() -> None:
    async def run() -> None:
        async with world(Faults(seed=2, late=0.1), options=ReceiverOptions(direct=True)) as made:
            transfer, outgoing = start(made)
            send_all(outgoing, chunks())
            with pytest.raises(TransferFailed):
                await transfer.incoming[0].committed()
            for one in outgoing:
                await one.ended()
            await until(lambda: transfer.kv[0].retired)
            before = transfer.kv[0].content(NUM_TOKENS)
            assert made.fabric.land_late() >= 1
            # It was unregistered first.
            for was, now in zip(before, transfer.kv[0].content(NUM_TOKENS), strict=True):
                np.testing.assert_array_equal(was, now)

    asyncio.run(run())


def test_random_bytes_and_wrong_messages_are_refused_in_words() -> None:
    async def run() -> None:
        async with world() as made:
            transfer, outgoing = start(made)
            target = transfer.grant.targets[0]
            key = common_pb2.TransferKey(transfer_id="t1", attempt=1, epoch=target.epoch)
            opening = transfer_pb2.OpenDelivery(key=key, token=target.token, writer_rank=7)
            wrong_key = common_pb2.TransferKey(transfer_id="t1", attempt=2, epoch=target.epoch)
            async with open_channel(target.transfer_address) as channel:
                stub = transfer_pb2_grpc.TransferServiceStub(channel)

                async def refused(*messages: transfer_pb2.DeliverRequest) -> Exception:
                    async def say() -> object:
                        for message in messages:
                            yield message

                    with pytest.raises(grpc.aio.AioRpcError) as raised:
                        async for _ in stub.Deliver(say()):
                            pass
                    return from_rpc_error(raised.value, "receiver")

                assert "must begin with `open`" in str(await refused(transfer_pb2.DeliverRequest()))
                assert "must begin with `open`" in str(await refused())
                raw = channel.stream_stream("/headwater.v1.TransferService/Deliver")
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    async for _ in raw(iter([b"\xff\x00random"])):
                        pass
                assert raised.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
                fetch = transfer_pb2.OpenFetch(key=key, token=target.token, box=Box(*[Span(0, 1)] * 3).to_proto())

                async def say_fetch() -> object:
                    yield transfer_pb2.FetchRequest(open=fetch)

                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    async for _ in stub.Fetch(say_fetch()):
                        pass
                assert isinstance(from_rpc_error(raised.value, "receiver"), InvalidRequest)
                # So far nothing has changed.
                send_all(outgoing, chunks())
                await transfer.incoming[0].committed()
                assert_landed(transfer, "float32")
                # A message of another attempt, within a delivery.
                second = made.decode.expect("t2", NUM_TOKENS)
                opening.key.transfer_id = wrong_key.transfer_id = "t2"
                opening.token = second.grant.targets[0].token
                error = await refused(
                    transfer_pb2.DeliverRequest(open=opening),
                    transfer_pb2.DeliverRequest(receipt=transfer_pb2.Receipt(key=wrong_key)),
                )
                assert isinstance(error, StalePeer)
                assert "attempt 2" in str(error)
                with pytest.raises(StalePeer):
                    await second.incoming[0].committed()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bytes": 5}, "do not make"),
        ({"slot": 999}, "is not this writer's"),
        ({"digest": b""}, "has no digest"),
        ({"box": common_pb2.KvBox(layer_start=3, layer_end=2)}, "empty or negative span"),
        ({"box": Box(Span(0, 2), Span(0, 1), Span(36, 38)).to_proto(), "num_bytes": 224}, "lies outside"),
    ],
)
def test_a_receipt_that_does_not_add_up_fails_the_transfer(change: dict[str, object], message: str) -> None:
    async def run() -> None:
        async with world() as made:
            transfer = made.decode.expect("t1", NUM_TOKENS)
            target = transfer.grant.targets[0]
            key = common_pb2.TransferKey(transfer_id="t1", attempt=1, epoch=target.epoch)
            async with open_channel(target.transfer_address) as channel:
                call = transfer_pb2_grpc.TransferServiceStub(channel).Deliver()
                opening = transfer_pb2.OpenDelivery(key=key, token=target.token)
                await call.write(transfer_pb2.DeliverRequest(open=opening))
                slots = (await call.read()).slots
                receipt = transfer_pb2.Receipt(
                    key=key,
                    slot=slots.slots[0].slot,
                    box=Box(Span(0, 1), Span(0, 1), Span(0, 1)).to_proto(),
                    num_bytes=(KEY + VALUE) * 4,
                    digest=b"d",
                )
                fields = {name: getattr(receipt, name) for name in ("slot", "box", "num_bytes", "digest")} | change
                await call.write(
                    transfer_pb2.DeliverRequest(receipt=transfer_pb2.Receipt(key=key, **fields))  # type: ignore[arg-type]
                )
                assert message in (await call.read()).abort.reason
                close = transfer_pb2.CloseDelivery(key=key, quiesced=True)
                await call.write(transfer_pb2.DeliverRequest(close=close))
                assert (await call.read()).HasField("closed")
            with pytest.raises(TransferFailed, match=message):
                await transfer.incoming[0].committed()

    asyncio.run(run())


def test_a_bad_receipt_of_an_earlier_attempt_is_nothing_to_the_current_one() -> None:
    async def run() -> None:
        async with world(options=ReceiverOptions(resume_seconds=30)) as made:
            transfer = made.decode.expect("t1", NUM_TOKENS)
            target = transfer.grant.targets[0]
            key = common_pb2.TransferKey(transfer_id="t1", attempt=1, epoch=target.epoch)
            async with open_channel(target.transfer_address) as channel:
                call = transfer_pb2_grpc.TransferServiceStub(channel).Deliver()
                opening = transfer_pb2.OpenDelivery(key=key, token=target.token)
                await call.write(transfer_pb2.DeliverRequest(open=opening))
                assert (await call.read()).HasField("slots")
                grant = await made.decode.regrant(transfer, 2)
                assert (await call.read()).abort.reason == "attempt 2 has begun"
                await call.write(transfer_pb2.DeliverRequest(receipt=transfer_pb2.Receipt(key=key, slot=999)))
                close = transfer_pb2.CloseDelivery(key=key, quiesced=True)
                await call.write(transfer_pb2.DeliverRequest(close=close))
                assert (await call.read()).HasField("closed")
            made.prefill.compute("t1", NUM_TOKENS, PAGES, range(NUM_TOKENS))
            outgoing = made.prefill.open(grant, PAGES)
            send_all(outgoing, chunks())
            await transfer.incoming[0].committed()
            assert_landed(transfer, "float32")
            for one in outgoing:
                await one.ended()

    asyncio.run(run())


def test_box_round_trips_through_its_message() -> None:
    box = Box(Span(1, 3), Span(0, 4), Span(7, 9))
    assert Box.from_proto(box.to_proto()) == box
