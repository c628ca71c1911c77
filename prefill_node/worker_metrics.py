"""Prometheus metrics of one prefill rank."""

from __future__ import annotations

from prometheus_client import Histogram

STEP_SECONDS = Histogram(
    "headwater_stage_step_seconds",
    "Computing one step on this rank, without waiting for its input.",
    buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
