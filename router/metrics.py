"""Prometheus metrics of the router."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from headwater.buckets import PART_SECONDS, REQUEST_SECONDS, STEP_SECONDS
from headwater.errors import ERROR_NAMES
from headwater.v1 import router_pb2
from router.ttft import PARTS

# Names as in OpenTelemetry's semantic conventions for generative AI, where it has one.
TTFT_SECONDS = Histogram(
    "gen_ai_server_time_to_first_token_seconds",
    "From receiving a request to handing its first token to the client's stream.",
    buckets=REQUEST_SECONDS,
)
REQUEST_DURATION_SECONDS = Histogram(
    "gen_ai_server_request_duration_seconds",
    "From receiving a request to its end, by outcome: ok, cancelled or error.",
    ["outcome"],
    buckets=REQUEST_SECONDS,
)
TIME_PER_OUTPUT_TOKEN_SECONDS = Histogram(
    "gen_ai_server_time_per_output_token_seconds",
    "Mean time between tokens after the first, by answer.",
    buckets=STEP_SECONDS,
)
TTFT_PART_SECONDS = Histogram(
    "headwater_ttft_part_seconds",
    "The parts of gen_ai_server_time_to_first_token_seconds; they sum to it.",
    ["part"],
    buckets=PART_SECONDS,
)
KV_EXPOSED_SECONDS = Histogram(
    "headwater_kv_exposed_seconds",
    "From the first token to the commit of the KV: what the second token waits for the transfer.",
    buckets=PART_SECONDS,
)
REQUESTS = Counter(
    "headwater_requests", "Requests by outcome: a finish reason, cancelled, or the class of the error.", ["outcome"]
)
RETRIES = Counter("headwater_retries", "Requests that were started anew on other groups.")
RESUMES = Counter(
    "headwater_resumes", "Requests that went on with another group from where one was lost, by its role.", ["role"]
)
IN_FLIGHT = Gauge("headwater_requests_in_flight", "Requests that were received and have not ended.")
WAITING = Gauge("headwater_requests_waiting", "Requests that wait in the router for a group that can take them.")
PROMPT_TOKENS = Counter("headwater_prompt_tokens", "Tokens of the prompts that were sent to a prefill group.")
GENERATED_TOKENS = Counter("headwater_generated_tokens", "Tokens sent to clients.")
GROUP_STATE = Gauge(
    "headwater_group_state",
    "1 for the state that a group is in, as this router sees it.",
    ["group", "role", "state"],
)
BREAKER_STATE = Gauge(
    "headwater_breaker_state", "1 for the state of this router's breaker for a group.", ["group", "state"]
)

# What has not happened yet is 0 and not absent, so that the first time counts as an increase.
for _outcome in ("eos", "length", "stop", "cancelled", *ERROR_NAMES):
    REQUESTS.labels(_outcome)
for _outcome in ("ok", "cancelled", "error"):
    REQUEST_DURATION_SECONDS.labels(_outcome)
for _part in PARTS:
    TTFT_PART_SECONDS.labels(_part)
for _role in ("prefill", "decode"):
    RESUMES.labels(_role)


def observe_ttft(parts: router_pb2.TtftParts) -> None:
    """One request's first token was sent."""
    TTFT_SECONDS.observe(parts.total)
    for name in PARTS:
        TTFT_PART_SECONDS.labels(name).observe(getattr(parts, name))
