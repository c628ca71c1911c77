"""A cluster under load whose groups are killed, stopped, restarted and drained, all in the order of a seed.

Whatever happens: every request ends within its deadline with the right tokens or a typed error, what a client got
before an error is the beginning of the right answer, and when everybody is back all answers are right and all pools
balance.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from headwater.client import AsyncClient, prompt_request
from headwater.cluster import Cluster, load_cluster
from headwater.errors import HeadwaterError
from router.supervisor import Supervisor
from tests import tiny_models
from tests.harness import Group, assert_balanced, processes, until_paired, write_cluster
from tests.oracle import Oracle

# Short, so that what is stopped is noticed while it is stopped, and after.
DEADLINES = """
[deadlines]
reply = 3
step = 4
silence = 3
write = 3
acknowledge = 6
lease = 8
resume = 4
stop = 4
drain = 5
"""
OPTIONS = (("chunk_tokens", 16), ("page_size", 16), ("pool_tokens", 4096), ("chunk_policy", "fixed"))
LENGTHS = [1, 17, 40, 100, 250, 600]
NUM_ANSWER = 8
# Of a request, whatever is done to its groups.
REQUEST_SECONDS = 90.0
NUM_CLIENTS = 4
# A group that was restarted serves again: Python, torch, a tiny model, on cores that others want.
BACK_SECONDS = 120.0
STOP_SECONDS = (0.5, 6.0)


class Chaos:
    """Clients and a trouble-maker over one running cluster."""

    def __init__(
        self, cluster: Cluster, supervisor: Supervisor, answers: dict[tuple[int, ...], list[int]], seed: int
    ) -> None:
        self._cluster = cluster
        self._supervisor = supervisor
        self._answers = answers
        self._random = random.Random(seed)
        self.happened: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    @property
    def troubles(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {
            "a worker is killed": self._worker_dies,
            "a worker is stopped": self._worker_stops,
            "a leader is killed": self._leader_dies,
            "a decode node is killed": self._decode_dies,
            "a decode node is stopped": self._decode_stops,
            "a group is drained": self._drained,
        }

    async def run(self, seconds: float, troubles: list[str] | None = None) -> None:
        """Makes trouble for so long, or the given kinds in turn."""
        over = asyncio.Event()
        clients = [asyncio.ensure_future(self._client(over, random.Random(number))) for number in range(NUM_CLIENTS)]
        end = time.monotonic() + seconds
        kinds = iter(troubles) if troubles is not None else iter(lambda: self._pick(end), "")
        try:
            for kind in kinds:
                self.happened[kind] += 1
                await self.troubles[kind]()
                await self._everybody_back()
                await asyncio.sleep(self._random.uniform(0, 1))
        finally:
            over.set()
            await asyncio.gather(*clients)
        await self._all_is_well()

    def _pick(self, end: float) -> str:
        return self._random.choice(sorted(self.troubles)) if time.monotonic() < end else ""

    # --- the load

    async def _client(self, over: asyncio.Event, choose: random.Random) -> None:
        async with AsyncClient(self._cluster.router.address) as client:
            while not over.is_set():
                prompt = choose.choice(sorted(self._answers))
                outcome = await self._ask(client, prompt)
                self.happened[outcome] += 1
                if outcome != "answered":
                    # Everybody may be gone for a moment.
                    await asyncio.sleep(0.1)

    async def _ask(self, client: AsyncClient, prompt: tuple[int, ...]) -> str:
        """What came of one request: "answered" or the class of its error."""
        right, got = self._answers[prompt], list[int]()
        request = prompt_request(list(prompt), NUM_ANSWER, ignore_eos=True)
        try:
            async with asyncio.timeout(REQUEST_SECONDS), contextlib.aclosing(client.generate(request)) as responses:
                async for response in responses:
                    if response.HasField("token"):
                        got.append(response.token.id)
        except HeadwaterError as error:
            if got != right[: len(got)]:
                self.wrong.append(f"{len(prompt)} tokens: {got} and then {error!r}, expected {right}")
            return type(error).__name__
        except TimeoutError:
            self.wrong.append(f"{len(prompt)} tokens: neither answer nor error within {REQUEST_SECONDS:g} s")
            return "hung"
        if got != right:
            self.wrong.append(f"{len(prompt)} tokens: {got}, expected {right}")
        return "answered"

    # --- the trouble

    def _prefill(self) -> str:
        return self._random.choice([group.name for group in self._cluster.prefill])

    def _decode(self) -> str:
        return self._random.choice([node.name for node in self._cluster.decode])

    async def _worker(self) -> int:
        """A worker of a prefill group; what the router says of one that has just been lost is half a second old."""
        while True:
            leader = self._supervisor.children[self._prefill()].pid
            with contextlib.suppress(psutil.NoSuchProcess):
                if workers := psutil.Process(leader).children():
                    return self._random.choice(workers).pid
            await asyncio.sleep(0.1)

    async def _worker_dies(self) -> None:
        _signal(await self._worker(), signal.SIGKILL)

    async def _worker_stops(self) -> None:
        await self._pause(await self._worker())

    async def _leader_dies(self) -> None:
        self._kill_and_restart(self._prefill())

    async def _decode_dies(self) -> None:
        self._kill_and_restart(self._decode())

    async def _decode_stops(self) -> None:
        await self._pause(self._supervisor.children[self._decode()].pid)

    async def _drained(self) -> None:
        name = self._random.choice([self._prefill(), self._decode()])
        async with AsyncClient(self._cluster.router.address) as client:
            await client.drain(name, draining=True)
            await asyncio.sleep(self._random.uniform(0.5, 3))
            await client.drain(name, draining=False)

    def _kill_and_restart(self, name: str) -> None:
        _signal(self._supervisor.children[name].pid, signal.SIGKILL)
        self._supervisor.restart(name)

    async def _pause(self, pid: int) -> None:
        _signal(pid, signal.SIGSTOP)
        await asyncio.sleep(self._random.uniform(*STOP_SECONDS))
        _signal(pid, signal.SIGCONT)

    async def _everybody_back(self) -> None:
        for group in (*self._cluster.prefill, *self._cluster.decode):
            try:
                await until_paired(self._cluster.router.address, group.name, seconds=BACK_SECONDS)
            except TimeoutError:
                raise AssertionError(f"{group.name} is not back after {BACK_SECONDS:g} s: {self.happened}") from None

    async def _all_is_well(self) -> None:
        await self._everybody_back()
        async with AsyncClient(self._cluster.router.address) as client:
            for prompt in self._answers:
                outcome = await self._ask(client, prompt)
                if outcome != "answered":
                    self.wrong.append(f"with everybody back: {outcome}")
        await assert_balanced(self._cluster, [group.name for group in self._cluster.prefill])


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def run(folder: Path, seconds: float, seed: int, troubles: list[str] | None = None) -> Chaos:
    """Chaos over 2 prefill groups (PP2 and TP2) and 2 decode nodes of a tiny model. Ends with the leak check."""
    model = tiny_models.make("llama", folder / "model")
    path = folder / "cluster.toml"
    # The prompts come again and again: one group has most of them in its cache, the other one computes each.
    groups = [Group("p0", 2, 1, OPTIONS), Group("p1", 1, 2, (*OPTIONS, ("prefix_cache", False)))]
    write_cluster(path, model, groups, num_decode=2)
    path.write_text(path.read_text(encoding="utf-8") + DEADLINES, encoding="utf-8")
    cluster = load_cluster(path)
    oracle = Oracle(model)
    answers = {tuple(prompt): oracle.greedy(prompt, NUM_ANSWER) for prompt in tiny_models.prompts(LENGTHS)}
    with processes(cluster, path, ["p0", "p1", "d0", "d1", "router"], folder) as supervisor:
        chaos = Chaos(cluster, supervisor, answers, seed)
        asyncio.run(chaos.run(seconds, troubles))
    return chaos
