"""`headwater up`: runs what a cluster file places on this host until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headwater.client import AsyncClient
from headwater.cluster import load_cluster
from headwater.errors import PeerUnavailable
from router.console import open_console
from router.show import url
from router.supervisor import Supervisor


async def run_up(path: Path, log_dir: Path | None) -> int:
    """Returns 0 after SIGINT or SIGTERM, when everything has ended.

    Raises:
        InvalidConfig: before anything is started.
        PeerUnavailable: a process ended by itself; the others were stopped.
        DeadlinePassed: a server was not ready within `deadlines.worker_start`.
    """
    cluster = load_cluster(path)
    supervisor = Supervisor.of_cluster(path, log_dir)
    console = open_console(stderr=True)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())
    supervisor.start()
    running = asyncio.create_task(_run(supervisor, cluster.deadlines.worker_start, console))
    try:
        await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        for task in (stopping, running):
            task.cancel()
        await asyncio.gather(stopping, running, return_exceptions=True)
        console.print("stopping")
        for sentence in supervisor.stop():
            console.print(sentence)
    return 0


async def _run(supervisor: Supervisor, start_seconds: float, console: Console) -> None:
    await supervisor.ready(start_seconds)
    table = Table("process", "role", "address", "pid", "log", title="serving; Ctrl-C stops everything")
    for process in supervisor.placed:
        child = supervisor.children[process.name]
        table.add_row(process.name, process.role, process.address or "", str(child.pid), str(child.log_file or ""))
    for router in (process for process in supervisor.placed if process.role == "router"):
        async with AsyncClient(router.address or "") as client:
            table.caption = f"page: {url((await client.status()).page_address)}/"
    console.print(table)
    child = await supervisor.first_exit()
    raise PeerUnavailable(await asyncio.to_thread(child.describe_exit))
