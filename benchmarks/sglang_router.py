"""SGLang's router (Rust, HTTP) measured as `benchmarks.router` measures ours: equal prompts, answers, rates and cores.

    pip install sglang-router==0.3.2      # into an environment of its own, if you like; nothing else here needs it
    python -m benchmarks.sglang_router [--requests 20000] [--seconds 20] [--json FILE]

What it does for a request is less: it sends it to both workers at once and passes the decode worker's stream on.
Admission, grants and the order of the two, which ours waits for, happen between SGLang's workers. Its workers answer at
once here, like ours; a direct request is one that a client sends to both by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from aiohttp import web

from benchmarks.report import print_figures, write_json
from benchmarks.router import NUM_ANSWER, PROMPT, latencies, throughput
from tests.harness import free_ports

_START_SECONDS = 60
_BODY = {
    "input_ids": PROMPT,
    "sampling_params": {"max_new_tokens": NUM_ANSWER, "temperature": 0},
    "stream": True,
}


async def _generate(request: web.Request) -> web.StreamResponse:
    """As an SGLang worker streams an answer: one event for each token."""
    await request.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for index in range(NUM_ANSWER):
        event = {"index": 0, "text": "five", "output_ids": [5], "meta_info": {"completion_tokens": index + 1}}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def _about(request: web.Request) -> web.Response:
    return web.json_response({"model_path": "tiny", "served_model_name": "tiny", "is_generation": True, "tp_size": 1})


async def _worker(port: int) -> web.AppRunner:
    application = web.Application()
    application.add_routes([web.post("/generate", _generate), web.get("/{path:.*}", _about)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


async def _ask(session: aiohttp.ClientSession, url: str) -> float:
    """Seconds to the first token."""
    began, first = time.perf_counter(), 0.0
    async with session.post(f"{url}/generate", json=_BODY) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: ") and not first:
                first = time.perf_counter() - began
    return first


async def _ask_both(session: aiohttp.ClientSession, prefill: str, decode: str) -> float:
    _, first = await asyncio.gather(_ask(session, prefill), _ask(session, decode))
    return first


async def _until_ready(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(_START_SECONDS):
        while True:
            try:
                await _ask(session, url)
            except aiohttp.ClientError:
                await asyncio.sleep(0.5)
            else:
                return


async def measure(requests: int, seconds: float) -> dict[str, Any]:
    os.sched_setaffinity(0, {1})
    ports = free_ports(4)
    prefill, decode, router = (f"http://127.0.0.1:{port}" for port in ports[:3])
    workers = [await _worker(port) for port in ports[:2]]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--policy", "round_robin"]
    command += ["--prefill", prefill, "--decode", decode, "--host", "127.0.0.1", "--port", str(ports[2])]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports[3]), "--log-level", "warn"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, {0})
    )
    try:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await _until_ready(session, router)
            numbers = await latencies(
                lambda: _ask(session, router), lambda: _ask_both(session, prefill, decode), seconds
            )
            numbers |= await throughput(lambda: _ask(session, router), psutil.Process(process.pid), requests)
    finally:
        process.terminate()
        await process.wait()
        for worker in workers:
            await worker.cleanup()
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang_router", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of added")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if importlib.util.find_spec("sglang_router") is None:
        parser.error("sglang_router is not installed: pip install sglang-router==0.3.2")
    numbers = asyncio.run(measure(arguments.requests, arguments.seconds))
    print_figures("sglang-router", numbers, {})
    if arguments.json:
        write_json(arguments.json, numbers)


if __name__ == "__main__":
    main()
