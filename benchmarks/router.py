"""The router alone, against groups that answer at once: what it adds to the first token, and how much it takes.

    python -m benchmarks.router [--requests 100000] [--seconds 20] [--json FILE]

One core for the router process; groups and clients share another. Every request has a prompt of 48 token ids and an
answer of 4 tokens, which is 6 messages to the client and 9 from the two groups.

added: 200 requests a second, at even distances, by the router and directly in turn. Directly: a client opens Decode,
    has the grant, opens Prefill and has the first token. What the router adds is the difference to the median of that.
throughput: as many requests as 64 clients can ask one after the other, and what a request costs the router's core.
    The clients and the groups are Python on one core, too: where they are the limit, the second number says more.
memory: the router's resident set, from after the first tenth of --requests to the end.
relay: the same for a process that makes the same calls and passes the same messages on, and does nothing else: what
    gRPC's asyncio leaves to a router.
streams: 2,000 requests under way at once: the decode group ends none before it has all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import print_figures, write_json
from headwater.client import AsyncClient, prompt_request
from headwater.cluster import parse_cluster
from headwater.lifecycle import configure_logging
from headwater.rpc import Server, open_channel
from headwater.tokens import pack
from headwater.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)
from router.server import running_router
from tests.harness import free_ports
from tests.router.fakes import tiny_geometry, tiny_model

PROMPT = [7] * 48
NUM_ANSWER = 4
RATE, NUM_CLIENTS, NUM_STREAMS = 200, 64, 2000
# A request whose seed is this gets its answer's end only when all streams are open.
_HELD = 99


class Prefill(prefill_pb2_grpc.PrefillServiceServicer):
    """Has the first token at once."""

    async def Prefill(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.PrefillRequest, context: object
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        yield prefill_pb2.PrefillResponse(scheduled=prefill_pb2.PrefillScheduled(num_chunks=1))
        yield prefill_pb2.PrefillResponse(first_token=prefill_pb2.FirstToken(token_id=5))
        yield prefill_pb2.PrefillResponse(completed=prefill_pb2.PrefillCompleted())

    async def DescribePrefill(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.DescribePrefillRequest, context: object
    ) -> prefill_pb2.DescribePrefillResponse:
        return prefill_pb2.DescribePrefillResponse(
            epoch="e",
            serving=True,
            geometry=tiny_geometry(),
            chunk_tokens=64,
            capacity_tokens=1 << 40,
            free_tokens=1 << 40,
        )


class Decode(decode_pb2_grpc.DecodeServiceServicer):
    """Has the KV and the answer at once."""

    def __init__(self) -> None:
        self.held = 0
        self._all_held = asyncio.Event()

    async def Decode(  # noqa: N802 - gRPC's name
        self, request: decode_pb2.DecodeRequest, context: object
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        grant = common_pb2.Grant(transfer_id=request.transfer_id, attempt=request.attempt)
        yield decode_pb2.DecodeResponse(grant=grant)
        if request.sampling.seed == _HELD:
            self.held += 1
            if self.held == NUM_STREAMS:
                self._all_held.set()
            await self._all_held.wait()
        yield decode_pb2.DecodeResponse(committed=decode_pb2.Committed())
        for index in range(1, NUM_ANSWER):
            yield decode_pb2.DecodeResponse(token=decode_pb2.DecodedToken(token_id=5, index=index))
        finished = decode_pb2.DecodeFinished(reason=common_pb2.FINISH_REASON_LENGTH, num_generated_tokens=NUM_ANSWER)
        yield decode_pb2.DecodeResponse(finished=finished)

    async def DescribeDecode(  # noqa: N802 - gRPC's name
        self, request: decode_pb2.DescribeDecodeRequest, context: object
    ) -> decode_pb2.DescribeDecodeResponse:
        return decode_pb2.DescribeDecodeResponse(
            epoch="e", serving=True, geometry=tiny_geometry(), capacity_tokens=1 << 40, free_tokens=1 << 40
        )


class Relay(router_pb2_grpc.RouterServiceServicer):
    """Opens both legs and passes on what they say, for one client's request like for every other's."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(open_channel(prefill))
        self._decode = decode_pb2_grpc.DecodeServiceStub(open_channel(decode))

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: router_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        decoding = aiter(self._decode.Decode(decode_pb2.DecodeRequest(transfer_id="t", attempt=1)))
        await anext(decoding)
        prefilling = self._prefill.Prefill(prefill_pb2.PrefillRequest(request_id="r", tokens=pack(PROMPT)))
        yield router_pb2.GenerateResponse(accepted=router_pb2.Accepted())
        async for prefilled in prefilling:
            if prefilled.HasField("first_token"):
                yield router_pb2.GenerateResponse(token=router_pb2.Token(id=prefilled.first_token.token_id))
        async for decoded in decoding:
            if decoded.HasField("token"):
                yield router_pb2.GenerateResponse(token=router_pb2.Token(id=decoded.token.token_id))
        yield router_pb2.GenerateResponse(finished=router_pb2.Finished())


