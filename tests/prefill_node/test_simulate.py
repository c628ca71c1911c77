"""`headwater simulate`: workloads, figures and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from headwater.cluster import parse_cluster
from headwater.errors import InvalidConfig
from prefill_node.simulate import parse_workload, report, run_group, summary
from prefill_node.simulator import Arrival

CLUSTER = """
[model]
path = "m"
[[prefill]]
name = "p0"
address = "127.0.0.1:1"
pp = 8
device = "emulated"
chunk_policy = "optimal"
chunk_tokens = 18432
pool_tokens = 200064
"""


def test_a_workload_is_a_line_or_a_file(tmp_path: Path) -> None:
    assert parse_workload("1x5,2x7@1+0.5") == [Arrival("r0", 0.0, 5), Arrival("r1", 1.0, 7), Arrival("r2", 1.5, 7)]
    file = tmp_path / "workload.jsonl"
    file.write_text('{"at": 1, "tokens": 9, "priority": 2}\n\n{"at": 0.5, "tokens": 3, "cancel_at": 4}\n')
    assert parse_workload(str(file)) == [Arrival("r0", 1.0, 9, 2), Arrival("r1", 0.5, 3, 0, 4.0)]
    file.write_text('{"at": 1}\n')
    with pytest.raises(InvalidConfig, match="Give one JSON object a line"):
        parse_workload(str(file))
    for wrong in ("nope", "1x0", "1x5@"):
        with pytest.raises(InvalidConfig, match="neither a file nor COUNTxTOKENS"):
            parse_workload(wrong)


def test_figures_and_files(tmp_path: Path) -> None:
    cluster = parse_cluster(CLUSTER)
    result = run_group(cluster, cluster.prefill[0], parse_workload("1x131072,4x1000@1+0.5"), None, 100.0)
    numbers = summary(result)
    assert (numbers["requests"], numbers["first_tokens"]) == (5, 5)
    assert numbers["ttft_max_s"] == numbers["seconds"]
    trace, svg = tmp_path / "t.json", tmp_path / "t.svg"
    report(result, "t", as_json=True, trace=trace, svg=svg, console=Console(file=(tmp_path / "out").open("w")))
    events = json.loads(trace.read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == len(result.bars)
    assert svg.read_text().startswith("<svg")
    with pytest.raises(InvalidConfig, match="cannot write"):
        report(result, "t", as_json=True, trace=tmp_path, svg=None, console=Console(quiet=True))


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    cluster = parse_cluster(CLUSTER)
    with pytest.raises(InvalidConfig, match="'nope' is unknown; choose one of h20-qwen3"):
        run_group(cluster, cluster.prefill[0], parse_workload("1x5"), "nope", 100.0)
