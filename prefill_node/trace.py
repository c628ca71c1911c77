"""`headwater trace`: where a request's time went in its prefill group, as a trace, a picture and a table.

Asks, converts and writes; what a group remembers is `history`'s business, how bars look is `timeline`'s.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from headwater.cluster import Prefill
from headwater.errors import DeadlinePassed, InvalidConfig, InvalidRequest, PeerUnavailable, from_rpc_error
from headwater.rpc import open_channel
from headwater.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_node.timeline import Bar, bubble_share, chrome_trace, gantt_svg


@dataclasses.dataclass(frozen=True, slots=True)
class StageSummary:
    """One stage from the request's first chunk on stage 0 to the request's last chunk here.

    The stage is busy with whatever it computes, other requests' chunks included: idle is what nobody used.
    """

    # Of the request.
    num_chunks: int
    busy_seconds: float
    # None when no time lies between the two.
    bubble_share: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class TransferSummary:
    """The request's KV on its way."""

    num_boxes: int
    num_bytes: int
    # From the first begin to the last acknowledgement.
    seconds: float
    # The last acknowledgement came this long after the last stage's last chunk; None when that has no chunk.
    exposed_seconds: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A trace in numbers: every stage in order, and the transfers if there were any."""

    stages: tuple[StageSummary, ...]
    transfers: TransferSummary | None


async def fetch_trace(
    request_id: str, groups: Sequence[Prefill], reply_seconds: float
) -> tuple[str, prefill_pb2.TracePrefillResponse]:
    """Name and answer of the first group that knows the request. Groups that cannot be reached are passed over.

    Raises:
        InvalidRequest: no group knows it.
    """
    passed_over = []
    for group in groups:
        peer = f"prefill group {group.name} at {group.address}"
        async with open_channel(group.address) as channel:
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)
            request = prefill_pb2.TracePrefillRequest(request_id=request_id)
            try:
                return group.name, await stub.TracePrefill(request, timeout=reply_seconds)
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error, peer)
                if isinstance(error, InvalidRequest):
                    passed_over.append(f"{peer} does not know it")
                elif isinstance(error, PeerUnavailable | DeadlinePassed):
                    passed_over.append(f"{peer} does not answer ({error})")
                else:
                    raise error from rpc_error
    asked = "; ".join(passed_over) or "the cluster file has no prefill group"
    raise InvalidRequest(
        f"no trace of request {request_id!r}: {asked}. A group remembers only requests that are running or ended "
        "lately (64 per group), and none from before its last restart."
    )


def bars_of(request_id: str, response: prefill_pb2.TracePrefillResponse) -> tuple[list[Bar], list[str]]:
    """A trace as bars, and the tracks that they are on: every stage, then the ranks that sent something."""
    bars = [
        Bar(
            f"stage {span.stage}",
            span.start,
            span.end,
            _tokens(span),
            span.request_id,
            {"tokens": [span.token_start, span.token_end], "step": span.sequence},
        )
        for span in response.stages
    ]
    bars += [
        Bar(
            f"transfer rank {span.rank}",
            span.start,
            span.end,
            _tokens(span),
            request_id,
            {"tokens": [span.token_start, span.token_end], "num_bytes": span.num_bytes},
        )
        for span in response.transfers
    ]
    tracks = [f"stage {stage}" for stage in range(response.num_stages)]
    tracks += [f"transfer rank {rank}" for rank in sorted({span.rank for span in response.transfers})]
    return bars, tracks


def summary(request_id: str, response: prefill_pb2.TracePrefillResponse) -> Summary:
    """A trace in numbers."""
    own = [span for span in response.stages if span.request_id == request_id]
    start = min((span.start for span in own if span.stage == 0), default=None)
    ends = [[span.end for span in own if span.stage == stage] for stage in range(response.num_stages)]
    bars, tracks = bars_of(request_id, response)
    stages = []
    # There are more tracks: those of the transfers come last.
    for track, ends_here in zip(tracks, ends, strict=False):
        end = max(ends_here, default=None)
        # Reports of two stages come on two streams, so it is not certain that times are in order.
        if start is None or end is None or start >= end:
            stages.append(StageSummary(len(ends_here), 0.0, None))
        else:
            idle = bubble_share(bars, track, start, end)
            stages.append(StageSummary(len(ends_here), (1 - idle) * (end - start), idle))
    computed = max(ends[-1], default=None) if ends else None
    return Summary(tuple(stages), _transfers(response, computed))


def default_file_name(request_id: str) -> str:
    """Where the trace goes when nobody says; an id may hold anything."""
    return f"trace-{re.sub('[^A-Za-z0-9._-]', '_', request_id)}.json"


def write_trace(
    request_id: str,
    group: str,
    response: prefill_pb2.TracePrefillResponse,
    out: Path,
    svg: Path | None,
    *,
    as_json: bool,
) -> None:
    """Writes the trace, and the picture if `svg` says where; then says on standard output what they show.

    Raises:
        InvalidConfig: a file cannot be written.
    """
    bars, tracks = bars_of(request_id, response)
    title = f"request {request_id} on prefill group {group}"
    _write(out, json.dumps(chrome_trace(bars, tracks)))
    if svg is not None:
        _write(svg, gantt_svg(bars, tracks, title))
    if as_json:
        numbers = dataclasses.asdict(summary(request_id, response))
        files = {"trace": str(out), "svg": None if svg is None else str(svg)}
        sys.stdout.write(json.dumps({"request": request_id, "group": group} | files | numbers) + "\n")
        return
    sys.stdout.write(f"{title}\n{out}: a trace; open it at https://ui.perfetto.dev\n")
    if svg is not None:
        sys.stdout.write(f"{svg}: a Gantt chart; open it in a browser\n")
    _show(summary(request_id, response))


def _tokens(span: prefill_pb2.StageSpan | prefill_pb2.TransferSpan) -> str:
    return f"{span.token_start}–{span.token_end}"


def _transfers(response: prefill_pb2.TracePrefillResponse, computed: float | None) -> TransferSummary | None:
    """Of all boxes. `computed` is when the last stage's last chunk was."""
    spans = response.transfers
    if not spans:
        return None
    last = max(span.end for span in spans)
    return TransferSummary(
        num_boxes=len(spans),
        num_bytes=sum(span.num_bytes for span in spans),
        seconds=last - min(span.start for span in spans),
        exposed_seconds=None if computed is None else last - computed,
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"cannot write {path}: {error.strerror}. Name another file with --out or --svg.") from error


def _show(numbers: Summary) -> None:
    table = Table("stage", "chunks", "busy s", "bubble")
    for stage, line in enumerate(numbers.stages):
        idle = "–" if line.bubble_share is None else f"{line.bubble_share:.1%}"
        table.add_row(str(stage), str(line.num_chunks), f"{line.busy_seconds:.3f}", idle)
    Console().print(table)
    transfers = numbers.transfers
    if transfers is None:
        sys.stdout.write("transfers: none\n")
        return
    sys.stdout.write(
        f"transfers: {transfers.num_boxes} boxes, {decimal(transfers.num_bytes)}, {transfers.seconds:.3f} s from the "
        "first begin to the last acknowledgement\n"
    )
    if transfers.exposed_seconds is not None:
        sys.stdout.write(
            f"exposed: {transfers.exposed_seconds:.3f} s from the last stage's last chunk to that acknowledgement\n"
        )
