"""Messages over one connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from headwater.rpc import MAX_MESSAGE_BYTES
from prefill_node.frames import Frames


class End:
    """What one end has heard."""

    def __init__(self, silence_seconds: float = 60.0) -> None:
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()
        self.reasons: asyncio.Queue[str] = asyncio.Queue()
        self.frames = Frames(self.messages.put_nowait, self.reasons.put_nowait, silence_seconds)


@asynccontextmanager
async def listening(end: End) -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(lambda: end.frames, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def test_messages_come_whole_and_in_order_however_they_are_cut() -> None:
    async def test() -> None:
        end = End()
        async with listening(end) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            sent = [b"a", b"b" * 300, b"c" * 70_000]
            stream = b"".join(len(message).to_bytes(4) + message for message in sent)
            for start, stop in ((0, 3), (3, 4), (4, 7), (7, 40_000), (40_000, len(stream))):
                writer.write(stream[start:stop])
                await writer.drain()
                await asyncio.sleep(0)
            assert [await end.messages.get() for _ in sent] == sent
            writer.close()
            assert await end.reasons.get() == "the other end closed the connection"

    run(test())


def test_both_ends_talk_and_what_was_queued_before_closing_arrives() -> None:
    async def test() -> None:
        one, other = End(), End()
        async with listening(one) as port:
            await asyncio.get_running_loop().create_connection(lambda: other.frames, "127.0.0.1", port)
            other.frames.send(b"question")
            assert await one.messages.get() == b"question"
            one.frames.send(b"x" * 10_000_000)
            one.frames.close()
            assert len(await other.messages.get()) == 10_000_000
            await other.reasons.get()
            other.frames.send(b"too late")

    run(test())


def test_a_silent_end_is_given_up_and_a_talking_one_is_not() -> None:
    async def test() -> None:
        end, talking = End(0.4), End(0.4)
        async with listening(end) as port, listening(talking) as other_port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            partner = End(0.4)
            await asyncio.get_running_loop().create_connection(lambda: partner.frames, "127.0.0.1", other_port)
            assert await end.reasons.get() == "nothing was heard for 0.4 s (deadlines.silence)"
            assert talking.reasons.empty()
            assert partner.messages.empty()
            writer.close()
            partner.frames.close()
            await talking.reasons.get()

    run(test())


def test_a_message_too_long_to_be_one_ends_the_connection() -> None:
    async def test() -> None:
        end = End()
        async with listening(end) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write((MAX_MESSAGE_BYTES + 1).to_bytes(4))
            assert await end.reasons.get() == f"the other end announced a message of {MAX_MESSAGE_BYTES + 1} bytes"
            writer.close()

    run(test())
