"""The Mooncake wrapper over TCP: what the library counts on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Iterator

import psutil
import pytest

from headwater.errors import InvalidConfig, PeerUnavailable
from kv_transfer import memory
from kv_transfer.engine import WriteFailed, WriteState
from kv_transfer.memory import HostBuffer
from kv_transfer.mooncake import MooncakeEngine, choose_transport
from kv_transfer.writer import Entry, Writer
from tests.harness import no_leaks
from tests.kv_transfer.engines import EngineProcess

MB = 1024 * 1024


@contextlib.contextmanager
def engines(count: int, num_bytes: int) -> Iterator[EngineProcess]:
    process = EngineProcess(count, num_bytes)
    try:
        yield process
    finally:
        process.kill()


@contextlib.contextmanager
def local(num_bytes: int, *, write_seconds: float = 30.0) -> Iterator[tuple[Writer, HostBuffer]]:
    """An engine of this process with one region, and a writer over it."""
    engine = MooncakeEngine("127.0.0.1", "tcp", write_seconds)
    buffer = HostBuffer(num_bytes)
    engine.register(buffer.address, num_bytes)
    writer = Writer(engine, write_seconds=write_seconds, max_bytes_in_flight=8 * MB)
    try:
        yield writer, buffer
    finally:
        writer.close()
        engine.close()


@pytest.mark.parametrize(("wanted", "devices", "used"), [("auto", [], "tcp"), ("tcp", ["mlx5_0"], "tcp")])
def test_tcp_is_used_when_asked_for_or_when_there_is_nothing_else(wanted: str, devices: list[str], used: str) -> None:
    assert choose_transport(wanted, devices) == used


def test_rdma_is_used_when_there_and_refused_when_not() -> None:
    assert choose_transport("auto", ["mlx5_0"]) == choose_transport("rdma", ["mlx5_0"]) == "rdma"
    with pytest.raises(InvalidConfig, match="no RDMA device here has an active port"):
        choose_transport("rdma", [])


class HalfWrite:
    """A writer that goes to sleep in the middle of a write: Mooncake's own wire format, by hand, so that the middle
    is exact. A header of size, address and operation (1: write, 128: acknowledged), and then the bytes.
    """

    def __init__(self, receiving: EngineProcess, value: int) -> None:
        handshake = int(receiving.where[0][0].rpartition(":")[2])
        listening = psutil.Process(receiving.process.pid).net_connections(kind="tcp")
        (port,) = {found.laddr.port for found in listening if found.status == psutil.CONN_LISTEN} - {handshake}
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._half = bytes([value]) * (MB // 2)
        self._socket.sendall(struct.pack("<QQB7x", MB, receiving.where[0][1], 1 | 128) + self._half)
        while receiving("count", 0, value) < MB // 2:
            pass

    def wake_up(self) -> bytes:
        """Sends the rest. Returns the acknowledgement, or nothing when the connection has been cut."""
        try:
            self._socket.sendall(self._half)
            return self._socket.recv(8)
        except (ConnectionResetError, BrokenPipeError):
            return b""
        finally:
            self._socket.close()


def test_unregistering_does_not_stop_a_write_that_is_being_received() -> None:
    """Why a fence has to do more. Should this fail one day, it can do less."""
    with no_leaks(), engines(1, MB) as receiving:
        writer = HalfWrite(receiving, 7)
        receiving("unregister", 0)
        assert writer.wake_up() == struct.pack("<II", 0, 0x4D435456)
        assert receiving("count", 0, 7) == MB


def test_after_a_fence_nothing_lands_any_more() -> None:
    with no_leaks(), engines(1, MB) as receiving, engines(1, MB) as writing:
        writer = HalfWrite(receiving, 7)
        receiving("fence", 0)
        assert writer.wake_up() == b""
        assert receiving("count", 0, 7) == MB // 2
        # A new write is refused, and the engine goes on: other memory still takes one.
        assert writing("write", *receiving.where[0], 9) == "failed"
        assert receiving("count", 0, 9) == 0
        assert writing("write", receiving.where[0][0], receiving("add"), 9) == "done"


def test_each_entry_has_its_own_result() -> None:
    with no_leaks(), engines(1, 4 * MB) as receiving, local(4 * MB) as (writer, buffer):
        session, address = receiving.where[0]
        memory.view(buffer.address, 4 * MB)[:] = b"\x05" * 4 * MB
        entries = [Entry(buffer.address + at, address + at, MB) for at in range(0, 4 * MB, MB)]
        entries[2] = Entry(buffer.address, address + 64 * MB, MB)
        job = writer.write(session, "e", entries)
        done, failed = WriteState.DONE, WriteState.FAILED
        assert job.result.result(30).states == [done, done, failed, done]
        assert not job.settled.result(30)
        assert receiving("count", 0, 5) == 3 * MB


def test_first_contacts_do_not_wait_for_each_other_nor_for_a_peer_that_hangs() -> None:
    """Thirty-two nodes on one address, and one that is stopped."""
    with no_leaks(), engines(32, MB) as alive, engines(1, MB) as stopped, local(MB) as (writer, buffer):
        memory.view(buffer.address, MB)[:] = b"\x05" * MB
        os.kill(stopped.process.pid, signal.SIGSTOP)
        hanging = writer.write(stopped.where[0][0], "e", [Entry(buffer.address, stopped.where[0][1], MB)])
        jobs = [writer.write(session, "e", [Entry(buffer.address, address, MB)]) for session, address in alive.where]
        assert all(job.result.result(30).done for job in jobs)
        assert not hanging.result.done()
        assert [alive("count", number, 5) for number in range(32)] == [MB] * 32
        # It has begun nothing, so it can be given up at once.
        hanging.cancel()
        assert hanging.settled.result(0)
        os.kill(stopped.process.pid, signal.SIGCONT)


def test_a_peer_that_is_gone_fails_and_the_next_try_is_not_held_against_it() -> None:
    """S04."""
    with no_leaks(), local(MB) as (writer, buffer):
        with engines(1, MB) as gone:
            session, address = gone.where[0]
        for _ in range(2):
            job = writer.write(session, "e", [Entry(buffer.address, address, MB)])
            with pytest.raises(PeerUnavailable, match="does not answer"):
                job.result.result(30)
            assert job.settled.result(30)
        with engines(1, MB) as back:
            session, address = back.where[0]
            assert writer.write(session, "e2", [Entry(buffer.address, address, MB)]).result.result(30).done


def test_a_new_process_under_an_old_name_is_a_new_peer() -> None:
    """S03: the engine remembers peers by name for ever, so another incarnation gets an engine that knows nothing."""
    with no_leaks(), engines(1, MB) as receiving, local(MB) as (writer, buffer):
        session, address = receiving.where[0]
        engine = writer.engine
        assert isinstance(engine, MooncakeEngine)
        for epoch, initiators in (("first", 0), ("first", 0), ("second", 1), ("second", 1)):
            assert writer.write(session, epoch, [Entry(buffer.address, address, MB)]).result.result(30).done
            assert len(engine._initiators) == initiators


def test_more_than_ten_thousand_regions() -> None:
    """What peers ask for on first contact exceeds Mooncake's default limit of 1 MB, which the wrapper raises."""
    count, size = 10_500, 4096
    with no_leaks(), engines(1, MB) as other, local(MB) as (writer, buffer):
        region = HostBuffer(count * size)
        engine = writer.engine
        for number in range(count):
            engine.register(region.address + number * size, size)
        last = region.address + (count - 1) * size
        assert other("write", engine.session, buffer.address, 3) == "done"
        session, address = other.where[0]
        memory.view(last, size)[:] = b"\x04" * size
        assert writer.write(session, "e", [Entry(last, address, size)]).result.result(30).done
        assert other("count", 0, 4) == size


def test_overlapping_regions_are_refused() -> None:
    with no_leaks(), local(MB) as (writer, buffer):
        with pytest.raises(InvalidConfig, match="-7 means that the range overlaps"):
            writer.engine.register(buffer.address + 4096, 4096)


def test_a_closed_writer_takes_nothing() -> None:
    with no_leaks(), local(MB) as (writer, buffer):
        writer.close()
        with pytest.raises(WriteFailed, match="shutting down"):
            writer.write("127.0.0.1:1", "e", [Entry(buffer.address, 0, 1)])
