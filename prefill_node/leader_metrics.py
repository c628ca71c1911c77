"""Prometheus metrics of a prefill group's leader."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from headwater.buckets import PART_SECONDS, REQUEST_SECONDS, STEP_SECONDS
from headwater.errors import ERROR_NAMES

REQUESTS = Counter(
    "headwater_prefill_requests", "Requests by outcome: completed, cancelled, or the class of the error.", ["outcome"]
)
RESTARTS = Counter("headwater_prefill_restarts", "Times that lost workers were started again.")
STEPS = Counter("headwater_prefill_steps", "Steps sent to the workers.")
TOKENS = Counter("headwater_prefill_tokens", "Prompt tokens that left the last stage.")
QUEUED = Gauge("headwater_prefill_queued_requests", "Requests waiting for pages.")
OLDEST_SECONDS = Gauge(
    "headwater_prefill_oldest_queued_seconds", "How long the oldest of the requests that wait for pages has waited."
)
RUNNING = Gauge("headwater_prefill_running_requests", "Requests that hold pages.")
BACKLOG_SECONDS = Gauge(
    "headwater_prefill_backlog_seconds",
    "What is not planned yet will take so long by the cost model, as the routers were told last.",
)
CHUNK_TOKENS = Histogram(
    "headwater_prefill_chunk_tokens", "Sizes of computed chunks.", buckets=[2**power for power in range(4, 17)]
)
CHUNK_SECONDS = Histogram(
    "headwater_prefill_chunk_seconds",
    "Computing one step, by stage, without waiting for its input.",
    ["stage"],
    buckets=STEP_SECONDS,
)
STAGE_SECONDS = Counter("headwater_stage_busy_seconds", "Computing steps, by stage.", ["stage"])
STAGE_WAIT_SECONDS = Counter(
    "headwater_stage_wait_seconds", "Bubbles: a step was planned, and its input had not come, by stage.", ["stage"]
)
COST_ERROR = Histogram(
    "headwater_prefill_cost_error_ratio",
    "|predicted - measured| / measured time of a step, by stage.",
    ["stage"],
    buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2),
)
PAGES = Gauge(
    "headwater_prefill_pages",
    "KV pages of the group: free, held by requests, or cached: kept for later prompts until they are needed.",
    ["state"],
)
CACHE_QUERY_TOKENS = Counter(
    "headwater_prefix_cache_query_tokens", "Prompt tokens of requests that were looked up in the prefix cache."
)
CACHE_HIT_TOKENS = Counter("headwater_prefix_cache_hit_tokens", "Of those, tokens whose KV was there.")
QUEUE_SECONDS = Histogram("headwater_prefill_queue_seconds", "From queued to the first step.", buckets=PART_SECONDS)
PREFILL_SECONDS = Histogram(
    "headwater_prefill_seconds", "From the first step to the first token.", buckets=REQUEST_SECONDS
)
FETCH_SECONDS = Histogram(
    "headwater_prefill_fetch_seconds",
    "Fetching what earlier attempts delivered, before a resumed request can be computed on.",
    buckets=PART_SECONDS,
)

# What has not happened yet is 0 and not absent, so that the first time counts as an increase.
for _outcome in ("completed", "cancelled", *ERROR_NAMES):
    REQUESTS.labels(_outcome)
