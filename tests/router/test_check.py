"""`headwater check`: problems in words."""

from __future__ import annotations

import json
import os
import socket
import struct
from pathlib import Path

import pytest

from headwater.cluster import Cluster, parse_cluster
from headwater.exits import Exit
from router.check import check_cluster
from router.main import main
from tests.router.fakes import tiny_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with everything but useful weights: 4 layers, 4 heads, 2 KV heads."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "vocab_size": 300,
        "max_position_embeddings": 256,
        "eos_token_id": 0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    return tmp_path


def cluster(model: Path, prefill: str = "", decode: str = "") -> Cluster:
    return parse_cluster(f"""
        [model]
        path = "{model}"
        dtype = "float32"
        [router]
        address = "192.0.2.1:7000"
        [[prefill]]
        name = "p0"
        address = "192.0.2.1:7001"
        chunk_tokens = 64
        page_size = 64
        {prefill}
        [[decode]]
        name = "d0"
        address = "192.0.2.1:7002"
        {decode}
    """)


def test_good_cluster(model: Path) -> None:
    report = check_cluster(cluster(model, "pp = 2\ntp = 2\npool_tokens = 640"))
    assert report.problems == ()
    assert report.notes == ()
    router, prefill, decode = report.rows
    assert (router.role, router.here) == ("router", False)
    assert (prefill.layout, prefill.capacity_tokens) == ("PP2 TP2, layers 0 2 4", 640)
    # tokens · layers · heads · (key + value) · 4 bytes
    assert prefill.kv_bytes_per_rank == 640 * 2 * 1 * 16 * 4
    assert decode.kv_bytes_per_rank == 32768 * 4 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("prefill", "decode", "problem"),
    [
        ("tp = 3", "", "prefill p0: tp = 3 does not divide"),
        ("pp = 5", "", "prefill p0: pp = 5:"),
        ("pp = 2\nlayer_splits = [9]", "", "prefill p0: layer_splits = [9]"),
        ("pool_tokens = 63", "", "prefill p0: pool_tokens = 63 cannot hold one chunk of chunk_tokens = 64."),
        ("pp = 2\ncores = [0]", "", "prefill p0: cores lists 1 cores; give one for each of the 2 ranks"),
        ("send_buffer_mb = 1", "", "prefill p0: send_buffer_mb = 1 cannot hold one landing slot of d0"),
        (
            "",
            "capacity_tokens = 64",
            "decode d0: capacity_tokens = 64 cannot hold one chunk (64 tokens) and an answer.",
        ),
        ("", "num_slots = 1", "decode d0: slots_per_writer = 4 is more than num_slots = 1."),
    ],
)
def test_problems(model: Path, prefill: str, decode: str, problem: str) -> None:
    (found,) = check_cluster(cluster(model, prefill, decode)).problems
    assert found.startswith(problem)


def test_notes_say_what_will_be_refused(model: Path) -> None:
    (note,) = check_cluster(cluster(model, "pool_tokens = 64")).notes
    assert note == "p0 holds 64 tokens: longer requests are refused, although the context is 256."
    (note,) = check_cluster(cluster(model, "pp = 4", "num_slots = 4")).notes
    assert note.startswith("the 4 ranks of p0 take 16 landing slots for one transfer, and d0 has 4")


def test_port_in_use_and_unknown_core_matter_only_here(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        missing = max(os.sched_getaffinity(0)) + 1
        here = parse_cluster(f"""
            [model]
            path = "{model}"
            [router]
            address = "127.0.0.1:{port}"
            [[prefill]]
            name = "p0"
            address = "192.0.2.1:7001"
            cores = [{missing}]
            [[decode]]
            name = "d0"
            address = "localhost:7002"
            cores = [{missing}]
        """)
        cores, port_taken = check_cluster(here).problems
    assert cores.startswith(f"decode d0: cores [{missing}] cannot be used here; this host offers")
    assert port_taken.startswith(f"router router: cannot listen on 127.0.0.1:{port}")


def test_missing_folder_and_roles(tmp_path: Path) -> None:
    folder, prefill, decode = check_cluster(parse_cluster(f'[model]\npath = "{tmp_path}/none"')).problems
    assert folder.startswith("model: no model folder")
    assert "no [[prefill]] group" in prefill
    assert "no [[decode]] node" in decode


def test_json_has_rows_notes_and_problems(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f'[model]\npath = "{model}"\n[[prefill]]\nname = "p0"\naddress = "127.0.0.1:0"\n')
    assert main(["check", str(path), "--json"]) == Exit.LOCAL
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert shown.err == ""
    assert [row["name"] for row in report["rows"]] == ["router", "p0"]
    assert any("decode" in problem for problem in report["problems"])
    assert isinstance(report["notes"], list)
