"""A receiving process, driven over a pipe by the scenario that started it.

It holds plain registered memory, or a `SlotArena`, for scenarios of single writes, and a `Receiver` with its
server for those of whole transfers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from headwater.errors import HeadwaterError
from headwater.rpc import Server
from headwater.v1 import common_pb2, transfer_pb2_grpc
from kv_transfer.incoming import Incoming
from kv_transfer.memory import HostBuffer
from kv_transfer.mooncake import MooncakeEngine
from kv_transfer.receiver import Receiver, ReceiverOptions, TransferServicer
from kv_transfer.slots import SlotArena
from kv_transfer.writer import Writer
from tests.rdma.kv import SLOT_BYTES, Landing, contents, geometry
from tests.rdma.link import RECEIVING

FORK = multiprocessing.get_context("fork")

_NUM_SLOTS = 16
_STEP_SECONDS = 0.05
_WRITE_SECONDS = 5.0
# What is looked at: one byte in each page of memory.
_PAGE_BYTES = 4096
# That one scenario needs.
_MOST_PEERS = 3


@dataclasses.dataclass(frozen=True)
class Setup:
    """Of a receiving process."""

    transport: str = "rdma"
    # Of the arena that single writes go to.
    num_slots: int = 0
    slot_bytes: int = 0
    # The decode side's pages; the prefill side's have another size.
    page_size: int = 32
    direct: bool = False


class Peer:
    """A receiving process, as its scenario sees it."""

    def __init__(self) -> None:
        self._pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=_run, args=(theirs,))
        self.process.start()
        theirs.close()
        self.session = ""

    @property
    def epoch(self) -> str:
        return _epoch(self._pid)

    def start(self, setup: Setup) -> None:
        self._pipe.send(setup)
        self.session = self._answer()

    def ask(self, question: str, *arguments: Any) -> Any:
        """Calls a method of `_Side`, and waits."""
        self._pipe.send((question, arguments))
        return self._answer()

    async def asked(self, question: str, *arguments: Any) -> Any:
        """The same, without holding up the event loop."""
        return await asyncio.to_thread(self.ask, question, *arguments)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def stop(self) -> None:
        """The process as a whole stands still, without its noticing."""
        os.kill(self._pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    @property
    def _pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def _answer(self) -> Any:
        succeeded, answer = self._pipe.recv()
        if not succeeded:
            raise RuntimeError(f"the receiving process failed:\n{answer}")
        return answer


class Peers:
    """Processes that wait to become receivers. They are forked, ahead of their scenario's process, from one that has
    imported everything, which takes many seconds under emulation, and that has no threads yet.
    """

    def __enter__(self) -> Self:
        self._all = [Peer() for _ in range(_MOST_PEERS)]
        self._idle = list(self._all)
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._all:
            peer.process.kill()
            peer.process.join()

    def start(self, setup: Setup = Setup()) -> Peer:
        peer = self._idle.pop()
        peer.start(setup)
        return peer


def _epoch(pid: int) -> str:
    return f"decode-{pid}"


def _run(pipe: Connection) -> None:
    setup = pipe.recv()
    RECEIVING.use()
    asyncio.run(_serve(pipe, setup))


async def _serve(pipe: Connection, setup: Setup) -> None:
    """Until this process is killed."""
    side = _Side(setup)
    await side.server.start()
    pipe.send((True, side.engine.session))
    while True:
        question, arguments = await asyncio.to_thread(pipe.recv)
        try:
            answer = True, await getattr(side, question)(*arguments)
        except Exception:  # noqa: BLE001 - the scenario raises it
            answer = False, traceback.format_exc()
        pipe.send(answer)


class _WatchedEngine(MooncakeEngine):
    """Remembers what memory held when its fence returned."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(RECEIVING.host, setup.transport, _WRITE_SECONDS)
        self.watched: dict[int, HostBuffer] = {}
        self.snapshots: dict[int, npt.NDArray[np.uint8]] = {}
        self.fence_seconds: dict[int, float] = {}

    def fence(self, address: int) -> None:
        started = time.monotonic()
        super().fence(address)
        self.fence_seconds[address] = time.monotonic() - started
        if address in self.watched:
            self.snapshots[address] = self.contents(address).copy()

    def contents(self, address: int) -> npt.NDArray[np.uint8]:
        return contents(address, self.watched[address].num_bytes)


