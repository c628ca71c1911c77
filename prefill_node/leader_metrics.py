"""Prometheus metrics of a prefill group's leader."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)

REQUESTS = Counter("headwater_prefill_requests", "Requests by outcome.", ["outcome"])
RESTARTS = Counter("headwater_prefill_restarts", "Times that lost workers were started again.")
STEPS = Counter("headwater_prefill_steps", "Steps sent to the workers.")
TOKENS = Counter("headwater_prefill_tokens", "Prompt tokens that left the last stage.")
QUEUED = Gauge("headwater_prefill_queued_requests", "Requests waiting for pages.")
RUNNING = Gauge("headwater_prefill_running_requests", "Requests that hold pages.")
CHUNK_TOKENS = Histogram(
    "headwater_prefill_chunk_tokens", "Sizes of computed chunks.", buckets=[2**power for power in range(4, 17)]
)
STAGE_SECONDS = Counter("headwater_stage_busy_seconds", "Computing steps, by stage.", ["stage"])
STAGE_WAIT_SECONDS = Counter("headwater_stage_wait_seconds", "Waiting for the stage before, by stage.", ["stage"])
COST_ERROR = Histogram(
    "headwater_prefill_cost_error_ratio",
    "|predicted - measured| / measured time of a step, by stage.",
    ["stage"],
    buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2),
)
FREE_PAGES = Gauge("headwater_prefill_free_pages", "Pages that no request holds.")
QUEUE_SECONDS = Histogram("headwater_prefill_queue_seconds", "From queued to the first step.", buckets=_SECONDS)
PREFILL_SECONDS = Histogram("headwater_prefill_seconds", "From the first step to the first token.", buckets=_SECONDS)
