"""What is tried over RDMA. Each scenario is the sending process of one or more `Peer`s."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import traceback
from collections.abc import Iterator

import numpy as np

from headwater.errors import HeadwaterError, InvalidConfig, PeerUnavailable
from kv_transfer.delivery import Delivered
from kv_transfer.engine import WriteFailed, WriteState
from kv_transfer.memory import HostBuffer
from kv_transfer.mooncake import MooncakeEngine
from kv_transfer.sender import Outgoing
from kv_transfer.writer import Entry, Job, Writer, Written
from tests.rdma.kv import FIRST_TOKEN, TOKEN_BYTES, Prefill, PrefillRank, contents
from tests.rdma.link import PAYLOAD_BYTES, SENDING, cut_wire, hidden_devices, slow_wire
from tests.rdma.peer import Peer, Peers, Setup, parse
from tests.rdma.say import say

MIB = 1024 * 1024
# Of a transfer that is to succeed; one that is to be cut off takes longer.
_NUM_TOKENS = 1200
_STEP_SECONDS = 0.05
# Of writes, where they are to be late, and of an outage that makes them so.
_WRITE_SECONDS, _OUTAGE_SECONDS = 2.0, 6.0
# Longer than anything takes.
_PATIENCE_SECONDS = 120.0


class Checks:
    """Says what holds and what does not."""

    def __init__(self) -> None:
        self.passed = True

    def that(self, what: str, holds: bool, fact: object = "") -> None:
        say(f"CHECK {'ok    ' if holds else 'failed'}  {what}{f': {fact}' if fact != '' else ''}")
        self.passed &= holds

    @contextlib.contextmanager
    def over_rdma(self, num_bytes: int) -> Iterator[None]:
        """What happens within takes as many packets as so many bytes need."""
        before, started = SENDING.packets_sent(), time.monotonic()
        yield
        sent, seconds = SENDING.packets_sent() - before, time.monotonic() - started
        fact = f"{sent} packets for {num_bytes} bytes, {num_bytes / MIB / seconds:.1f} MiB/s"
        self.that("the RDMA device carried it", sent >= num_bytes / PAYLOAD_BYTES, fact)


class Source:
    """Registered memory without a zero byte, and a writer."""

    def __init__(self, num_bytes: int, transport: str = "rdma", *, write_seconds: float = 30.0) -> None:
        self.engine = MooncakeEngine(SENDING.host, transport, write_seconds)
        self.writer = Writer(self.engine, write_seconds=write_seconds, max_bytes_in_flight=num_bytes)
        self.buffer = HostBuffer(num_bytes)
        self.engine.register(self.buffer.address, num_bytes)
        contents(self.buffer.address, num_bytes)[:] = np.random.default_rng(3).integers(1, 256, num_bytes, np.uint8)

    def write(self, peer: Peer, destination: int, num_bytes: int, *, entries: int = 1) -> Job:
        """From the start of the memory, in equal pieces."""
        length = num_bytes // entries
        return self.writer.write(
            peer.session,
            peer.epoch,
            [
                Entry(self.buffer.address + offset, destination + offset, length)
                for offset in range(0, num_bytes, length)
            ],
        )

    def bytes(self, num_bytes: int) -> bytes:
        return contents(self.buffer.address, num_bytes).tobytes()


def perform(name: str, peers: Peers) -> bool:
    """Runs one scenario. Returns whether all of it held."""
    SENDING.use()
    checks = Checks()
    try:
        asyncio.run(globals()[name](checks, peers))
    except Exception:  # noqa: BLE001 - the other scenarios go on
        checks.that(f"{name} runs to its end", holds=False, fact=traceback.format_exc())
    return checks.passed


async def staged(checks: Checks, peers: Peers) -> None:
    """PP2·TP2 sends through landing slots."""
    await _deliver(checks, Prefill(_NUM_TOKENS, pp=2, tp=2), peers.start(), "staged")


async def direct(checks: Checks, peers: Peers) -> None:
    """PP2 writes page to page."""
    outgoing = await _deliver(checks, Prefill(_NUM_TOKENS, pp=2), peers.start(Setup(direct=True)), "direct")
    deliveries = [delivery for one in outgoing for delivery in one._deliveries]
    checks.that("every box went page to page", all(one._push is not None and one._push.direct for one in deliveries))


async def transports(checks: Checks, peers: Peers) -> None:
    """RDMA is used when it is asked for or left open, and not when TCP is asked for, although it is there."""
    for transport, expected in (("rdma", "rdma"), ("tcp", "tcp"), ("auto", "rdma")):
        source, peer = Source(2 * MIB, transport), peers.start(Setup(transport))
        destination = peer.ask("register", 2 * MIB)
        used = source.engine.transport
        checks.that(f'an engine with transport="{transport}" says what it uses', used == expected, used)
        before = SENDING.packets_sent()
        written = _result(source.write(peer, destination, 2 * MIB, entries=2))
        sent = SENDING.packets_sent() - before
        checks.that("the write is done", written.done, _counts(written.states))
        checks.that("it is byte-exact", peer.ask("read", destination, 2 * MIB) == source.bytes(2 * MIB))
        as_said = sent >= 2 * MIB / PAYLOAD_BYTES if expected == "rdma" else sent == 0
        checks.that(f"it went over {expected}", as_said, f"{sent} RDMA packets")


async def unusable_device(checks: Checks, peers: Peers) -> None:
    """A device that is there and cannot be opened, as in a container without /dev/infiniband, is no RDMA: who asks
    for it is told, and nobody believes that TCP is RDMA.
    """
    del os.environ["MC_CUSTOM_TOPO_JSON"]
    with hidden_devices():
        try:
            used: object = MooncakeEngine(SENDING.host, "rdma", 1.0).transport
        except InvalidConfig as error:
            used = error
        checks.that('transport="rdma" is refused', isinstance(used, InvalidConfig), repr(used))
        used = MooncakeEngine(SENDING.host, "auto", 1.0).transport
        checks.that('transport="auto" says TCP', used == "tcp", used)


async def fence(checks: Checks, peers: Peers) -> None:
    """After `fence` nothing lands in that memory, and the rest of the peer's memory is as reachable as before."""
    source, peer = Source(32 * MIB), peers.start()
    fenced, other = peer.ask("register", 32 * MIB), peer.ask("register", 4 * MIB)
    with slow_wire(), checks.over_rdma(4 * MIB):
        job = source.write(peer, fenced, 32 * MIB, entries=32)
        landed = peer.ask("landing", fenced, 0)
        beside = source.write(peer, other, 4 * MIB, entries=4)
        seconds = peer.ask("fence", fenced)
        checks.that("the fence returned", holds=True, fact=f"{seconds:.3f} s, {landed} pages had landed before")
        states = _result(job).states
        checks.that("it came in the middle of a job", WriteState.FAILED in states, _counts(states))
        states = _result(beside).states
        checks.that("writes to other memory that were under way arrive", _result(beside).done, _counts(states))
    checks.that("they are byte-exact", peer.ask("read", other, 4 * MIB) == source.bytes(4 * MIB))
    again = _result(source.write(peer, fenced, MIB))
    checks.that("a new write to fenced memory fails", not again.done, _counts(again.states))
    checks.that("a new write to other memory arrives", _result(source.write(peer, other, MIB)).done)
    changed = peer.ask("changed_since_fence", fenced)
    checks.that("the fenced memory is as it was when the fence returned", changed == 0, f"{changed} bytes differ")


