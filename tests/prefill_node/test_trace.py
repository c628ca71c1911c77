"""`headwater trace`: bars and numbers of a trace exactly, and the command against a real server."""

from __future__ import annotations

import asyncio
import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from headwater.cluster import Prefill
from headwater.errors import CapacityError, InvalidConfig, InvalidRequest
from headwater.rpc import Server
from headwater.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_node import history
from prefill_node.timeline import Bar
from prefill_node.trace import (
    StageSummary,
    Summary,
    TransferSummary,
    bars_of,
    default_file_name,
    fetch_trace,
    summary,
    write_trace,
)

# An id that no file can be named after, and that HTML and rich would take for something else.
ODD = "a/b:[1] <é>"
# Nobody listens there.
NOWHERE = "127.0.0.1:1"
# Ends every wait that should have ended long before.
PATIENCE_SECONDS = 60


def chunk(stage: int, start: float, end: float, tokens: tuple[int, int], request_id: str) -> prefill_pb2.StageSpan:
    return prefill_pb2.StageSpan(
        stage=stage,
        sequence=tokens[0] // 100,
        start=start,
        end=end,
        request_id=request_id,
        token_start=tokens[0],
        token_end=tokens[1],
    )


def box(rank: int, start: float, end: float, tokens: tuple[int, int], num_bytes: int) -> prefill_pb2.TransferSpan:
    return prefill_pb2.TransferSpan(
        rank=rank, start=start, end=end, token_start=tokens[0], token_end=tokens[1], num_bytes=num_bytes
    )


def traced(request_id: str = "mine") -> prefill_pb2.TracePrefillResponse:
    """Two chunks on two stages, between them one of another request; ranks 0 and 2 of four sent their KV."""
    return prefill_pb2.TracePrefillResponse(
        num_stages=2,
        stages=[
            chunk(0, -0.5, 0.5, (500, 600), "other"),
            chunk(0, 1.0, 2.0, (0, 100), request_id),
            chunk(0, 2.0, 2.5, (600, 700), "other"),
            chunk(1, 2.0, 3.0, (0, 100), request_id),
            chunk(0, 3.0, 5.0, (100, 200), request_id),
            chunk(1, 3.0, 3.5, (600, 700), "other"),
            chunk(1, 5.0, 9.0, (100, 200), request_id),
        ],
        transfers=[
            box(2, 3.0, 4.0, (0, 100), 3000),
            box(0, 2.0, 3.5, (0, 100), 1000),
            box(2, 9.0, 9.25, (100, 200), 4000),
        ],
    )


def test_bars_are_on_a_track_for_each_stage_and_each_rank_that_sent() -> None:
    bars, tracks = bars_of("mine", traced())
    assert tracks == ["stage 0", "stage 1", "transfer rank 0", "transfer rank 2"]
    assert len(bars) == 10
    assert bars[0] == Bar("stage 0", -0.5, 0.5, "500–600", "other", {"tokens": [500, 600], "step": 5})
    assert bars[6] == Bar("stage 1", 5.0, 9.0, "100–200", "mine", {"tokens": [100, 200], "step": 1})
    assert bars[7] == Bar("transfer rank 2", 3.0, 4.0, "0–100", "mine", {"tokens": [0, 100], "num_bytes": 3000})


def test_a_summary_in_exact_numbers() -> None:
    # Stage 0 from 1 to 5: all but 2.5 to 3. Stage 1 from 1 to 9: 2 to 3.5 and 5 to 9.
    assert summary("mine", traced()) == Summary(
        stages=(StageSummary(2, 3.5, 0.125), StageSummary(2, 5.5, 0.3125)),
        transfers=TransferSummary(num_boxes=3, num_bytes=8000, seconds=7.25, exposed_seconds=0.25),
    )


def test_a_step_with_chunks_of_two_requests_is_counted_once() -> None:
    response = prefill_pb2.TracePrefillResponse(
        num_stages=1, stages=[chunk(0, 1.0, 2.0, (0, 50), "other"), chunk(0, 1.0, 2.0, (0, 50), "mine")]
    )
    assert summary("mine", response) == Summary((StageSummary(1, 1.0, 0.0),), None)


def test_a_request_that_has_not_reached_the_last_stage() -> None:
    response = prefill_pb2.TracePrefillResponse(
        num_stages=2, stages=[chunk(0, 1.0, 2.0, (0, 100), "mine")], transfers=[box(0, 2.0, 3.0, (0, 100), 10)]
    )
    assert summary("mine", response) == Summary(
        (StageSummary(1, 1.0, 0.0), StageSummary(0, 0.0, None)), TransferSummary(1, 10, 1.0, None)
    )


def test_a_request_that_is_only_queued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    response = prefill_pb2.TracePrefillResponse(num_stages=2)
    assert bars_of("mine", response) == ([], ["stage 0", "stage 1"])
    assert summary("mine", response) == Summary((StageSummary(0, 0.0, None),) * 2, None)
    write_trace("mine", "p0", response, tmp_path / "t.json", tmp_path / "t.svg", as_json=False)
    assert "transfers: none" in capsys.readouterr().out
    write_trace("mine", "p0", response, tmp_path / "t.json", None, as_json=True)
    stage = {"num_chunks": 0, "busy_seconds": 0.0, "bubble_share": None}
    assert json.loads(capsys.readouterr().out) == {
        "request": "mine",
        "group": "p0",
        "trace": str(tmp_path / "t.json"),
        "svg": None,
        "stages": [stage, stage],
        "transfers": None,
    }
    assert "Nothing to show" in (tmp_path / "t.svg").read_text(encoding="utf-8")


