"""Messages over one TCP connection, each with its length before it, and silence that is noticed.

The log goes to every rank for every step, and gRPC's messages were most of what a leader of 32 ranks cost. Neither end
knows here what a message means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headwater.rpc import MAX_MESSAGE_BYTES

_LENGTH_BYTES = 4
# Each end says something (an empty message, if nothing else) so many times within the silence that ends it.
_BEATS = 4


class Frames(asyncio.Protocol):
    """One end of a connection.

    Args:
        on_message: called with each message.
        on_end: called once, with the reason, when the connection is over.
        silence_seconds: the other end is given up when nothing came for so long.
    """

    def __init__(
        self, on_message: Callable[[bytes], None], on_end: Callable[[str], None], silence_seconds: float
    ) -> None:
        self.on_message = on_message
        self.on_end = on_end
        self._silence_seconds = silence_seconds
        self._buffer = bytearray()
        self._queued = bytearray()
        self._transport: asyncio.Transport | None = None
        self._heard = False
        self._silent_beats = 0
        self._beat: asyncio.TimerHandle | None = None
        self._reason = "the other end closed the connection"

    def send(self, message: bytes) -> None:
        """Queues a message; it is dropped when the connection is over.

        What is queued in one turn of the event loop leaves together: sending costs more than what is sent.
        """
        if self._transport is not None and not self._transport.is_closing():
            if not self._queued:
                asyncio.get_running_loop().call_soon(self._flush)
            self._queued += len(message).to_bytes(_LENGTH_BYTES) + message

    def close(self) -> None:
        """Ends the connection when everything that was queued is sent."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._tick()

    def data_received(self, data: bytes) -> None:
        self._heard = True
        self._buffer += data
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._buffer[:_LENGTH_BYTES])
            if end > _LENGTH_BYTES + MAX_MESSAGE_BYTES:
                self._abort(f"the other end announced a message of {end - _LENGTH_BYTES} bytes")
                return
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[_LENGTH_BYTES:end])
            del self._buffer[:end]
            if message:
                self.on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._beat is not None:
            self._beat.cancel()
        self.on_end(self._reason if exc is None else f"{self._reason} ({exc})")

    def _tick(self) -> None:
        self._silent_beats = 0 if self._heard else self._silent_beats + 1
        self._heard = False
        if self._silent_beats > _BEATS:
            self._abort(f"nothing was heard for {self._silence_seconds:g} s (deadlines.silence)")
            return
        self.send(b"")
        self._beat = asyncio.get_running_loop().call_later(self._silence_seconds / _BEATS, self._tick)

    def _flush(self) -> None:
        if self._queued and self._transport is not None:
            self._transport.write(bytes(self._queued))
            self._queued.clear()

    def _abort(self, reason: str) -> None:
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()
