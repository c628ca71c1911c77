"""`headwater up --observe`, without a Prometheus: what it says, and what it would be told."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from headwater.errors import DeadlinePassed, InvalidConfig, PeerUnavailable
from headwater.security import Credentials
from router.observe import Prometheus, configuration, rules_folder
from router.up import run_up
from tests.router.fakes import PATIENCE_SECONDS
from tests.router.test_supervisor import serving, supervise


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is called prometheus on PATH."""
    file = tmp_path / "prometheus"
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return file


def test_without_the_program_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidConfig, match=r"no program `prometheus` on PATH.*prometheus\.io/download"):
        asyncio.run(run_up(tmp_path / "no.toml", None, scrape_seconds=5, as_json=False))


@pytest.mark.parametrize("seconds", [0.0, -1.0, 600.0, float("nan")])
def test_an_interval_that_is_none(program: Path, seconds: float) -> None:
    with pytest.raises(InvalidConfig, match=r"--scrape-interval is .*; it takes 0\.1 to 120 seconds"):
        Prometheus(program.parent, seconds)


def test_a_router_on_another_host(program: Path, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[model]\npath = "m"\n[router]\naddress = "192.0.2.1:7000"\n'
        '[[decode]]\nname = "d0"\naddress = "127.0.0.1:7200"\n'
    )
    with pytest.raises(InvalidConfig, match="is on another host"):
        asyncio.run(run_up(file, None, scrape_seconds=5, as_json=False))


def test_what_it_is_told() -> None:
    told = configuration("http://127.0.0.1:7080/", 2.5, Credentials())
    (job,) = told["scrape_configs"]
    assert job["http_sd_configs"] == [{"url": "http://127.0.0.1:7080/sd", "refresh_interval": "2500ms"}]
    assert (job["job_name"], job["honor_labels"]) == ("headwater", True)
    assert told["rule_files"] == [str(rules_folder() / "*.yml")]


def test_one_that_cannot_start_says_why_and_what_it_was_told_is_in_its_folder(program: Path, tmp_path: Path) -> None:
    program.write_text('#!/bin/sh\necho "$@"\nexit 3\n')

    async def run() -> None:
        with supervise([serving("a")], tmp_path) as supervisor:
            await supervisor.ready(PATIENCE_SECONDS)
            with pytest.raises(PeerUnavailable, match="prometheus exited with code 3") as said:
                await Prometheus(tmp_path / "folder", 2.5).run(supervisor, "http://127.0.0.1:7080/", PATIENCE_SECONDS)
        assert f"--config.file={tmp_path}/folder/prometheus.yml" in str(said.value)
        assert "--web.listen-address=127.0.0.1:" in str(said.value)

    asyncio.run(run())
    told = json.loads((tmp_path / "folder" / "prometheus.yml").read_text())
    assert told == configuration("http://127.0.0.1:7080/", 2.5, Credentials())


def test_with_certificates_it_has_them_too() -> None:
    own = Credentials(ca="/tls/ca.pem", cert="/tls/cert.pem", key="/tls/key.pem", mutual=True)
    (job,) = configuration("http://127.0.0.1:7080/", 5, own)["scrape_configs"]
    files = {"ca_file": "/tls/ca.pem", "cert_file": "/tls/cert.pem", "key_file": "/tls/key.pem"}
    assert job["tls_config"] == job["http_sd_configs"][0]["tls_config"] == files


async def never() -> None:
    await asyncio.Event().wait()


async def at_once() -> None:
    pass


def test_a_program_is_added_and_ends_with_the_others(tmp_path: Path) -> None:
    async def run() -> None:
        with supervise([serving("a")], tmp_path) as supervisor:
            await supervisor.ready(PATIENCE_SECONDS)
            await supervisor.add("b", [sys.executable, "-c", "import signal; signal.pause()"], at_once, 60)
            child = supervisor.children["b"]
            assert not child.wait(0)
        assert supervisor.children == {}

    asyncio.run(run())


def test_an_added_program_that_ends_or_is_never_ready(tmp_path: Path) -> None:
    async def run() -> None:
        with supervise([serving("a")], tmp_path) as supervisor:
            await supervisor.ready(PATIENCE_SECONDS)
            with pytest.raises(DeadlinePassed, match=r"b was not ready after 0\.1 s"):
                await supervisor.add("b", [sys.executable, "-c", "import signal; signal.pause()"], never, 0.1)
            with pytest.raises(PeerUnavailable, match=r"c exited with code 1; its last lines:\n  no port left"):
                await supervisor.add("c", [sys.executable, "-c", "exit('no port left')"], never, 60)

    asyncio.run(run())
