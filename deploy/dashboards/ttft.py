"""Time to first token: how long, whether in time, and of what."""

from __future__ import annotations

from deploy.dashboards.panels import Dashboard, Panel, Query
from deploy.dashboards.queries import NODE, buckets, quantiles
from deploy.dashboards.shared import EXPOSED, OUTCOMES

_TTFT = "gen_ai_server_time_to_first_token_seconds"
_BURN = "headwater:ttft_late:ratio_rate{} / on () (1 - headwater:ttft_objective:ratio)"

TTFT = Dashboard(
    "ttft",
    "TTFT overview",
    "How long first tokens take, whether that is within the objective, and where the time goes.",
    'up{job="headwater", role="router"}',
    [
        Panel(
            "TTFT, median",
            "Over the last 5 minutes, of all routers.",
            "s",
            [Query("headwater:ttft_seconds:p50_rate5m")],
            kind="stat",
            width=6,
            height=4,
        ),
        Panel(
            "TTFT, p99",
            "Over the last 5 minutes, of all routers.",
            "s",
            [Query("headwater:ttft_seconds:p99_rate5m")],
            kind="stat",
            width=6,
            height=4,
        ),
        Panel(
            "In time, last hour",
            "Share of first tokens within the objective, which recording.yml sets.",
            "percentunit",
            [Query("1 - headwater:ttft_late:ratio_rate1h")],
            kind="stat",
            width=6,
            height=4,
        ),
        Panel(
            "Burn rate, last hour",
            "1 spends the error budget of 30 days in 30 days; 14.4 spends a fiftieth of it in an hour.",
            "none",
            [Query(_BURN.format("1h"))],
            kind="stat",
            width=6,
            height=4,
            limits=[1, 6],
        ),
        Panel(
            "TTFT",
            "From the router's receiving a request to its handing the first token to the client's stream.",
            "s",
            [*quantiles(_TTFT, 0.5, 0.9, 0.99), Query("headwater:ttft_objective:seconds", "objective")],
        ),
        Panel("TTFT, distribution", "First tokens by how long they took.", "s", buckets(_TTFT), kind="heatmap"),
        Panel(
            "Where the time goes",
            "Means of the parts, which add up to the mean TTFT. queue: waiting for pages and turns. compute: the last "
            "stage computes. bubble: the last stage has no input. exposed_transfer: waiting for KV. relay: between "
            "router, leader and client.",
            "s",
            [
                Query(
                    f"sum by (part) (rate(headwater_ttft_part_seconds_sum{{{NODE}}}[$__rate_interval])) / "
                    f"sum by (part) (rate(headwater_ttft_part_seconds_count{{{NODE}}}[$__rate_interval]))",
                    "{{part}}",
                )
            ],
            stacked=True,
        ),
        Panel(
            "Parts of slow requests",
            "The 90th percentile of each part. Unlike means they do not add up.",
            "s",
            quantiles("headwater_ttft_part_seconds", 0.9, by="part"),
        ),
        OUTCOMES,
        Panel(
            "Burn rate",
            "How fast the error budget is spent, by window. Alerts fire at 14.4 (an hour and 5 minutes), 6 (6 hours "
            "and 30 minutes), 3 (a day and 2 hours) and 1 (3 days and 6 hours).",
            "none",
            [Query(_BURN.format(window), window) for window in ("5m", "1h", "6h", "1d", "3d")],
            limits=[1, 6],
        ),
        Panel(
            "Time per output token",
            "After the first, by answer: its mean.",
            "s",
            quantiles("gen_ai_server_time_per_output_token_seconds", 0.5, 0.99),
        ),
        EXPOSED,
    ],
)
