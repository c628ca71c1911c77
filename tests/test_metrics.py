"""Metrics: documented, and named as Prometheus wants."""

from __future__ import annotations

from prometheus_client import Histogram

from deploy import metrics_table
from headwater import buckets
from router import metrics as router_metrics
from router.ttft import PARTS


def test_the_table_of_metrics_is_up_to_date() -> None:
    assert metrics_table.TABLE.read_text(encoding="utf-8") == metrics_table.table()


def test_names_follow_the_conventions() -> None:
    rows = [
        row for _, modules in metrics_table.PROCESSES for module in modules for row in metrics_table.metrics_of(module)
    ]
    names = [name for name, *_ in rows]
    assert len(set(names)) == len(names)
    for name, kind, labels, meaning in rows:
        assert name.startswith(("headwater_", "gen_ai_server_"))
        assert meaning.endswith("."), name
        assert "request_id" not in labels
        if kind == "histogram":
            assert name.endswith(("_seconds", "_bytes", "_tokens", "_ratio", "_per_second")), name


def test_ttft_and_its_parts_have_buckets_from_10_ms_to_20_min() -> None:
    for histogram in (router_metrics.TTFT_SECONDS, router_metrics.TTFT_PART_SECONDS):
        assert isinstance(histogram, Histogram)
        bounds = histogram._kwargs["buckets"]
        assert set(buckets.REQUEST_SECONDS) <= set(bounds)
        assert (buckets.REQUEST_SECONDS[0], bounds[-1]) == (0.01, 1200)
    assert next(iter(PARTS)) == "routing"
