"""A prefill or a decode group in a process of its own, over Mooncake TCP, that does what it is told.

python -m tests.kv_transfer.peer prefill|decode NAME reads one JSON command a line and answers each with a line.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

from headwater.errors import HeadwaterError
from headwater.v1 import common_pb2
from kv_transfer.geometry import Span
from kv_transfer.receiver import ReceiverOptions
from kv_transfer.sender import Outgoing
from tests.kv_transfer.world import DecodeGroup, MooncakeFabric, PrefillGroup, Shape, Transfer, assert_landed

BYTES = 64 * 1024
# Short enough for tests that wait for it.
WRITE_SECONDS = 2.0


class PrefillPeer:
    """Commands of a prefill group."""

    def __init__(self, name: str, shape: Shape = Shape(2, 1, page_size=16), num_pages: int = 512) -> None:
        self.group = PrefillGroup(
            MooncakeFabric(WRITE_SECONDS),
            shape,
            name,
            num_pages=num_pages,
            write_seconds=WRITE_SECONDS,
            segment_bytes=BYTES,
        )
        self._outgoing: dict[str, list[Outgoing]] = {}

    async def start(self) -> None:
        """Nothing more to do."""

    async def open(self, transfer: str, num_tokens: int, grant: str, pages: list[int]) -> None:
        """Computes the whole prompt and opens the transfer."""
        self.group.compute(transfer, num_tokens, pages, range(num_tokens))
        parsed = common_pb2.Grant.FromString(bytes.fromhex(grant))
        self._outgoing[transfer] = self.group.open(parsed, pages)

    async def send(self, transfer: str, start: int, end: int, chunk: int) -> None:
        for at in range(start, end, chunk):
            for one in self._outgoing[transfer]:
                one.send(Span(at, min(at + chunk, end)))

    async def finish(self, transfer: str) -> None:
        for one in self._outgoing[transfer]:
            one.finish(7 if one is self._outgoing[transfer][-1] else None)

    async def abort(self, transfer: str) -> None:
        for one in self._outgoing[transfer]:
            one.abort()

    async def ended(self, transfer: str) -> list[str]:
        """Class names of the errors of the ranks; empty for one that delivered."""
        results = [await one.ended() for one in self._outgoing.pop(transfer)]
        return [type(result.error).__name__ if result.error else "" for result in results]

    async def failures(self) -> list[str]:
        """Class names of what the ranks were told of, whatever the transfer."""
        return [type(error).__name__ for rank in self.group.ranks for error in rank.failures]

    async def held(self) -> int:
        """Send segments in use."""
        return sum(rank.arena.held for rank in self.group.ranks)

    async def close(self) -> None:
        self.group.close()


class DecodePeer:
    """Commands of a decode group."""

    def __init__(self, name: str, shape: Shape = Shape(page_size=16), num_slots: int = 8, **options: Any) -> None:
        self.group = DecodeGroup(
            MooncakeFabric(WRITE_SECONDS),
            shape,
            name,
            ReceiverOptions(**options),
            num_slots,
            BYTES,
        )
        self._transfers: dict[str, Transfer] = {}

    async def start(self) -> None:
        await self.group.start()

    async def session(self) -> str:
        return self.group.ranks[0].engine.session

    async def expect(self, transfer: str, num_tokens: int) -> str:
        made = self._transfers[transfer] = self.group.expect(transfer, num_tokens)
        return made.grant.SerializeToString().hex()

    async def writers(self, transfer: str) -> int:
        return len(self._transfers[transfer].incoming[0].attempt.writers)

    async def verified(self, transfer: str) -> int:
        return self._transfers[transfer].incoming[0].coverage.prefix()

    async def outcome(self, transfer: str) -> str:
        """Waits for the end: "right", or the class name of the error. Committed KV that is wrong fails the peer."""
        made = self._transfers.pop(transfer)
        try:
            for incoming in made.incoming:
                await incoming.committed()
        except HeadwaterError as error:
            return type(error).__name__
        assert_landed(made, "float32")
        return "right"

    async def abort(self, transfer: str) -> None:
        for incoming in self._transfers[transfer].incoming:
            await incoming.abort("told to", 5)

    async def slots(self) -> dict[str, int]:
        arena = self.group.ranks[0].arena
        arena.check()
        return {
            "free": arena.free,
            "held": arena.held,
            "quarantined": arena.quarantined,
            "retired": arena.retired,
            "open": self.group.ranks[0].receiver.open_transfers,
        }

    async def close(self) -> None:
        await self.group.close()


async def _serve(role: str, name: str, options: dict[str, Any]) -> None:
    peer: PrefillPeer | DecodePeer = {"prefill": PrefillPeer, "decode": DecodePeer}[role](name, **options)
    await peer.start()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _say("ready")
    while line := await reader.readline():
        command, arguments = json.loads(line)
        _say(await getattr(peer, command)(**arguments))
        if command == "close":
            return


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


class Process:
    """A peer as its test sees it."""

    def __init__(self, role: str, name: str, **options: Any) -> None:
        command = [sys.executable, "-m", "tests.kv_transfer.peer", role, name, json.dumps(options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._read() == "ready"

    @property
    def pid(self) -> int:
        return self._process.pid

    def __call__(self, command: str, **arguments: Any) -> Any:
        self.begin(command, **arguments)
        return self._read()

    def begin(self, command: str, **arguments: Any) -> None:
        """Without waiting for the answer, which `end` reads."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, arguments]) + "\n")
        self._process.stdin.flush()

    def end(self) -> Any:
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the peer ended with {self._process.wait()}"
        return json.loads(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends it in order: it checks that everything balances."""
        self("close")
        assert self._process.wait(30) == 0


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
