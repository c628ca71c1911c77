"""Prometheus metrics of one prefill rank."""

from __future__ import annotations

from prometheus_client import Histogram

from headwater.buckets import STEP_SECONDS as _BUCKETS

STEP_SECONDS = Histogram(
    "headwater_rank_step_seconds",
    "Computing one step on this rank, without waiting for its input.",
    buckets=_BUCKETS,
)
