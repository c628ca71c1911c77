"""`headwater up`: runs what a cluster file places on this host until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from headwater.client import AsyncClient
from headwater.cluster import load_cluster
from headwater.errors import InvalidConfig, PeerUnavailable
from router.console import open_console
from router.observe import NAME, Prometheus
from router.show import url
from router.supervisor import Supervisor


class _Teller:
    """Says what happens: to people on standard error, or as JSON lines on standard output."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._console = open_console(stderr=True)

    def serving(self, supervisor: Supervisor, page: str, prometheus: str | None) -> None:
        rows = []
        for process in supervisor.placed:
            child = supervisor.children[process.name]
            rows.append((process.name, process.role, process.address or "", child.pid, str(child.log_file or "")))
        if prometheus is not None:
            child = supervisor.children[NAME]
            rows.append((NAME, "observer", prometheus, child.pid, str(child.log_file or "")))
        if self._as_json:
            names = ("name", "role", "address", "pid", "log")
            processes = [dict(zip(names, row, strict=True)) for row in rows]
            self._write({"event": "serving", "page": page, "processes": processes})
            return
        table = Table("process", "role", "address", "pid", "log", title="serving; Ctrl-C stops everything")
        table.caption = f"page: {page}" if page else None
        for row in rows:
            table.add_row(*map(str, row))
        self._console.print(table)

    def stopping(self) -> None:
        self._say("stopping", "stopping")

    def killed(self, sentence: str) -> None:
        self._say("killed", sentence)

    def _say(self, event: str, sentence: str) -> None:
        if self._as_json:
            self._write({"event": event, "message": sentence})
        else:
            self._console.print(sentence)

    def _write(self, fields: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(fields, ensure_ascii=False) + "\n")
        sys.stdout.flush()


async def run_up(path: Path, log_dir: Path | None, scrape_seconds: float | None = None, *, as_json: bool) -> int:
    """Returns 0 after SIGINT or SIGTERM, when everything has ended.

    Args:
        scrape_seconds: run a Prometheus as well, which looks at each process so often.

    Raises:
        InvalidConfig: before anything is started.
        PeerUnavailable: a process ended by itself; the others were stopped.
        DeadlinePassed: a server was not ready within `deadlines.worker_start`.
    """
    with contextlib.ExitStack() as stack:
        prometheus = None
        if scrape_seconds is not None:
            # Kept with the logs, or as long as this runs.
            folder = log_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-")))
            prometheus = Prometheus(folder / NAME, scrape_seconds)
        await _until_told(path, log_dir, prometheus, _Teller(as_json=as_json))
    return 0


async def _until_told(path: Path, log_dir: Path | None, prometheus: Prometheus | None, teller: _Teller) -> None:
    cluster = load_cluster(path)
    supervisor = Supervisor.of_cluster(path, log_dir)
    if prometheus is not None and not any(process.role == "router" for process in supervisor.placed):
        raise InvalidConfig(f"--observe: the router of {path} is on another host, and knows what there is to observe.")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())
    supervisor.start()
    running = asyncio.create_task(_run(supervisor, cluster.deadlines.worker_start, prometheus, teller))
    try:
        await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        for task in (stopping, running):
            task.cancel()
        await asyncio.gather(stopping, running, return_exceptions=True)
        teller.stopping()
        for sentence in supervisor.stop():
            teller.killed(sentence)


async def _run(supervisor: Supervisor, start_seconds: float, prometheus: Prometheus | None, teller: _Teller) -> None:
    await supervisor.ready(start_seconds)
    page = await _page(supervisor)
    observer = None if prometheus is None else await prometheus.run(supervisor, page, start_seconds)
    teller.serving(supervisor, page, observer)
    child = await supervisor.first_exit()
    raise PeerUnavailable(await asyncio.to_thread(child.describe_exit))


async def _page(supervisor: Supervisor) -> str:
    """Where the router's page is; empty without a router here."""
    for router in (process for process in supervisor.placed if process.role == "router"):
        async with AsyncClient(router.address or "") as client:
            return f"{url((await client.status()).page_address)}/"
    return ""
