"""How fast KV moves between two processes over Mooncake, and what planning costs.

python -m benchmarks.transfer [--json FILE]

Payload bytes a second of whole transfers (first chunk handed over to commit), staged and page to page, with and without
digests, against Mooncake's own transfer_sync_write of the same bytes, all in turn in each round of one run; ratios are
medians over rounds. Sender and receiver have one core each, and every mode fills as much memory as the others.

Planning and bookkeeping of one chunk of a prompt of a million tokens: 94 layers and 4 key/value heads of 128
(Qwen3-235B-A22B), from one rank of PP8·TP4 to the two ranks of TP8 that hold its head.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.report import machine, write_json
from headwater.rpc import Server
from headwater.v1 import common_pb2, transfer_pb2, transfer_pb2_grpc
from kv_transfer import memory
from kv_transfer.coverage import Coverage
from kv_transfer.geometry import Box, CellSize, PagedLayout, Span
from kv_transfer.incoming import PagedDestination
from kv_transfer.memory import HostBuffer
from kv_transfer.mooncake import MooncakeEngine
from kv_transfer.planner import plan, split
from kv_transfer.receiver import Receiver, ReceiverOptions, TransferServicer
from kv_transfer.sender import SEGMENT_BYTES, PagedSource, Sender, WriterRank
from kv_transfer.slots import SlotArena
from kv_transfer.writer import Writer

MIB = 1024 * 1024
# A chunk of 24 MiB: 12 layers of 1024 tokens, 4 heads of 128, bfloat16.
GEOMETRY = common_pb2.Geometry(
    num_layers=12, num_kv_heads=4, key_size=128, value_size=128, dtype="bfloat16", page_size=64
)
CHUNK_TOKENS, NUM_CHUNKS = 1024, 32
NUM_TOKENS = CHUNK_TOKENS * NUM_CHUNKS
LAYERS, HEADS = Span(0, 12), Span(0, 4)
PAYLOAD = NUM_TOKENS * 12 * 4 * 512
WRITE_SECONDS = 30.0
MODES = {
    "staged": {"direct": False, "digests": False},
    "staged_digests": {"direct": False, "digests": True},
    "direct": {"direct": True, "digests": False},
    "direct_digests": {"direct": True, "digests": True},
}


class Destination(PagedDestination):
    """Memory of a decode engine: one page that holds everything."""

    def retire(self) -> None:
        """It lives as long as the benchmark."""


async def receive(core: int) -> None:
    """The receiving process: answers one JSON command a line."""
    os.sched_setaffinity(0, {core})
    engine = MooncakeEngine("127.0.0.1", "tcp", WRITE_SECONDS)
    writer = Writer(engine, write_seconds=WRITE_SECONDS, max_bytes_in_flight=16 * MIB)
    arena = SlotArena(engine, 8, SEGMENT_BYTES)
    layout = PagedLayout(LAYERS, HEADS, NUM_TOKENS, 1, CellSize.of(GEOMETRY))
    kv, raw = HostBuffer(PAYLOAD), HostBuffer(PAYLOAD)
    engine.register(raw.address, raw.num_bytes)
    for buffer in (kv, raw):
        memory.view(buffer.address, buffer.num_bytes)[:] = bytes(buffer.num_bytes)
    server = Server("127.0.0.1:0", [])
    receivers = {}
    for name, options in MODES.items():
        receivers[name] = Receiver(
            engine,
            arena,
            writer,
            # One process, whatever the mode.
            epoch="benchmark",
            address=server.address,
            geometry=GEOMETRY,
            options=ReceiverOptions(slots_per_writer=4, **options),
        )
    current: dict[str, Receiver] = {}
    # One servicer for all modes: the benchmark runs one transfer at a time.
    servicer = TransferServicer(receivers["staged"])
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(servicer, server.grpc_server)
    await server.start()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print(json.dumps({"session": engine.session, "address": raw.address}), flush=True)
    incoming: Any = None
    while line := await reader.readline():
        command, name = json.loads(line)
        if command == "expect":
            current["now"] = receivers[name]
            servicer._receiver = receivers[name]  # noqa: SLF001 - see above
            transfer_id = f"{name}-{time.monotonic_ns()}"
            incoming = receivers[name].expect(transfer_id, 1, NUM_TOKENS, Destination(layout, [0], kv.address))
            print(json.dumps(receivers[name].grant(incoming).SerializeToString().hex()), flush=True)
        else:
            delivery = await incoming.committed()
            print(json.dumps(delivery.num_bytes), flush=True)
    os._exit(0)


class Peer:
    """The receiving process as the sender sees it."""

    def __init__(self, core: int) -> None:
        command = [sys.executable, "-m", "benchmarks.transfer", "--receive", str(core)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hello = self._read()

    def ask(self, command: str, name: str = "") -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, name]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


async def measure(rounds: int, console: Console) -> dict[str, list[float]]:
    """GB/s by mode and round."""
    cores = sorted(os.sched_getaffinity(0))
    peer = await asyncio.to_thread(Peer, cores[-1])
    os.sched_setaffinity(0, {cores[0]})
    engine = MooncakeEngine("127.0.0.1", "tcp", WRITE_SECONDS)
    writer = Writer(engine, write_seconds=WRITE_SECONDS, max_bytes_in_flight=16 * MIB)
    arena = SlotArena(engine, 6, SEGMENT_BYTES)
    layout = PagedLayout(LAYERS, HEADS, 64, NUM_TOKENS // 64, CellSize.of(GEOMETRY))
    pool = HostBuffer(PAYLOAD)
    memory.view(pool.address, PAYLOAD)[:] = os.urandom(MIB) * (PAYLOAD // MIB)
    engine.register(pool.address, PAYLOAD)
    sender = Sender(
        writer,
        arena,
        PagedSource(layout, pool.address),
        GEOMETRY,
        WriterRank(0, "benchmark"),
        chunk_tokens=CHUNK_TOKENS,
        reply_seconds=10,
        acknowledge_seconds=60,
    )
    pages = list(range(NUM_TOKENS // 64))

    async def transfer(mode: str) -> float:
        grant = common_pb2.Grant.FromString(bytes.fromhex(await asyncio.to_thread(peer.ask, "expect", mode)))
        outgoing = sender.open(grant, pages, lambda error: console.print(f"failed: {error}"))
        started = time.perf_counter()
        for start in range(0, NUM_TOKENS, CHUNK_TOKENS):
            outgoing.send(Span(start, start + CHUNK_TOKENS))
        outgoing.finish(0)
        moved = await asyncio.to_thread(peer.ask, "committed")
        seconds = time.perf_counter() - started
        assert moved == PAYLOAD
        await outgoing.ended()
        return PAYLOAD / seconds / 1e9

    async def raw(_: str) -> float:
        return await asyncio.to_thread(raw_writes, engine, pool, peer.hello)

    runs: dict[str, Callable[[str], Awaitable[float]]] = {"mooncake": raw, **dict.fromkeys(MODES, transfer)}
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    try:
        for number in range(rounds + 1):
            for name, run in runs.items():
                speed = await run(name)
                # The first round is for connections and page faults.
                if number:
                    speeds[name].append(speed)
    finally:
        peer.close()
        writer.close()
        sender.close()
        engine.close()
    return speeds


def raw_writes(engine: MooncakeEngine, pool: HostBuffer, peer: dict[str, Any]) -> float:
    """GB/s of Mooncake's own blocking call, a chunk at a time."""
    size = PAYLOAD // NUM_CHUNKS
    started = time.perf_counter()
    for number in range(NUM_CHUNKS):
        status = engine._engine.transfer_sync_write(  # noqa: SLF001 - the wrapper has no blocking write
            peer["session"], pool.address + number * size, peer["address"] + number * size, size
        )
        assert status == 0
    return PAYLOAD / (time.perf_counter() - started) / 1e9


