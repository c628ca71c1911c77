"""The seam between "how KV moves" and "what moves bytes".

`kv_transfer.mooncake` is the real engine; `kv_transfer.memory_engine` moves bytes inside one process, with
faults, for tests. `kv_transfer.writer` is how the rest of the library uses one.
"""

from __future__ import annotations

import enum
from typing import Protocol

from headwater.errors import TransferFailed


class WriteFailed(TransferFailed):
    """A write did not report success in time. Its bytes may still land at any later time."""


class WriteState(enum.Enum):
    """Of one submitted write."""

    PENDING = "pending"
    # The bytes are at their destination.
    DONE = "done"
    # The source is not read any more. What has been sent may still land.
    FAILED = "failed"
    # It never began.
    REFUSED = "refused"


class TransferEngine(Protocol):
    """One-sided writes into a peer's registered memory. Thread-safe."""

    @property
    def session(self) -> str:
        """How peers name this engine."""

    @property
    def transport(self) -> str:
        """What really carries the bytes: "tcp", "rdma" or "memory"."""

    def register(self, address: int, num_bytes: int) -> None:
        """Lets peers write to, and this side write from, [address, address + num_bytes).

        Raises:
            InvalidConfig: the range overlaps one that is registered.
        """

    def unregister(self, address: int) -> None:
        """Ends what `register` allowed, for writes that begin later.

        Raises:
            TransferFailed: the engine refused; the memory must stay as it is.
        """

    def fence(self, address: int) -> None:
        """`unregister`, and returns when no write, whenever it began, can land there any more. Blocks for a time
        that the engine bounds. Memory that a fenced writer knew must not be registered again at the same address:
        it may begin a write at any time.

        Raises:
            TransferFailed: as `unregister`; writes may still land.
        """

    def contact(self, session: str, epoch: str) -> None:
        """Makes the peer known before the first write to it. Blocks.

        Args:
            epoch: the peer's incarnation; another one than before under the same name is a new peer.

        Raises:
            PeerUnavailable: it did not answer. The next try is independent of this one.
        """

    def submit(self, session: str, source: int, destination: int, num_bytes: int) -> int:
        """Begins to copy `num_bytes` at `source` here to `destination` in the peer. Returns a handle for `poll`.

        Raises:
            WriteFailed: it could not begin; nothing will land.
        """

    def poll(self, handle: int) -> WriteState:
        """How a write stands. A handle is used up by any answer but `PENDING`."""

    def close(self) -> None:
        """Gives back what the engine holds."""
