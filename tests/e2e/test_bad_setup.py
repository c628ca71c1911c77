"""What an operator can get wrong: the command itself says so, and nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny_models
from tests.harness import Group, model_folder, no_leaks, write_cluster


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("tiny") / "model")


def serve(model: Path, folder: Path, pp: int = 1, tp: int = 1, port: int | None = None) -> str:
    """The message of a prefill group that cannot start."""
    path = folder / "cluster.toml"
    cluster = write_cluster(path, model, [Group("p0", pp, tp)])
    if port is not None:
        path.write_text(path.read_text().replace(cluster.prefill[0].address, f"127.0.0.1:{port}"))
    command = [sys.executable, "-m", "router", "prefill", "serve", "--cluster", str(path), "--name", "p0"]
    with no_leaks():
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("headwater: error: ")
    return last


def _without_config(model: Path) -> None:
    (model / "config.json").unlink()


def _without_shard(model: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def _truncated(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_config, "config.json"),
        (_without_shard, "model-00001-of-00001.safetensors"),
        (_truncated, "model.safetensors"),
    ],
)
def test_a_damaged_model_folder(tiny: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    model = tmp_path / "model"
    subprocess.run(["cp", "-r", str(tiny), str(model)], check=True)
    damage(model)
    assert message in serve(model, tmp_path)


def test_an_unknown_model_folder(tmp_path: Path) -> None:
    assert f"no model folder {tmp_path / 'nowhere'}" in serve(tmp_path / "nowhere", tmp_path)


def test_a_model_that_caches_a_latent(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    subprocess.run(["cp", "-r", str(tiny), str(model)], check=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 12})
    )
    assert "caches a latent (MLA)" in serve(model, tmp_path)


def test_tp_that_does_not_divide_the_heads_says_which_would(tmp_path: Path) -> None:
    message = serve(model_folder(), tmp_path, tp=2)
    assert "1, 3" in message or "1 or 3" in message


def test_more_stages_than_layers(tiny: Path, tmp_path: Path) -> None:
    assert "5" in serve(tiny, tmp_path, pp=6)


def test_a_port_in_use(tiny: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in serve(tiny, tmp_path, port=port)


def test_up_stops_everything_on_ctrl_c(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    cluster = write_cluster(path, tiny, [Group("p0", 2, 1)])
    ports = [int(s.address.rpartition(":")[2]) for s in (cluster.router, cluster.prefill[0], cluster.decode[0])]
    with no_leaks(ports):
        command = [sys.executable, "-m", "router", "up", str(path), "--log-dir", str(tmp_path)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as up:
            assert up.stderr is not None
            for line in up.stderr:
                if "Ctrl-C" in line:
                    break
            os.kill(up.pid, signal.SIGINT)
            up.stderr.read()
            assert up.wait(60) == 0


def test_up_says_what_failed_and_stops_the_rest(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    write_cluster(path, tiny, [Group("p0", 1, 3)])
    with no_leaks():
        command = [sys.executable, "-m", "router", "up", str(path), "--log-dir", str(tmp_path)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode != 0
    assert "p0" in result.stderr
    assert "tp" in result.stderr.lower()
