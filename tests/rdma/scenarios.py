"""What is tried over RDMA. Each scenario is the sending process of one or more `Peer`s."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Iterator

import numpy as np

from headwater.errors import HeadwaterError
from kv_transfer.engine import WriteState
from kv_transfer.memory import HostBuffer
from kv_transfer.mooncake import MooncakeEngine
from kv_transfer.sender import Outgoing
from kv_transfer.writer import Entry, Job, Writer, Written
from tests.rdma.kv import FIRST_TOKEN, TOKEN_BYTES, Prefill, contents
from tests.rdma.link import PAYLOAD_BYTES, SENDING, slow_wire
from tests.rdma.peer import Peer, Peers, Setup, parse
from tests.rdma.say import say

MIB = 1024 * 1024


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

    def bytes(self, offset: int, num_bytes: int) -> bytes:
        return contents(self.buffer.address + offset, num_bytes).tobytes()


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
    await _deliver(checks, Prefill(1200, pp=2, tp=2), peers.start(), "staged")


async def direct(checks: Checks, peers: Peers) -> None:
    """PP2 writes page to page."""
    outgoing = await _deliver(checks, Prefill(1200, pp=2), peers.start(Setup(direct=True)), "direct")
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
        checks.that("it is byte-exact", peer.ask("read", destination, 2 * MIB) == source.bytes(0, 2 * MIB))
        as_said = sent >= 2 * MIB / PAYLOAD_BYTES if expected == "rdma" else sent == 0
        checks.that(f"it went over {expected}", as_said, f"{sent} RDMA packets")


async def fence(checks: Checks, peers: Peers) -> None:
    """After `fence` nothing lands in that memory, and the rest of the peer's memory is as reachable as before."""
    source, peer = Source(24 * MIB), peers.start()
    fenced, other = peer.ask("register", 24 * MIB), peer.ask("register", 4 * MIB)
    with slow_wire(), checks.over_rdma(4 * MIB):
        job = source.write(peer, fenced, 24 * MIB, entries=24)
        landed = peer.ask("landing", fenced, 24 * MIB)
        beside = source.write(peer, other, 4 * MIB, entries=4)
        seconds = peer.ask("fence", fenced)
        states = _result(job).states
        checks.that("the fence came in the middle of the write", WriteState.FAILED in states, _counts(states))
        checks.that("the fence returned", True, f"{seconds:.3f} s, {landed} pages had landed before")
        states = _result(beside).states
        checks.that("writes to other memory that were under way arrive", _result(beside).done, _counts(states))
    checks.that("they are byte-exact", peer.ask("read", other, 4 * MIB) == source.bytes(0, 4 * MIB))
    again = source.write(peer, fenced, MIB)
    checks.that("a new write to fenced memory fails", not _result(again).done, _counts(_result(again).states))
    last = source.write(peer, other, MIB)
    checks.that("a new write to other memory arrives", _result(last).done)
    changed = peer.ask("changed_since_fence", fenced)
    checks.that("the fenced memory is as it was when the fence returned", changed == 0, f"{changed} bytes differ")


async def late_write(checks: Checks, peers: Peers) -> None:
    """A write that outlives its deadline lands; once its slot has been fenced it does not."""
    size = 32 * MIB
    source, peer = Source(size, write_seconds=1.0), peers.start(Setup(num_slots=2, slot_bytes=size))
    used, unused = peer.ask("acquire", 2)
    with slow_wire():
        job = source.write(peer, used, size, entries=4)
        states = _result(job).states
        checks.that("the write is reported as late", WriteState.PENDING in states, _counts(states))
        before = peer.ask("landed", used, size)
        after = before
        while after == before:
            after = peer.ask("landed", used, size)
        checks.that("it lands all the same", True, f"{before} pages at its deadline, {after} a moment later")
        started = time.monotonic()
        addresses = peer.ask("replace")
        fact = f"{time.monotonic() - started:.3f} s"
        checks.that("the slots go on with other memory", not {used, unused} & set(addresses), fact)
        vouched = job.settled.result(60)
    checks.that("the late write ends, and nobody vouches for it", not vouched, _counts(job.states))
    complete = peer.ask("landed", used, size) == size // 4096
    checks.that("the fence came in the middle of it", not complete)
    for address, what in ((used, "the fenced memory is as it was"), (unused, "and that of the slot beside it")):
        changed = peer.ask("changed_since_fence", address)
        checks.that(what, changed == 0, f"{changed} bytes differ")
    for address in addresses:
        checks.that("new memory is untouched", peer.ask("landed", address, size) == 0)
    again = source.write(peer, addresses[0], MIB)
    checks.that("the next write arrives in it", _result(again).done, _counts(_result(again).states))
    checks.that("byte-exact", peer.ask("read", addresses[0], MIB) == source.bytes(0, MIB))


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
    checks.that("they are byte-exact", peer.ask("read", good, 8 * MIB) == source.bytes(0, 8 * MIB))


