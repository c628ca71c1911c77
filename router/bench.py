"""`headwater bench`: loads a running cluster and says what its clients saw."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence

from rich.table import Table

from headwater.client import AsyncClient, prompt_request
from headwater.errors import HeadwaterError
from headwater.exits import Exit
from headwater.v1 import router_pb2
from router.console import open_console
from router.ttft import PARTS

# Token ids of prompts: in every vocabulary, and none that ends a sequence in most.
_FIRST_ID, _LAST_ID = 100, 999


@dataclasses.dataclass(frozen=True)
class Load:
    """What is asked.

    Attributes:
        concurrency: requests under way at most.
        rate: requests a second, at exponential distances; 0: the next one as soon as there is room.
    """

    requests: int
    prompt_tokens: int
    max_tokens: int
    concurrency: int
    rate: float
    seed: int


@dataclasses.dataclass
class Seen:
    """What clients saw; seconds."""

    ttft: list[float] = dataclasses.field(default_factory=list)
    # Between one token and the next.
    gaps: list[float] = dataclasses.field(default_factory=list)
    parts: list[router_pb2.TtftParts] = dataclasses.field(default_factory=list)
    errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    tokens: int = 0
    seconds: float = 0.0


async def run_bench(address: str, load: Load, *, as_json: bool) -> int:
    """Runs the load and shows what came of it. Returns 1 when no request was answered."""
    seen = await _run(address, load)
    answered = len(seen.ttft)
    numbers = {
        "requests": load.requests,
        "answered": answered,
        "errors": dict(seen.errors),
        "seconds": round(seen.seconds, 3),
        "prompt_tokens_per_s": round(answered * load.prompt_tokens / seen.seconds, 1),
        "generated_tokens_per_s": round(seen.tokens / seen.seconds, 1),
        "ttft_seconds": _quantiles(seen.ttft),
        "between_tokens_seconds": _quantiles(seen.gaps),
        "ttft_parts_median_seconds": {
            name: round(statistics.median(getattr(parts, name) for parts in seen.parts), 6)
            for name in PARTS
            if seen.parts
        },
    }
    if as_json:
        sys.stdout.write(json.dumps(numbers) + "\n")
    else:
        table = Table("figure", "value")
        for key, value in numbers.items():
            parts = value.items() if isinstance(value, dict) else []
            table.add_row(key, ", ".join(f"{name} {number:g}" for name, number in parts) or str(value))
        open_console().print(table)
    return Exit.DONE if answered else Exit.PEER


async def _run(address: str, load: Load) -> Seen:
    seen, room, draw = Seen(), asyncio.Semaphore(load.concurrency), random.Random(load.seed)  # noqa: S311 - a load
    began = time.monotonic()
    async with AsyncClient(address) as client, asyncio.TaskGroup() as asking:
        for _ in range(load.requests):
            await room.acquire()
            prompt = [draw.randint(_FIRST_ID, _LAST_ID) for _ in range(load.prompt_tokens)]
            task = asking.create_task(_ask(client, prompt, load.max_tokens, seen))
            task.add_done_callback(lambda _: room.release())
            if load.rate:
                await asyncio.sleep(draw.expovariate(load.rate))
    seen.seconds = time.monotonic() - began
    return seen


async def _ask(client: AsyncClient, prompt: Sequence[int], max_tokens: int, seen: Seen) -> None:
    began = last = time.monotonic()
    first = True
    request = prompt_request(prompt, max_tokens, ignore_eos=True)
    try:
        async with contextlib.aclosing(client.generate(request)) as events:
            async for event in events:
                now = time.monotonic()
                if event.HasField("token"):
                    seen.tokens += 1
                    (seen.ttft if first else seen.gaps).append(now - (began if first else last))
                    first, last = False, now
                elif event.HasField("finished"):
                    seen.parts.append(event.finished.ttft)
    except HeadwaterError as error:
        seen.errors[type(error).__name__] += 1


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    wanted = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 6) for name, part in wanted.items()}
