"""Real processes for tests: clusters on free ports, clients, and the leak check that ends every end-to-end test."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.cluster import Cluster, parse_cluster
from headwater.rpc import open_channel
from headwater.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)
from router.placement import Placed, place
from router.supervisor import Supervisor

# A start includes importing torch in every rank, two cores for all of them.
START_SECONDS = 240


def model_folder() -> Path:
    """SmolLM2-135M-Instruct, as deploy/setup.sh imports it."""
    cache = os.environ.get("HEADWATER_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "headwater"
    default = Path(cache).expanduser() / "SmolLM2-135M-Instruct"
    return Path(os.environ.get("HEADWATER_MODEL") or default)


# Ports of one worker of pytest.
_SHARE = 3_500


def _candidates() -> Iterator[int]:
    """Ports below those that a system hands out by itself, and above Mooncake's; each worker of pytest has its own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw3").removeprefix("gw")) % 4
    ports = list(range(18_000 + _SHARE * worker, 18_000 + _SHARE * (worker + 1)))
    begin = os.getpid() * 100 % len(ports)
    return itertools.cycle(ports[begin:] + ports[:begin])


_PORTS = _candidates()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, and nobody else takes soon."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in itertools.islice(_PORTS, _SHARE):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError(f"{count} free ports were asked for, and there are {len(found)}")


@dataclasses.dataclass(frozen=True)
class Group:
    """A prefill group of a test's cluster. Options are keys of its section."""

    name: str
    pp: int
    tp: int
    options: tuple[tuple[str, Any], ...] = ()


