"""Panels of more than one dashboard."""

from __future__ import annotations

from deploy.dashboards.panels import Panel, Query
from deploy.dashboards.queries import quantiles, rate

OUTCOMES = Panel(
    "Requests by outcome",
    "eos, length and stop are answers. CapacityError: refused for want of room. InvalidRequest: the client's mistake. "
    "Everything else failed; the router's log says why.",
    "reqps",
    [rate("headwater_requests_total", "outcome", "{{outcome}}")],
    stacked=True,
)
EXPOSED = Panel(
    "Exposed transfer",
    "What clients wait for because of the transfer: before the first token (prefill waits for KV to move), and after "
    "it (the second token waits for the commit). Should be next to nothing.",
    "s",
    [
        Query(
            'sum(rate(headwater_ttft_part_seconds_sum{part="exposed_transfer"}[$__rate_interval]))'
            ' / sum(rate(headwater_ttft_part_seconds_count{part="exposed_transfer"}[$__rate_interval]))',
            "before the first token, mean",
        ),
        *(
            Query(query.expr, f"after the first token, {query.legend}")
            for query in quantiles("headwater_kv_exposed_seconds", 0.5, 0.9, only="")
        ),
    ],
    limits=[1],
)
