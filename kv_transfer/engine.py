"""The seam between "how KV moves" and "what moves bytes".

`kv_transfer.mooncake` is the real engine; `kv_transfer.memory_engine` moves bytes inside one process, with
faults, for tests.
"""

from __future__ import annotations

from typing import Protocol

from headwater.errors import TransferFailed


class WriteFailed(TransferFailed):
    """A write did not report success. Its bytes may still land at any later time."""


class TransferEngine(Protocol):
    """One-sided writes into a peer's registered memory."""

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
        """Ends what `register` allowed."""

    def write(self, session: str, source: int, destination: int, num_bytes: int) -> None:
        """Copies `num_bytes` at `source` here to `destination` in the peer. Blocks; returns when they are there.

        Raises:
            WriteFailed: anything else happened.
        """

    def close(self) -> None:
        """Gives back what the engine holds."""
