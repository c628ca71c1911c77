"""Prometheus's configuration, rules and alerts, by its own tool; and that they speak of metrics that there are."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from deploy import metrics_table
from headwater.security import Credentials
from router.observe import configuration, rules_folder
from tests.observe.debian import prometheus_folder

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules"


@pytest.fixture(scope="module")
def promtool() -> Path:
    return prometheus_folder() / "promtool"


def said(promtool: Path, *arguments: str | Path) -> str:
    """What it says when it finds nothing wrong."""
    done = subprocess.run(
        [promtool, *arguments], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_configuration_is_valid(promtool: Path) -> None:
    assert "2 rule files found" in said(promtool, "check", "config", ROOT / "deploy" / "prometheus" / "prometheus.yml")


@pytest.mark.parametrize("tls", [False, True])
def test_the_configuration_of_up_is_valid(
    promtool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    own = Credentials(ca="ca.pem", cert="cert.pem", key="key.pem", mutual=True) if tls else Credentials()
    # It looks whether they are there, and what the cluster file says is relative to where the command runs.
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "elsewhere" / "prometheus.yml"
    file.parent.mkdir()
    file.write_text(json.dumps(configuration("http://127.0.0.1:7080/", 0.5, own)))
    assert "2 rule files found" in said(promtool, "check", "config", file)


def test_the_rules_are_valid(promtool: Path) -> None:
    assert rules_folder() == RULES
    said(promtool, "check", "rules", *sorted(RULES.glob("*.yml")))


def test_alerts_fire_when_they_should_and_only_then(promtool: Path) -> None:
    said(promtool, "test", "rules", Path(__file__).with_name("rules_test.yml"))


def test_every_alert_is_tested_and_says_what_to_do() -> None:
    text = (RULES / "alerts.yml").read_text(encoding="utf-8")
    tests = Path(__file__).with_name("rules_test.yml").read_text(encoding="utf-8")
    alerts = re.split(r"- alert: ", text)[1:]
    assert len(alerts) == 13
    for alert in alerts:
        name = alert.split()[0]
        assert f'alertname="{name}", alertstate="firing"' in tests, name
        for part in ("severity:", "summary:", "description:"):
            assert part in alert, name


def test_rules_speak_of_metrics_that_there_are() -> None:
    recorded: set[str] = set()
    for file in RULES.glob("*.yml"):
        recorded.update(re.findall(r"record: (\S+)", file.read_text(encoding="utf-8")))
    for file in RULES.glob("*.yml"):
        for expression in expressions(file.read_text(encoding="utf-8")):
            assert_known(expression, recorded)


def expressions(text: str) -> list[str]:
    """Of a rule file: each `expr:`, with its continuation lines."""
    found = re.findall(r"^ +expr: (?:>-\n((?: {10}.+\n)+)|(.+)\n)", text, flags=re.MULTILINE)
    assert len(found) == text.count("expr: ")
    return [" ".join((folded or line).split()) for folded, line in found]


def assert_known(expression: str, recorded: set[str]) -> None:
    """Every name of a metric is in the table of metrics, or recorded by a rule, or Prometheus's own `up`."""
    table = metrics_table.TABLE.read_text(encoding="utf-8")
    kinds = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", table, flags=re.MULTILINE))
    names = set(re.findall(r"[a-z_]*:?(?:headwater|gen_ai)[\w:]*", re.sub(r'"[^"]*"', "", expression)))
    assert names or "up{" in expression or expression.startswith("vector("), expression
    for name in names - recorded:
        base = re.sub(r"_(bucket|count|sum)$", "", name)
        assert kinds.get(name) in {"counter", "gauge", "info"} or kinds.get(base) == "histogram", name