class _Side:
    """What a scenario may ask for. Addresses are of this process."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.engine = _WatchedEngine(setup)
        self._arena = SlotArena(self.engine, setup.num_slots, setup.slot_bytes)
        self._incoming: dict[str, tuple[Incoming, Landing]] = {}
        self._landing_arena = SlotArena(self.engine, _NUM_SLOTS, SLOT_BYTES)
        self.server = Server("127.0.0.1:0", ["headwater.v1.TransferService"])
        self._receiver = Receiver(
            self.engine,
            self._landing_arena,
            Writer(self.engine, write_seconds=_WRITE_SECONDS, max_bytes_in_flight=SLOT_BYTES),
            epoch=_epoch(os.getpid()),
            address=self.server.address,
            geometry=geometry(setup.page_size),
            options=ReceiverOptions(slots_per_writer=3, stop_seconds=5.0, direct=setup.direct),
        )
        servicer = TransferServicer(self._receiver)
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(servicer, self.server.grpc_server)

    # Single writes.

    async def register(self, num_bytes: int) -> int:
        """New memory, zero."""
        buffer = HostBuffer(num_bytes)
        self.engine.register(buffer.address, num_bytes)
        self.engine.watched[buffer.address] = buffer
        return buffer.address

    async def read(self, address: int, num_bytes: int) -> bytes:
        return self.engine.contents(address)[:num_bytes].tobytes()

    async def landed(self, address: int) -> int:
        """Pages that are not zero any more."""
        return int(np.count_nonzero(self.engine.contents(address)[::_PAGE_BYTES]))

    async def landing(self, address: int, more_than: int) -> int:
        """Waits until more than so many have landed."""
        while (landed := await self.landed(address)) <= more_than:
            await asyncio.sleep(_STEP_SECONDS)
        return landed

    async def fence(self, address: int) -> float:
        """Returns the seconds it took."""
        await asyncio.to_thread(self.engine.fence, address)
        return self.engine.fence_seconds[address]

    async def changed_since_fence(self, address: int) -> int:
        """Bytes that are not what they were when the fence had returned."""
        return int(np.count_nonzero(self.engine.contents(address) != self.engine.snapshots[address]))

    # Slots.

    async def acquire(self, count: int) -> list[int]:
        """Addresses of slots, in the order in which they will be replaced."""
        return self._watch(sorted(await self._arena.acquire("writer", count, 5.0)))

    async def replace(self) -> list[int]:
        """Fences the acquired slots. Returns the addresses that they have now."""
        slots = sorted(self._arena.quarantine("writer"))
        await self._arena.replace(slots)
        self._arena.check()
        return self._watch(slots)

    async def fence_seconds(self, address: int) -> float:
        """What the fence of a slot took."""
        return self.engine.fence_seconds[address]

    def _watch(self, slots: Iterable[int]) -> list[int]:
        buffers = [self._arena._buffers[slot] for slot in slots]
        for buffer in buffers:
            self.engine.watched[buffer.address] = buffer
            # Memory that was given back would read as zero, whatever lands in it.
            buffer.give_back_memory = lambda: None  # type: ignore[method-assign]
        return [buffer.address for buffer in buffers]

    # Transfers.

    async def expect(self, name: str, num_tokens: int) -> bytes:
        """Returns the grant."""
        landing = Landing(name, num_tokens, self._setup.page_size)
        incoming = self._receiver.expect(name, 1, num_tokens, landing)
        self._incoming[name] = incoming, landing
        return self._receiver.grant(incoming).SerializeToString()

    async def receiving(self, name: str) -> int:
        """Waits until some of the transfer is verified and in place. Returns the cells that are missing."""
        coverage = self._incoming[name][0].coverage
        while coverage.missing == coverage.whole.volume:
            await asyncio.sleep(_STEP_SECONDS)
        return coverage.missing

    async def outcome(self, name: str) -> int | HeadwaterError:
        """Waits for the end of a transfer. The first token, or the error."""
        try:
            return (await self._incoming[name][0].committed()).first_token
        except HeadwaterError as error:
            return error

    async def num_wrong_bytes(self, name: str) -> int:
        return self._incoming[name][1].num_wrong_bytes()

    async def settled(self) -> int:
        """Waits until no transfer is open and every fence has returned. Returns how many slots and destinations
        have had their addresses given up.
        """
        # One task is the reaper; the others are fences.
        while self._receiver.open_transfers or len(self._receiver._tasks) > 1:
            await asyncio.sleep(_STEP_SECONDS)
        self._landing_arena.check()
        assert self._landing_arena.free == _NUM_SLOTS
        return self._landing_arena.retired + sum(landing.retired for _, landing in self._incoming.values())


def parse(grant: bytes) -> common_pb2.Grant:
    parsed = common_pb2.Grant()
    parsed.ParseFromString(grant)
    return parsed
