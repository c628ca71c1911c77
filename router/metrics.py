"""Prometheus metrics of the router."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from headwater.v1 import router_pb2
from router.ttft import PARTS

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)

TTFT_SECONDS = Histogram(
    "headwater_ttft_seconds", "From receiving a request to sending its first token.", buckets=_SECONDS
)
TTFT_PART_SECONDS = Histogram(
    "headwater_ttft_part_seconds", "The parts of headwater_ttft_seconds, in order.", ["part"], buckets=_SECONDS
)
REQUESTS = Counter(
    "headwater_requests", "Requests by outcome: a finish reason, cancelled, or the class of the error.", ["outcome"]
)
RETRIES = Counter("headwater_retries", "Requests that were started anew on other groups.")
IN_FLIGHT = Gauge("headwater_requests_in_flight", "Requests that were received and have not ended.")
PROMPT_TOKENS = Counter("headwater_prompt_tokens", "Tokens of the prompts that were sent to a prefill group.")
GENERATED_TOKENS = Counter("headwater_generated_tokens", "Tokens sent to clients.")


def observe_ttft(parts: router_pb2.TtftParts) -> None:
    """One request's first token was sent."""
    TTFT_SECONDS.observe(parts.total)
    for name in PARTS:
        TTFT_PART_SECONDS.labels(name).observe(getattr(parts, name))