async def late_write(checks: Checks, peers: Peers) -> None:
    """A write that outlives its deadline goes on landing, until its slot is fenced and gets new memory."""
    size = 32 * MIB
    source, peer = Source(size, write_seconds=1.0), peers.start(Setup(num_slots=2, slot_bytes=size))
    used, unused = peer.ask("acquire", 2)
    with slow_wire():
        job = source.write(peer, used, size, entries=4)
        states = _result(job).states
        checks.that("the write is reported as late", WriteState.PENDING in states, _counts(states))
        before = peer.ask("landed", used)
        after = peer.ask("landing", used, before)
        checks.that("it lands all the same", holds=True, fact=f"{before} pages at its deadline, {after} later")
        addresses = peer.ask("replace")
        seconds = peer.ask("fence_seconds", used)
        checks.that("the slots go on with other memory", not {used, unused} & set(addresses), f"{seconds:.3f} s")
        vouched = job.settled.result(_PATIENCE_SECONDS)
    checks.that("the late write ends, and nobody vouches for it", not vouched, _counts(job.states))
    landed = peer.ask("landed", used)
    checks.that("the fence came in the middle of it", landed * 4096 < size, f"{landed} of {size // 4096} pages")
    for address, what in ((used, "the fenced memory"), (unused, "the slot beside it")):
        changed = peer.ask("changed_since_fence", address)
        checks.that(f"{what} is as it was when the fence returned", changed == 0, f"{changed} bytes differ")
    checks.that("new memory is untouched", not any(peer.ask("landed", address) for address in addresses))
    again = _result(source.write(peer, addresses[0], MIB))
    checks.that("the next write arrives in it", again.done, _counts(again.states))
    checks.that("it is byte-exact", peer.ask("read", addresses[0], MIB) == source.bytes(MIB))


