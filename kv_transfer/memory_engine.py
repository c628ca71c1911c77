"""A transfer engine inside one process, with faults under a seed. For tests.

Engines of one `MemoryFabric` write into each other's registered memory. What real engines do wrong, this one
does on demand: fail, fail and land later, hang and land later, report success without landing, land twice, or
take long (so that concurrent writes land out of order).
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import random
import threading
from collections.abc import Callable

from headwater.errors import InvalidConfig, PeerUnavailable
from kv_transfer.engine import WriteFailed, WriteState


@dataclasses.dataclass(frozen=True)
class Faults:
    """Probabilities per write."""

    seed: int = 0
    # Refused before it begins.
    refuse: float = 0.0
    fail: float = 0.0
    # Reported as failed; the bytes land when the fabric's `land_late` is called, read from the source then.
    late: float = 0.0
    # Pending until `land_late` is called.
    hang: float = 0.0
    # Reported as done; the bytes never land.
    drop: float = 0.0
    # Lands now, and once more when `land_late` is called.
    duplicate: float = 0.0
    # Up to this many other writes overtake a write.
    overtaken_by: int = 0


@dataclasses.dataclass
class _Write:
    """One submitted write."""

    state: WriteState
    land: Callable[[], None]
    # Lands when this many writes of the fabric have been polled.
    due: int


class MemoryFabric:
    """The network between the engines of one test."""

    def __init__(self, faults: Faults = Faults()) -> None:
        self.faults = faults
        self._random = random.Random(faults.seed)  # noqa: S311 - not for secrets
        self._engines: dict[str, MemoryEngine] = {}
        self._late: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._handles = itertools.count(1)
        self._writes: dict[int, _Write] = {}
        self._polls = 0

    def engine(self, session: str) -> MemoryEngine:
        engine = MemoryEngine(self, session)
        self._engines[session] = engine
        return engine

    def remove(self, session: str) -> None:
        """The peer is gone: writes to it fail."""
        self._engines.pop(session, None)

    def has(self, session: str) -> bool:
        return session in self._engines

    def land_late(self) -> int:
        """Lands every write that was kept back. Returns how many."""
        with self._lock:
            late, self._late = self._late, []
        for land in late:
            land()
        return len(late)

    def submit(self, session: str, source: int, destination: int, num_bytes: int) -> int:
        target = self._engines.get(session)
        if target is None or not target.registered(destination, num_bytes):
            raise WriteFailed(f"{session}: no such peer, or the destination is not registered there.")

        def land() -> None:
            target.land(source, destination, num_bytes)

        with self._lock:
            faults = self.faults
            draw = self._random.random()
            due = self._polls + self._random.randint(0, faults.overtaken_by)
            if draw < faults.refuse:
                raise WriteFailed(f"{session}: injected refusal.")
            draw -= faults.refuse
            handle = next(self._handles)
            write = self._writes[handle] = _Write(WriteState.DONE, land, due)
            for probability, keep in (
                (faults.fail, self._fails),
                (faults.late, self._fails_and_lands),
                (faults.hang, self._hangs),
                (faults.drop, self._drops),
                (faults.duplicate, self._lands_again),
            ):
                if draw < probability:
                    keep(write)
                    break
                draw -= probability
            return handle

    def poll(self, handle: int) -> WriteState:
        with self._lock:
            self._polls += 1
            write = self._writes[handle]
            if write.state is WriteState.PENDING or self._polls <= write.due:
                return WriteState.PENDING
            del self._writes[handle]
        if write.state is WriteState.DONE:
            write.land()
        return write.state

    @staticmethod
    def _fails(write: _Write) -> None:
        write.state = WriteState.FAILED

    def _fails_and_lands(self, write: _Write) -> None:
        write.state = WriteState.FAILED
        self._late.append(write.land)

    def _hangs(self, write: _Write) -> None:
        write.state = WriteState.PENDING

        def finish() -> None:
            write.state = WriteState.DONE

        self._late.append(finish)

    @staticmethod
    def _drops(write: _Write) -> None:
        write.land = lambda: None

    def _lands_again(self, write: _Write) -> None:
        self._late.append(write.land)


class MemoryEngine:
    """`TransferEngine` on a `MemoryFabric`."""

    transport = "memory"

    def __init__(self, fabric: MemoryFabric, session: str) -> None:
        self._fabric = fabric
        self.session = session
        self._regions: dict[int, int] = {}
        # Fences come from other threads.
        self._lock = threading.Lock()

    def register(self, address: int, num_bytes: int) -> None:
        with self._lock:
            for start, length in self._regions.items():
                if address < start + length and start < address + num_bytes:
                    raise InvalidConfig(f"{self.session}: the range overlaps one that is registered.")
            self._regions[address] = num_bytes

    def unregister(self, address: int) -> None:
        with self._lock:
            self._regions.pop(address, None)

    def fence(self, address: int) -> None:
        self.unregister(address)

    def registered(self, address: int, num_bytes: int) -> bool:
        with self._lock:
            return self._has(address, num_bytes)

    def land(self, source: int, destination: int, num_bytes: int) -> None:
        """A write arrives. It lands whole before a fence returns, or not at all."""
        with self._lock:
            if self._has(destination, num_bytes):
                ctypes.memmove(destination, source, num_bytes)

    def _has(self, address: int, num_bytes: int) -> bool:
        return any(
            start <= address and address + num_bytes <= start + length for start, length in self._regions.items()
        )

    def contact(self, session: str, epoch: str) -> None:
        if not self._fabric.has(session):
            raise PeerUnavailable(f"transfer engine {session} does not answer.")

    def submit(self, session: str, source: int, destination: int, num_bytes: int) -> int:
        return self._fabric.submit(session, source, destination, num_bytes)

    def poll(self, handle: int) -> WriteState:
        return self._fabric.poll(handle)

    def close(self) -> None:
        self._regions.clear()
        self._fabric.remove(self.session)