async def serve(role: str, ports: list[int]) -> None:
    """The process that is measured, on a core of its own: a router with all that it logs, or a relay.

    Args:
        ports: its own, the prefill group's, the decode group's.
    """
    os.sched_setaffinity(0, {0})
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if role == "relay":
        server = Server(f"127.0.0.1:{ports[0]}", [])
        relay = Relay(f"127.0.0.1:{ports[1]}", f"127.0.0.1:{ports[2]}")
        router_pb2_grpc.add_RouterServiceServicer_to_server(relay, server.grpc_server)
        await server.start()
        print("serving", flush=True)
        await stop.wait()
        await server.stop(0)
        return
    cluster = parse_cluster(
        f'[model]\npath = "unused"\n[router]\naddress = "127.0.0.1:{ports[0]}"\n'
        f'[[prefill]]\nname = "p"\naddress = "127.0.0.1:{ports[1]}"\n'
        f'[[decode]]\nname = "d"\naddress = "127.0.0.1:{ports[2]}"\n'
    )
    configure_logging(cluster.router.name, cluster.log_level, form=cluster.log_format)
    async with running_router(cluster, tiny_model()):
        print("serving", flush=True)
        await stop.wait()


def request(seed: int = 1) -> router_pb2.GenerateRequest:
    return prompt_request(PROMPT, NUM_ANSWER, seed=seed, ignore_eos=True)


async def by_router(client: AsyncClient) -> float:
    """Seconds to the first token."""
    began, first = time.perf_counter(), 0.0
    async for event in client.generate(request()):
        if event.HasField("token") and not first:
            first = time.perf_counter() - began
    return first