async def failing_entry(checks: Checks, peers: Peers) -> None:
    """One entry of a job has nowhere to land; each entry has its own result, and the others arrive."""
    source, peer = Source(8 * MIB), peers.start()
    good = peer.ask("register", 8 * MIB)
    entries = [Entry(source.buffer.address + at, good + at, MIB) for at in range(0, 8 * MIB, MIB)]
    entries.insert(3, Entry(source.buffer.address, good + 64 * MIB, MIB))
    with checks.over_rdma(8 * MIB):
        written = _result(source.writer.write(peer.session, peer.epoch, entries))
    expected = [WriteState.DONE] * 9
    expected[3] = written.states[3]
    failed = written.states[3] in (WriteState.FAILED, WriteState.REFUSED)
    checks.that("the entry without a destination fails", failed, written.states[3])
    checks.that("the others are done", written.states == expected, _counts(written.states))
    checks.that("they are byte-exact", peer.ask("read", good, 8 * MIB) == source.bytes(8 * MIB))


async def receiver_killed(checks: Checks, peers: Peers) -> None:
    """The receiver dies in the middle of a transfer; the sender says so and serves the next one."""
    prefill, source, peer = Prefill(8192), Source(16 * MIB), peers.start()
    (rank,) = prefill.ranks
    destination = peer.ask("register", 16 * MIB)
    grant = parse(await peer.asked("expect", "lost", prefill.num_tokens))
    with slow_wire():
        (outgoing,) = prefill.send(grant, "lost", prefill.num_tokens)
        missing = await peer.asked("receiving", "lost")
        job = source.write(peer, destination, 16 * MIB, entries=16)
        await peer.asked("landing", destination, 0)
        peer.kill()
        started = time.monotonic()
        written = await asyncio.wrap_future(job.result)
        fact = f"{_counts(written.states)}, {time.monotonic() - started:.1f} s after the end of the receiver"
        checks.that("a job that was under way is not done", not written.done, fact)
        sent = await outgoing.ended()
    fact = f"{time.monotonic() - started:.1f} s, {missing} cells were missing: {sent.error!r}"
    checks.that("the transfer fails with an error of ours", isinstance(sent.error, HeadwaterError), fact)
    checks.that("its owner was told", prefill.failures == [sent.error])
    again = _result(source.write(peer, destination, MIB))
    checks.that("another write fails", not again.done, f"{_counts(again.states)}, {time.monotonic() - started:.1f} s")
    await _segments_come_back(rank)
    checks.that("every segment comes back", holds=True, fact=f"{time.monotonic() - started:.1f} s")
    await _deliver(checks, prefill, peers.start(), "next")


async def receiver_stopped(checks: Checks, peers: Peers) -> None:
    """The receiver stands still in the middle of a transfer: its memory takes writes all the same, but it commits
    nothing once the sender has given up, and serves the next transfer.
    """
    prefill, source, peer = Prefill(8192), Source(4 * MIB), peers.start()
    destination = peer.ask("register", 4 * MIB)
    checks.that("the write before is done", _result(source.write(peer, destination, 4096)).done)
    grant = parse(await peer.asked("expect", "stopped", prefill.num_tokens))
    with slow_wire():
        (outgoing,) = prefill.send(grant, "stopped", prefill.num_tokens)
        await peer.asked("receiving", "stopped")
        peer.stop()
        written = await asyncio.wrap_future(source.write(peer, destination, 4 * MIB, entries=4).result)
        checks.that("writes to the stopped process are done", written.done, _counts(written.states))
        sent = await outgoing.ended()
        checks.that(
            "the transfer fails with an error of ours", isinstance(sent.error, HeadwaterError), repr(sent.error)
        )
    peer.go_on()
    checks.that("what was written is there", await peer.asked("read", destination, 4 * MIB) == source.bytes(4 * MIB))
    await _goes_on(checks, prefill, peer, "stopped", sent)