def test_a_report_of_the_second_stage_that_overtook_the_firsts() -> None:
    response = prefill_pb2.TracePrefillResponse(
        num_stages=2, stages=[chunk(1, 1.0, 2.0, (0, 1), "mine"), chunk(0, 2.0, 3.0, (0, 1), "mine")]
    )
    assert summary("mine", response).stages == (StageSummary(1, 1.0, 0.0), StageSummary(1, 0.0, None))


def test_file_names_keep_harmless_characters_only() -> None:
    assert default_file_name("Ab-9_z.1") == "trace-Ab-9_z.1.json"
    assert default_file_name(ODD) == "trace-a_b__1_____.json"
    assert default_file_name("../x\n") == "trace-.._x_.json"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "t.json"
    with pytest.raises(InvalidConfig, match=r"cannot write .*t\.json: No such file or directory"):
        write_trace("mine", "p0", traced(), path, None, as_json=False)


class FakePrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """Knows `known`, and has had too much of "heavy"."""

    def __init__(self, known: str) -> None:
        self.known = known

    async def TracePrefill(  # noqa: N802 - gRPC's name
        self, request: prefill_pb2.TracePrefillRequest, context: object
    ) -> prefill_pb2.TracePrefillResponse:
        if request.request_id == "heavy":
            raise CapacityError("too much")
        if request.request_id != self.known:
            raise InvalidRequest("never heard of it.")
        return traced(self.known)


def with_server(use: Callable[[str], Awaitable[None]]) -> None:
    async def run() -> None:
        server = Server("127.0.0.1:0", [])
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(FakePrefill(ODD), server.grpc_server)
        await server.start()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await use(server.address)
        finally:
            await server.stop(0)

    asyncio.run(run())


async def headwater(folder: Path, *arguments: str) -> tuple[int | None, str, str]:
    """Exit code, standard output and standard error of `headwater` run in `folder`."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "router", *arguments]
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def test_the_command_writes_a_trace_and_a_picture(tmp_path: Path) -> None:
    """Of the second group in the file; the first one is not there."""

    async def use(address: str) -> None:
        groups = (("p0", NOWHERE), ("p1", address))
        sections = [f'[[prefill]]\nname = "{name}"\naddress = "{at}"' for name, at in groups]
        (tmp_path / "cluster.toml").write_text("\n".join(['[model]\npath = "unused"', *sections]))

        code, out, err = await headwater(tmp_path, "trace", ODD, "--cluster", "cluster.toml", "--svg", "t.svg")
        assert (code, err) == (0, "")
        lines = [line.strip() for line in out.splitlines()]
        assert lines[:3] == [
            f"request {ODD} on prefill group p1",
            "trace-a_b__1_____.json: a trace; open it at https://ui.perfetto.dev",
            "t.svg: a Gantt chart; open it in a browser",
        ]
        rows = [line.replace("│", " ").split() for line in lines if line.startswith("│")]
        assert rows == [["0", "2", "3.500", "12.5%"], ["1", "2", "5.500", "31.2%"]]
        assert lines[-2:] == [
            "transfers: 3 boxes, 8.0 kB, 7.250 s from the first begin to the last acknowledgement",
            "exposed: 0.250 s from the last stage's last chunk to that acknowledgement",
        ]
        events = json.loads((tmp_path / "trace-a_b__1_____.json").read_text())["traceEvents"]
        # Two chunks on two stages, and three boxes.
        assert sum(event["args"].get("request") == ODD for event in events) == 7
        picture = ET.fromstring((tmp_path / "t.svg").read_text(encoding="utf-8"))
        assert f"request {ODD} on prefill group p1" in picture.itertext()

        code, out, err = await headwater(tmp_path, "trace", "other", "--cluster", "cluster.toml")
        assert (code, out) == (2, "")
        assert err.startswith("headwater: error: no trace of request 'other': ")
        assert err.count("\n") == 1

        code, _, err = await headwater(
            tmp_path, "trace", ODD, "--cluster", "cluster.toml", "--group", "p0", "--out", "not.json"
        )
        assert code == 2
        assert "p0 at 127.0.0.1:1 does not answer" in err
        assert "p1" not in err
        assert not (tmp_path / "not.json").exists()

    with_server(use)


def test_a_request_that_no_group_knows() -> None:
    async def use(address: str) -> None:
        groups = [Prefill("p0", NOWHERE), Prefill("p1", address)]
        with pytest.raises(InvalidRequest) as caught:
            await fetch_trace("nobody's", groups, PATIENCE_SECONDS)
        message = str(caught.value)
        assert message.startswith('no trace of request "nobody\'s": prefill group p0 at 127.0.0.1:1 does not answer (')
        assert f"; prefill group p1 at {address} does not know it." in message
        assert f"({history._REMEMBERED} per group)" in message
        with pytest.raises(InvalidRequest, match="no prefill group"):
            await fetch_trace("mine", [], PATIENCE_SECONDS)
        # What went wrong otherwise is not passed over.
        with pytest.raises(CapacityError, match="too much"):
            await fetch_trace("heavy", groups, PATIENCE_SECONDS)

    with_server(use)
