"""The Grafana dashboards: as their source says, and of metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deploy import dashboards
from tests.observe.test_rules import RULES, assert_known

PROVISIONING = dashboards.FOLDER.parent / "provisioning"


def test_the_files_are_up_to_date() -> None:
    expected = dashboards.files()
    assert set(dashboards.FOLDER.iterdir()) == set(expected)
    for path, text in expected.items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python -m deploy.dashboards"


@pytest.mark.parametrize("path", dashboards.files(), ids=lambda path: path.stem)
def test_panels_are_complete_and_do_not_overlap(path: Path) -> None:
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith(".")
            assert panel["targets"]
            assert panel["fieldConfig"]["defaults"]["unit"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_queries_speak_of_metrics_that_there_are() -> None:
    recorded = set(re.findall(r"record: (\S+)", (RULES / "recording.yml").read_text(encoding="utf-8")))
    for _, expression in queries():
        assert_known(expression, recorded)


def test_every_metric_that_tells_of_trouble_is_on_a_dashboard() -> None:
    shown = " ".join(expression for _, expression in queries())
    for name in ("retries_total", "resumes_total", "slots_fenced_total", "kv_leases_expired_total"):
        assert f"headwater_{name}" in shown


def queries() -> list[tuple[str, str]]:
    """Every query of every panel of the files, and where it is."""
    found: list[tuple[str, str]] = []
    for path in dashboards.files():
        dashboard: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for panel in dashboard["panels"]:
            where = f"{dashboard['title']} / {panel['title']}"
            found += [(f"{where} / {target['refId']}", target["expr"]) for target in panel.get("targets", ())]
    return found


def test_provisioning_is_of_the_folder() -> None:
    text = (PROVISIONING / "dashboards" / "headwater.yml").read_text(encoding="utf-8")
    assert "path: /etc/grafana/headwater" in text