async def receiver_silent(checks: Checks, peers: Peers) -> None:
    """A receiver stands still before it is first contacted. Nobody else waits for it."""
    source, known, unknown, silent = Source(2 * MIB), peers.start(), peers.start(), peers.start()
    places = {peer: peer.ask("register", 2 * MIB) for peer in (known, unknown, silent)}
    checks.that("the write before is done", _result(source.write(known, places[known], 4096)).done)
    silent.stop()
    started = time.monotonic()
    held_up = source.write(silent, places[silent], 2 * MIB, entries=2)
    for peer, what in ((known, "a peer that is known"), (unknown, "a peer that is not")):
        written = _result(source.write(peer, places[peer], 2 * MIB, entries=2))
        in_time = written.done and not held_up.result.done()
        checks.that(f"writes to {what} arrive meanwhile", in_time, f"{time.monotonic() - started:.1f} s")
    error = held_up.result.exception(_PATIENCE_SECONDS)
    fact = f"{error!r}, {time.monotonic() - started:.1f} s"
    checks.that("the silent peer counts as unavailable", isinstance(error, PeerUnavailable), fact)
    silent.go_on()
    checks.that("nothing has landed", silent.ask("landed", places[silent]) == 0)
    checks.that("writes to it arrive when it is back", _result(source.write(silent, places[silent], 2 * MIB)).done)


async def receiver_hangs(checks: Checks, peers: Peers) -> None:
    """The receiver stands still and its wire is cut, for longer than writes may take. When it is back, what was under
    way may land, and hits nothing.
    """
    await _hang(checks, Prefill(8192, write_seconds=_WRITE_SECONDS), peers.start())


async def receiver_hangs_direct(checks: Checks, peers: Peers) -> None:
    """The same, of a delivery page to page."""
    await _hang(checks, Prefill(8192, write_seconds=_WRITE_SECONDS), peers.start(Setup(direct=True)))


async def _hang(checks: Checks, prefill: Prefill, peer: Peer) -> None:
    grant = parse(await peer.asked("expect", "hung", prefill.num_tokens))
    with slow_wire():
        (outgoing,) = prefill.send(grant, "hung", prefill.num_tokens)
        await peer.asked("receiving", "hung")
        # In this order: while it runs, it takes what has landed, and makes room for writes that the cut holds up.
        with cut_wire():
            peer.stop()
            await asyncio.sleep(_OUTAGE_SECONDS)
    peer.go_on()
    started = time.monotonic()
    sent = await outgoing.ended()
    fact = f"{time.monotonic() - started:.1f} s after the outage: {sent.error!r}"
    checks.that("the transfer fails because a write was late or failed", isinstance(sent.error, WriteFailed), fact)
    await _goes_on(checks, prefill, peer, "hung", sent)


async def _goes_on(checks: Checks, prefill: Prefill, peer: Peer, lost: str, sent: Delivered) -> None:
    """A receiver that is back commits nothing of the `lost` transfer, has all its slots, and serves the next one."""
    outcome = await peer.asked("outcome", lost)
    checks.that("the receiver commits nothing", isinstance(outcome, HeadwaterError), repr(outcome))
    retired = await peer.asked("settled")
    fact = f"{retired} slots or destinations, {'quiesced' if sent.quiesced else 'not quiesced'}"
    checks.that("it has given up what could still be written to", sent.quiesced or retired > 0, fact)
    await _segments_come_back(*prefill.ranks)
    await _deliver(checks, prefill, peer, "next")


async def _segments_come_back(*ranks: PrefillRank) -> None:
    for rank in ranks:
        while rank.arena.held:
            await asyncio.sleep(_STEP_SECONDS)
        rank.arena.check()


async def _deliver(checks: Checks, prefill: Prefill, peer: Peer, name: str) -> list[Outgoing]:
    """One transfer from beginning to end."""
    grant = parse(await peer.asked("expect", name, _NUM_TOKENS))
    with checks.over_rdma(_NUM_TOKENS * TOKEN_BYTES):
        outgoing = prefill.send(grant, name, _NUM_TOKENS)
        outcome = await peer.asked("outcome", name)
        ended = [await one.ended() for one in outgoing]
    checks.that("the receiver commits", outcome == FIRST_TOKEN, repr(outcome))
    errors = [sent.error for sent in ended if sent.error is not None]
    checks.that(f"all of {len(outgoing)} senders are content", not errors, errors or "")
    wrong = await peer.asked("num_wrong_bytes", name)
    checks.that("every byte is right", wrong == 0, f"{wrong} of {_NUM_TOKENS * TOKEN_BYTES} are wrong")
    return outgoing


def _result(job: Job) -> Written:
    return job.result.result(_PATIENCE_SECONDS)


def _counts(states: list[WriteState]) -> str:
    return ", ".join(f"{states.count(state)} {state.value}" for state in WriteState if state in states)