def write_cluster(
    path: Path, model: Path, groups: Sequence[Group], *, num_decode: int = 1, **model_options: Any
) -> Cluster:
    """A cluster file with free ports; returns what it says."""
    ports = iter(free_ports(1 + len(groups) + num_decode))
    lines = ["[model]", f'path = "{model}"']
    lines += [f"{key} = {json.dumps(value)}" for key, value in ({"dtype": "float32"} | model_options).items()]
    lines += ["[router]", f'address = "127.0.0.1:{next(ports)}"']
    for group in groups:
        lines += ["[[prefill]]", f'name = "{group.name}"', f'address = "127.0.0.1:{next(ports)}"']
        lines += [f"pp = {group.pp}", f"tp = {group.tp}"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in group.options]
    for number in range(num_decode):
        lines += ["[[decode]]", f'name = "d{number}"', f'address = "127.0.0.1:{next(ports)}"']
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return parse_cluster(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def processes(cluster: Cluster, path: Path, names: Sequence[str], log_dir: Path) -> Iterator[Supervisor]:
    """Runs the named processes of a cluster file. Leaves when all of them, and their workers, have ended."""
    placed = [process for process in place(cluster, path) if process.name in names]
    assert {process.name for process in placed} == set(names)
    stop_seconds = cluster.deadlines.drain + 2 * cluster.deadlines.stop
    supervisor = Supervisor(placed, stop_seconds=stop_seconds, log_dir=log_dir)
    with no_leaks([_port(process) for process in placed]):
        supervisor.start()
        try:
            supervisor.wait_ready(START_SECONDS)
            yield supervisor
        finally:
            assert supervisor.stop() == []


def _port(process: Placed) -> int:
    return int((process.address or ":0").rpartition(":")[2])


@contextlib.contextmanager
def no_leaks(ports: Sequence[int] = ()) -> Iterator[None]:
    """What ran before may run after, and nothing else: no process, no port, no thread."""
    me = psutil.Process()
    processes_before = {child.pid for child in me.children(recursive=True)}
    threads_before = set(threading.enumerate())
    yield
    left = [child for child in me.children(recursive=True) if child.pid not in processes_before]
    assert not left, f"processes left: {[child.cmdline() for child in left if child.is_running()]}"
    threads = [thread.name for thread in threading.enumerate() if thread not in threads_before and thread.is_alive()]
    # Pools of asyncio and gRPC, and tqdm's monitor, live as long as this process.
    left_threads = [name for name in threads if not name.startswith(("asyncio_", "Thread-", "tqdm_"))]
    assert not left_threads, f"threads left: {left_threads}"
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} is still open"


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a client got."""

    tokens: list[int]
    text: str
    finished: router_pb2.Finished
    accepted: router_pb2.Accepted
    kinds: list[str]


async def ask(address: str, token_ids: Sequence[int], max_tokens: int, **options: Any) -> Answer:
    """One request through the router, past end-of-sequence tokens unless `ignore_eos=False`."""
    request = router_pb2.GenerateRequest(
        token_ids=router_pb2.TokenIds(ids=token_ids), max_tokens=max_tokens, **({"ignore_eos": True} | options)
    )
    tokens: list[int] = []
    text, kinds = "", []
    accepted, finished = router_pb2.Accepted(), router_pb2.Finished()
    async with open_channel(address) as channel:
        async for response in router_pb2_grpc.RouterServiceStub(channel).Generate(request):
            kind = response.WhichOneof("event") or ""
            kinds.append(kind)
            if kind == "token":
                assert response.token.index == len(tokens)
                tokens.append(response.token.id)
                text += response.token.text
            elif kind == "finished":
                finished = response.finished
                text += finished.text
            elif kind == "accepted":
                accepted = response.accepted
    return Answer(tokens, text, finished, accepted, kinds)


async def until_paired(router: str, group: str, seconds: float = 20) -> None:
    """Returns when the router would give work to `group`, which has a health service of its name there."""
    async with open_channel(router) as channel, asyncio.timeout(seconds):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=group))
        async for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return


async def ask_all(address: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
    """All prompts, as many at the same time as a decode node takes with room to spare."""
    room = asyncio.Semaphore(12)

    async def one(prompt: Sequence[int]) -> Answer:
        async with room:
            return await ask(address, prompt, max_tokens)

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


@contextlib.asynccontextmanager
async def prefill_stub(address: str) -> AsyncIterator[prefill_pb2_grpc.PrefillServiceAsyncStub]:
    async with open_channel(address) as channel:
        yield prefill_pb2_grpc.PrefillServiceStub(channel)  # type: ignore[misc] # its asynchronous twin by channel


async def assert_balanced(cluster: Cluster, prefill: Sequence[str]) -> None:
    """Every page is free, no landing slot is held or quarantined, nothing is queued or running.

    Waits for requests that are just ending: a client has its answer before the last rank has quiesced, and a lost
    writer's slots come back when they are fenced.
    """
    async with asyncio.timeout(20):
        for name in prefill:
            async with prefill_stub(cluster.prefill_named(name).address) as stub:
                while True:
                    group = await stub.DescribePrefill(prefill_pb2.DescribePrefillRequest())
                    if not group.running_requests and not group.queued_requests:
                        break
            assert group.free_tokens == group.capacity_tokens
        for node in cluster.decode:
            async with open_channel(node.address) as channel:
                stub_ = decode_pb2_grpc.DecodeServiceStub(channel)
                while True:
                    state = await stub_.DescribeDecode(decode_pb2.DescribeDecodeRequest())
                    assert state.slots_free + state.slots_held + state.slots_quarantined == node.num_slots
                    if not (state.active_requests or state.slots_held or state.slots_quarantined):
                        break
            assert state.free_tokens == state.capacity_tokens


def events(log_file: Path, **wanted: Any) -> list[dict[str, Any]]:
    """Lifecycle events of a process's log whose fields equal `wanted`."""
    found = []
    for line in log_file.read_text(encoding="utf-8").splitlines():
        if line.startswith("{"):
            entry = json.loads(line)
            if "event" in entry and all(entry.get(key) == value for key, value in wanted.items()):
                found.append(entry)
    return found


GREEDY = common_pb2.SamplingParams()