async def receiver_killed(checks: Checks, peers: Peers) -> None:
    """The receiver dies in the middle of a transfer; the sender says so and serves the next one."""
    prefill, peer = Prefill(8192, write_seconds=10.0), peers.start()
    (rank,) = prefill.ranks
    grant = parse(await peer.asked("expect", "lost", prefill.num_tokens))
    with slow_wire():
        (outgoing,) = prefill.send(grant, "lost")
        missing = await peer.asked("receiving", "lost")
        peer.kill()
        started = time.monotonic()
        sent = await outgoing.ended()
    what = f"after {time.monotonic() - started:.1f} s, {missing} cells missing: {sent.error!r}"
    checks.that("the transfer fails with an error of ours", isinstance(sent.error, HeadwaterError), what)
    checks.that("its owner was told", prefill.failures == [sent.error])
    started = time.monotonic()
    job = rank.writer.write(peer.session, peer.epoch, [Entry(rank.pool.address, 0x10000, MIB)])
    error = await asyncio.to_thread(job.result.exception, 60)
    ended = repr(error) if error is not None else _counts(_result(job).states)
    failed = isinstance(error, HeadwaterError) or not _result(job).done
    checks.that("another write to it fails", failed, f"{ended} after {time.monotonic() - started:.1f} s")
    while rank.arena.held:
        await asyncio.sleep(0.05)
    checks.that("every segment comes back", True, f"{time.monotonic() - started:.1f} s later")
    await _deliver(checks, prefill, peers.start(), "next")


async def receiver_stopped(checks: Checks, peers: Peers) -> None:
    """The receiver is stopped for longer than the write deadline; nothing of the transfer is used after that."""
    prefill, peer = Prefill(8192, write_seconds=1.0), peers.start(Setup(write_seconds=1.0))
    (rank,) = prefill.ranks
    grant = parse(await peer.asked("expect", "stopped", prefill.num_tokens))
    with slow_wire():
        (outgoing,) = prefill.send(grant, "stopped")
        await peer.asked("receiving", "stopped")
        peer.stop()
        started = time.monotonic()
        sent = await outgoing.ended()
        fact = f"after {time.monotonic() - started:.1f} s: {sent.error!r}"
        checks.that("the transfer fails with an error of ours", isinstance(sent.error, HeadwaterError), fact)
        peer.go_on()
        outcome = await peer.asked("outcome", "stopped")
        checks.that("the receiver commits nothing", isinstance(outcome, HeadwaterError), repr(outcome))
    retired = await peer.asked("settled")
    checks.that("the receiver has all its slots back", True, f"{retired} with new memory, quiesced: {sent.quiesced}")
    while rank.arena.held:
        await asyncio.sleep(0.05)
    await _deliver(checks, prefill, peer, "next")


async def _deliver(checks: Checks, prefill: Prefill, peer: Peer, name: str) -> list[Outgoing]:
    """One transfer from beginning to end."""
    grant = parse(await peer.asked("expect", name, prefill.num_tokens))
    with checks.over_rdma(prefill.num_tokens * TOKEN_BYTES):
        outgoing = prefill.send(grant, name)
        outcome = await peer.asked("outcome", name)
        ended = [await one.ended() for one in outgoing]
    checks.that("the receiver commits", outcome == FIRST_TOKEN, repr(outcome))
    errors = [sent.error for sent in ended if sent.error is not None]
    checks.that(f"all of {len(outgoing)} senders are content", not errors, errors or "")
    wrong = await peer.asked("num_wrong_bytes", name)
    checks.that("every byte is right", wrong == 0, f"{wrong} of {prefill.num_tokens * TOKEN_BYTES} are wrong")
    return outgoing


def _result(job: Job) -> Written:
    return job.result.result(120)


def _counts(states: list[WriteState]) -> str:
    return ", ".join(f"{states.count(state)} {state.value}" for state in WriteState if state in states)
