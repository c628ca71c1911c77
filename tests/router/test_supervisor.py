"""Child processes: started, watched, ended, none left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from headwater.errors import DeadlinePassed, PeerUnavailable
from router.placement import Placed
from router.supervisor import Supervisor
from router.up import run_up
from tests.router.fakes import PATIENCE_SECONDS

# Serves health on a port that its parent chose, or dies, or ignores SIGTERM, by its first argument.
PROGRAM = """
import asyncio, os, signal, subprocess, sys
from headwater.rpc import Server

async def serve(address, serving):
    server = Server(address, [])
    await server.start()
    await server.set_serving(serving=serving)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop(0)

how, *rest = sys.argv[1:]
if how == "serve":
    asyncio.run(serve(rest[0], True))
elif how == "load":
    asyncio.run(serve(rest[0], False))
elif how == "die":
    sys.exit("no weights here")
elif how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    with open(rest[0], "w") as started:
        print(child.pid, file=started)
    signal.pause()
"""


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def serving(name: str) -> Placed:
    address = free_address()
    return Placed(name, "decode", ("serve", address), address)


def supervise(placed: list[Placed], log_dir: Path | None, stop_seconds: float = PATIENCE_SECONDS) -> Supervisor:
    return Supervisor(placed, stop_seconds=stop_seconds, log_dir=log_dir, program=(sys.executable, "-c", PROGRAM))


def test_starts_and_stops_all(tmp_path: Path) -> None:
    supervisor = supervise([serving("a"), serving("b")], tmp_path)
    with supervisor:
        supervisor.wait_ready(PATIENCE_SECONDS)
        pids = [child.pid for child in supervisor.children.values()]
        environment = psutil.Process(pids[0]).environ()
        assert (environment["OMP_NUM_THREADS"], environment["OMP_WAIT_POLICY"]) == ("1", "passive")
        assert os.getsid(pids[0]) == pids[0]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert supervisor.stop() == []


def test_child_that_dies_at_the_start_fails_the_wait_with_its_log(tmp_path: Path) -> None:
    with (
        supervise([serving("a"), Placed("b", "decode", ("die",), free_address())], tmp_path) as supervisor,
        pytest.raises(PeerUnavailable, match=r"b exited with code 1; its last lines:\n  no weights here"),
    ):
        supervisor.wait_ready(PATIENCE_SECONDS)


def test_log_goes_to_standard_error_with_a_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        supervise([Placed("b", "decode", ("die",), free_address())], None) as supervisor,
        pytest.raises(PeerUnavailable, match="no weights here"),
    ):
        supervisor.wait_ready(PATIENCE_SECONDS)
    assert "[b] no weights here" in capsys.readouterr().err


def test_killed_child_is_noticed(tmp_path: Path) -> None:
    async def run(supervisor: Supervisor) -> str:
        await supervisor.ready(PATIENCE_SECONDS)
        os.kill(supervisor.children["b"].pid, signal.SIGKILL)
        return (await supervisor.first_exit()).describe_exit()

    with supervise([serving("a"), serving("b")], tmp_path) as supervisor:
        assert asyncio.run(run(supervisor)).startswith("b was ended by SIGKILL")


def test_server_that_does_not_become_ready_is_named(tmp_path: Path) -> None:
    address = free_address()
    with (
        supervise([Placed("slow", "decode", ("load", address), address)], tmp_path) as supervisor,
        pytest.raises(DeadlinePassed, match="not SERVING after 0.5 s: slow"),
    ):
        supervisor.wait_ready(0.5)


def test_child_that_ignores_sigterm_is_killed_with_its_own_children(tmp_path: Path) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    supervisor = supervise([Placed("deaf", "prefill", ("stubborn", str(started)), None)], tmp_path, stop_seconds=0)
    supervisor.start()
    child = supervisor.children["deaf"]
    grandchild = psutil.Process(int(started.read_text()))
    (report,) = supervisor.stop()
    assert report == f"deaf did not end within 0 s of SIGTERM; killed: [{child.pid}, {grandchild.pid}]"
    assert psutil.wait_procs([grandchild], timeout=PATIENCE_SECONDS)[1] == []
    assert not psutil.pid_exists(child.pid)


def test_children_end_with_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    script = f"""
import signal, sys
from pathlib import Path
from router.placement import Placed
from router.supervisor import Supervisor
supervisor = Supervisor(
    [Placed("a", "decode", ("-c", "import signal; signal.pause()"), None)],
    stop_seconds=1, log_dir=Path({str(tmp_path)!r}), program=(sys.executable,),
)
supervisor.start()
print(supervisor.children["a"].pid, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert psutil.wait_procs([child], timeout=PATIENCE_SECONDS)[1] == []


def test_up_says_as_json_what_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[model]\npath = "unused"\n', encoding="utf-8")
    supervisor = supervise([serving("a")], tmp_path)
    monkeypatch.setattr(Supervisor, "of_cluster", lambda *_: supervisor)

    async def run() -> str:
        running = asyncio.ensure_future(run_up(path, tmp_path, as_json=True))
        shown = ""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not shown and not running.done():
                await asyncio.sleep(0.01)
                shown = capsys.readouterr().out
        os.kill(json.loads(shown)["processes"][0]["pid"], signal.SIGKILL)
        with pytest.raises(PeerUnavailable, match="a "):
            await running
        return shown + capsys.readouterr().out

    first, last = map(json.loads, asyncio.run(run()).splitlines())
    (process,) = first.pop("processes")
    assert first == {"event": "serving", "page": ""}
    assert process.pop("pid") > 0
    address = supervisor.placed[0].address
    assert process == {"name": "a", "role": "decode", "address": address, "log": str(tmp_path / "a.log")}
    assert last == {"event": "stopping", "message": "stopping"}