def planning(chunk_tokens: int = 8192, num_tokens: int = 1_048_576) -> tuple[float, float]:
    """Milliseconds a chunk, and bytes that are kept of the second half of the prompt."""
    geometry = common_pb2.Geometry(num_layers=94, num_kv_heads=4, key_size=128, value_size=128, dtype="bfloat16")
    cell = CellSize.of(geometry)
    # The first of eight stages, the first of four tensor ranks; its one head is on two decode ranks.
    layout = PagedLayout(Span(0, 12), Span(0, 1), 64, num_tokens // 64, cell)
    pages = np.arange(num_tokens // 64)
    coverages = [Coverage(Box(Span(0, 94), Span(0, 1), Span(0, num_tokens))) for _ in range(2)]
    key = common_pb2.TransferKey(transfer_id="t" * 32, attempt=1, epoch="e" * 16)
    digest = bytes(16)

    def one_chunk(start: int) -> None:
        sequence = 0
        for coverage in coverages:
            for box in split(Box(layout.layers, layout.heads, Span(start, start + chunk_tokens)), cell, SEGMENT_BYTES):
                plan(layout, pages, box)
                transfer_pb2.Receipt(key=key, sequence=sequence, slot=0, box=box.to_proto(), digest=digest)
                sequence += 1
                coverage.add(box)

    starts = range(0, num_tokens, chunk_tokens)
    seconds = []
    for start in starts[: len(starts) // 2]:
        began = time.perf_counter()
        one_chunk(start)
        seconds.append(time.perf_counter() - began)
    tracemalloc.start()
    for start in starts[len(starts) // 2 :]:
        one_chunk(start)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return statistics.median(seconds) * 1e3, grown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--receive", type=int, metavar="CORE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive is not None:
        asyncio.run(receive(arguments.receive))
        return
    console = Console()
    speeds = asyncio.run(measure(arguments.rounds, console))
    plan_ms, grown = planning()
    ratios = {
        f"{name.replace('_digests', '')}_ratio{'_digests' if 'digests' in name else ''}": round(
            statistics.median(one / raw for one, raw in zip(speeds[name], speeds["mooncake"], strict=True)), 3
        )
        for name in MODES
    }
    numbers: dict[str, Any] = {
        **ratios,
        "plan_ms_per_chunk": round(plan_ms, 3),
        "plan_kept_bytes_of_64_chunks": grown,
        "gb_per_s": {name: round(statistics.median(values), 3) for name, values in speeds.items()},
    }
    table = Table(title=f"{PAYLOAD // MIB} MiB in chunks of 24 MiB, loopback TCP, {machine()['cpu']}")
    for column in ("", "GB/s (median)", "of Mooncake's own"):
        table.add_column(column)
    table.add_row("transfer_sync_write", f"{numbers['gb_per_s']['mooncake']:.2f}", "1")
    for name, ratio in zip(MODES, ratios.values(), strict=True):
        table.add_row(name.replace("_", ", "), f"{numbers['gb_per_s'][name]:.2f}", f"{ratio:.2f}")
    console.print(table)
    console.print(f"planning and bookkeeping: {plan_ms:.2f} ms a chunk; {grown} bytes were kept of 64 chunks")
    if arguments.json:
        write_json(arguments.json, numbers)


if __name__ == "__main__":
    main()
