"""A short part of `python -m tests.campaign cluster`: what no other test has, at once and under load."""

from __future__ import annotations

from pathlib import Path

from tests import chaos


def test_groups_are_killed_stopped_and_drained_under_load(tmp_path: Path) -> None:
    troubles = ["a leader is killed", "a group is drained", "a decode node is stopped"]
    it = chaos.run(tmp_path, 0.0, seed=3, troubles=troubles)
    assert it.wrong == []
    # Between the troubles the cluster answers.
    assert it.happened["answered"] > len(troubles)
    assert {kind for kind in it.happened if kind in it.troubles} == set(troubles)
