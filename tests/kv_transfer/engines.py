"""Bare Mooncake engines in a process of their own, each with one registered region.

python -m tests.kv_transfer.engines COUNT BYTES reads one JSON command a line, a method of `Engines` and its
arguments, and answers each with a line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from kv_transfer import memory
from kv_transfer.engine import WriteState
from kv_transfer.memory import HostBuffer
from kv_transfer.mooncake import MooncakeEngine


class Engines:
    def __init__(self, count: int, num_bytes: int) -> None:
        self.engines = [MooncakeEngine("127.0.0.1", "tcp", 2.0) for _ in range(count)]
        self.buffers = [HostBuffer(num_bytes) for _ in range(count)]
        for engine, buffer in zip(self.engines, self.buffers, strict=True):
            engine.register(buffer.address, num_bytes)

    def where(self) -> list[tuple[str, int]]:
        return [(engine.session, buffer.address) for engine, buffer in zip(self.engines, self.buffers, strict=True)]

    def count(self, engine: int, value: int) -> int:
        buffer = self.buffers[engine]
        return bytes(memory.view(buffer.address, buffer.num_bytes)).count(bytes([value]))

    def add(self) -> int:
        """Another region of engine 0; its address."""
        self.buffers.append(HostBuffer(self.buffers[0].num_bytes))
        self.engines[0].register(self.buffers[-1].address, self.buffers[-1].num_bytes)
        return self.buffers[-1].address

    def fence(self, engine: int) -> None:
        self.engines[engine].fence(self.buffers[engine].address)

    def unregister(self, engine: int) -> None:
        self.engines[engine].unregister(self.buffers[engine].address)

    def write(self, session: str, address: int, value: int) -> str:
        engine, buffer = self.engines[0], self.buffers[0]
        memory.view(buffer.address, buffer.num_bytes)[:] = bytes([value]) * buffer.num_bytes
        engine.contact(session, "e")
        handle = engine.submit(session, buffer.address, address, buffer.num_bytes)
        while (state := engine.poll(handle)) is WriteState.PENDING:
            pass
        return state.value


class EngineProcess:
    """`Engines` as a test sees them."""

    def __init__(self, count: int, num_bytes: int) -> None:
        command = [sys.executable, "-m", "tests.kv_transfer.engines", str(count), str(num_bytes)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.where: list[tuple[str, int]] = [(session, address) for session, address in self("where")]

    def begin(self, command: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()

    def end(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def __call__(self, command: str, *arguments: Any) -> Any:
        self.begin(command, *arguments)
        return self.end()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


if __name__ == "__main__":
    MADE = Engines(int(sys.argv[1]), int(sys.argv[2]))
    for line in sys.stdin:
        name, arguments = json.loads(line)
        sys.stdout.write(json.dumps(getattr(MADE, name)(*arguments)) + "\n")
        sys.stdout.flush()
