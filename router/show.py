"""Tables and JSON of `headwater status` and `headwater check`."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from google.protobuf import json_format
from rich.live import Live
from rich.table import Table

from headwater.security import credentials
from headwater.v1 import router_pb2
from router.check import Report
from router.console import open_console

_COLOURS = {"serving": "green", "draining": "cyan", "not_serving": "yellow", "unreachable": "red"}
_MIB = 1024 * 1024


def show_status(status: router_pb2.StatusResponse, *, as_json: bool) -> None:
    """The router's groups on standard output."""
    if as_json:
        _write_json(
            json_format.MessageToDict(
                status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
        )
        return
    console = open_console()
    console.print(status_table(status))
    console.print(f"router metrics: {url(status.metrics_address)}/metrics")
    console.print(f"page: {url(status.page_address)}/")


def url(address: str) -> str:
    """Of an HTTP server of the cluster whose credentials this process has."""
    return f"{'https' if credentials().ca else 'http'}://{address}"


def watch_status(ask: Callable[[], router_pb2.StatusResponse], seconds: float, *, as_json: bool) -> None:
    """The same again and again, until it is interrupted."""
    while as_json:
        show_status(ask(), as_json=True)
        time.sleep(seconds)
    with Live(status_table(ask()), console=open_console(), auto_refresh=False) as live:
        while True:
            time.sleep(seconds)
            live.update(status_table(ask()), refresh=True)


def status_table(status: router_pb2.StatusResponse) -> Table:
    """The router's groups."""
    table = Table("group", "role", "state", "address", "layout", "tokens", "requests", "transport", "epoch", "detail")
    for group in status.groups:
        waiting = f" ({group.queued_requests} wait)" if group.queued_requests else ""
        breaker = f"breaker {group.breaker}" if group.breaker != "closed" else ""
        table.add_row(
            group.name,
            group.role,
            f"[{_COLOURS.get(group.state, 'white')}]{group.state}[/]",
            group.address,
            group.layout,
            f"{group.used_tokens}/{group.capacity_tokens}",
            f"{group.active_requests}{waiting}",
            group.transport,
            group.epoch,
            group.detail or breaker,
        )
    return table


def show_check(report: Report, *, as_json: bool) -> None:
    """What a cluster file means, on standard output, and what is wrong with it, on standard error. As JSON, both on
    standard output.
    """
    if as_json:
        _write_json(dataclasses.asdict(report))
        return
    table = Table("name", "role", "address", "here", "layout", "tokens", "KV per rank")
    for row in report.rows:
        kv = f"{row.kv_bytes_per_rank / _MIB:.0f} MiB" if row.kv_bytes_per_rank else ""
        tokens = str(row.capacity_tokens) if row.capacity_tokens else ""
        table.add_row(row.name, row.role, row.address, "yes" if row.here else "no", row.layout, tokens, kv)
    open_console().print(table)
    for note in report.notes:
        sys.stderr.write(f"note: {note}\n")
    for problem in report.problems:
        sys.stderr.write(f"problem: {problem}\n")


def _write_json(fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fields, ensure_ascii=False) + "\n")
    sys.stdout.flush()
