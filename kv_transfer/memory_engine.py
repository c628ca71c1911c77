"""A transfer engine inside one process, with faults under a seed. For tests.

Engines of one `MemoryFabric` write into each other's registered memory. What real engines do wrong, this one
does on demand: fail, fail and land later, report success without landing, land twice, or take long (so that
concurrent writes land out of order).
"""

from __future__ import annotations

import ctypes
import dataclasses
import random
import threading
from collections.abc import Callable

from headwater.errors import InvalidConfig
from kv_transfer.engine import WriteFailed


@dataclasses.dataclass(frozen=True)
class Faults:
    """Probabilities per write."""

    seed: int = 0
    fail: float = 0.0
    # Reported as failed; the bytes land when the fabric's `land_late` is called, read from the source then.
    late: float = 0.0
    # Reported as done; the bytes never land.
    drop: float = 0.0
    # Lands now, and once more when `land_late` is called.
    duplicate: float = 0.0
    # Up to this many other writes overtake a write.
    overtaken_by: int = 0


class MemoryFabric:
    """The network between the engines of one test."""

    def __init__(self, faults: Faults = Faults()) -> None:
        self._faults = faults
        self._random = random.Random(faults.seed)  # noqa: S311 - not for secrets
        self._engines: dict[str, MemoryEngine] = {}
        self._late: list[Callable[[], None]] = []
        self._lock = threading.Condition()
        self._finished = 0

    def engine(self, session: str) -> MemoryEngine:
        engine = MemoryEngine(self, session)
        self._engines[session] = engine
        return engine

    def remove(self, session: str) -> None:
        """The peer is gone: writes to it fail."""
        self._engines.pop(session, None)

    def land_late(self) -> int:
        """Lands every write that was kept back. Returns how many."""
        late, self._late = self._late, []
        for land in late:
            land()
        return len(late)

    def write(self, session: str, source: int, destination: int, num_bytes: int) -> None:
        target = self._engines.get(session)
        if target is None or not target.registered(destination, num_bytes):
            raise WriteFailed(f"{session}: no such peer, or the destination is not registered there.")

        def land() -> None:
            if target.registered(destination, num_bytes):
                ctypes.memmove(destination, source, num_bytes)

        faults = self._faults
        with self._lock:
            draw = self._random.random()
            behind = self._finished + self._random.randint(0, faults.overtaken_by)
        for probability, lands_now, lands_later, fails in (
            (faults.fail, False, False, True),
            (faults.late, False, True, True),
            (faults.drop, False, False, False),
            (faults.duplicate, True, True, False),
            (1.0, True, False, False),
        ):
            if draw >= probability:
                draw -= probability
                continue
            if lands_now:
                with self._lock:
                    # Bounded: when no other write comes, this one goes on.
                    self._lock.wait_for(lambda: self._finished >= behind, timeout=0.01)
                land()
            if lands_later:
                self._late.append(land)
            with self._lock:
                self._finished += 1
                self._lock.notify_all()
            if fails:
                raise WriteFailed(f"{session}: injected failure.")
            return


class MemoryEngine:
    """`TransferEngine` on a `MemoryFabric`."""

    transport = "memory"

    def __init__(self, fabric: MemoryFabric, session: str) -> None:
        self._fabric = fabric
        self.session = session
        self._regions: dict[int, int] = {}

    def register(self, address: int, num_bytes: int) -> None:
        for start, length in self._regions.items():
            if address < start + length and start < address + num_bytes:
                raise InvalidConfig(f"{self.session}: the range overlaps one that is registered.")
        self._regions[address] = num_bytes

    def unregister(self, address: int) -> None:
        self._regions.pop(address, None)

    def registered(self, address: int, num_bytes: int) -> bool:
        return any(
            start <= address and address + num_bytes <= start + length for start, length in self._regions.items()
        )

    def write(self, session: str, source: int, destination: int, num_bytes: int) -> None:
        self._fabric.write(session, source, destination, num_bytes)

    def close(self) -> None:
        self._regions.clear()
        self._fabric.remove(self.session)