class Direct:
    """A client that is its own router."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._channels = [open_channel(prefill), open_channel(decode)]
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(self._channels[0])
        self._decode = decode_pb2_grpc.DecodeServiceStub(self._channels[1])
        self._packed = pack(PROMPT)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def first_token(self) -> float:
        """Seconds to the first token."""
        began, first = time.perf_counter(), 0.0
        decoding = self._decode.Decode(decode_pb2.DecodeRequest(transfer_id="t", attempt=1))
        events = aiter(decoding)
        await anext(events)
        async for event in self._prefill.Prefill(prefill_pb2.PrefillRequest(request_id="r", tokens=self._packed)):
            if event.HasField("first_token"):
                first = time.perf_counter() - began
        async for _ in events:
            pass
        return first


async def latencies(
    by_router: Callable[[], Awaitable[float]], directly: Callable[[], Awaitable[float]], seconds: float
) -> dict[str, float]:
    """Figures of `added`. Both return the seconds to the first token of one request."""
    ways = {"router": by_router, "direct": directly}
    for _ in range(50):
        for ask in ways.values():
            await ask()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(2):
        for name, ask in ways.items():
            tasks = []
            began = time.perf_counter()
            for number in range(int(RATE * seconds / 4)):
                await asyncio.sleep(max(0.0, began + number / RATE - time.perf_counter()))
                tasks.append(asyncio.ensure_future(ask()))
            found[name] += await asyncio.gather(*tasks)
    base = statistics.median(found["direct"])
    late = sorted(1e3 * (value - base) for value in found["router"])
    own = sorted(1e3 * (value - base) for value in found["direct"])
    return {
        "direct_p50_ms": round(1e3 * base, 3),
        "direct_p99_over_p50_ms": round(own[len(own) * 99 // 100], 3),
        "added_p50_ms": round(late[len(late) // 2], 3),
        "added_p99_ms": round(late[len(late) * 99 // 100], 3),
    }


async def throughput(
    by_router: Callable[[], Awaitable[float]], router: psutil.Process, requests: int
) -> dict[str, float]:
    """Figures of `throughput` and `memory`."""

    async def asked(count: int) -> float:
        left = iter(range(count))

        async def ask() -> None:
            for _ in left:
                await by_router()

        began = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(NUM_CLIENTS)))
        return time.perf_counter() - began

    await asked(requests // 10)
    before, cpu = router.memory_info().rss, sum(router.cpu_times()[:2])
    done = requests - requests // 10
    seconds = await asked(done)
    cpu = sum(router.cpu_times()[:2]) - cpu
    return {
        "requests_per_s": round(done / seconds, 1),
        "router_core_share": round(cpu / seconds, 3),
        "requests_per_s_of_router_core": round(done / cpu, 1),
        "rss_growth_mb": round((router.memory_info().rss - before) / 2**20, 1),
        "requests": requests,
    }


async def streams(client: AsyncClient, decode: Decode) -> dict[str, Any]:
    async def ask() -> int:
        return len([event async for event in client.generate(request(_HELD)) if event.HasField("token")])

    answers = await asyncio.gather(*(ask() for _ in range(NUM_STREAMS)))
    if set(answers) != {NUM_ANSWER}:
        raise RuntimeError(f"answers of {sorted(set(answers))} tokens")
    return {"peak_streams": decode.held}


@contextlib.asynccontextmanager
async def measured(role: str, groups: list[str]) -> AsyncIterator[tuple[AsyncClient, psutil.Process]]:
    """A client of a process that is measured, and that process.

    Args:
        groups: where prefill and decode listen.
    """
    ports = [free_ports(1)[0], *(int(address.rpartition(":")[2]) for address in groups)]
    command = [sys.executable, "-m", "benchmarks.router", "--serve", role, *map(str, ports)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise RuntimeError(f"the {role} did not start: run `{' '.join(command)}` to see why.")
        async with AsyncClient(f"127.0.0.1:{ports[0]}") as client:
            yield client, psutil.Process(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def relayed(groups: list[str], requests: int) -> float:
    """Requests a second of a relay's core."""
    async with measured("relay", groups) as (client, relay):
        return (await throughput(lambda: by_router(client), relay, requests))["requests_per_s_of_router_core"]


async def measure(requests: int, seconds: float) -> dict[str, Any]:
    os.sched_setaffinity(0, {1})
    prefill, decode = Server("127.0.0.1:0", []), Server("127.0.0.1:0", [])
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(Prefill(), prefill.grpc_server)
    group = Decode()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(group, decode.grpc_server)
    await prefill.start()
    await decode.start()
    groups = [prefill.address, decode.address]
    direct = Direct(*groups)
    try:
        async with measured("router", groups) as (client, router):
            numbers: dict[str, Any] = await latencies(lambda: by_router(client), direct.first_token, seconds)
            # The machine's speed changes within minutes: a relay before, and one after.
            before = await relayed(groups, requests // 10)
            numbers |= await throughput(lambda: by_router(client), router, requests)
            after = await relayed(groups, requests // 10)
            numbers["relay_requests_per_s_of_core"] = round((before + after) / 2, 1)
            # Last: what a burst leaves behind and is given back later would hide growth.
            numbers |= await streams(client, group)
    finally:
        await direct.close()
        await prefill.stop(0)
        await decode.stop(0)
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of added")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        role, *ports = arguments.serve
        asyncio.run(serve(role, [int(port) for port in ports]))
        return
    numbers = asyncio.run(measure(arguments.requests, arguments.seconds))
    bounds = {
        "added_p50_ms": "≤ 2",
        "added_p99_ms": "≤ 10",
        "requests_per_s": "≥ 1000",
        "peak_streams": f"≥ {NUM_STREAMS}",
        "rss_growth_mb": "flat",
    }
    print_figures("The router", numbers, bounds)
    if arguments.json:
        write_json(arguments.json, numbers)


if __name__ == "__main__":
    main()
