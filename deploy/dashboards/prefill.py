"""The pipelines of the prefill groups."""

from __future__ import annotations

from deploy.dashboards.panels import Dashboard, Panel, Query, Row
from deploy.dashboards.queries import NODE, buckets, increase, quantiles, rate

PREFILL = Dashboard(
    "prefill",
    "Prefill pipeline",
    "What the stages of the prefill groups do, and what waits for them.",
    'up{job="headwater", role="prefill"}',
    [
        Row("Pipeline"),
        Panel(
            "Stage occupancy",
            "Share of time in which a stage computes. 100 % is a full pipeline.",
            "percentunit",
            [rate("headwater_stage_busy_seconds_total", "node, stage", "{{node}} stage {{stage}}")],
        ),
        Panel(
            "Bubble share",
            "Of the time in which a stage had steps to do, the share in which its input had not come. High on late "
            "stages: earlier ones are slower (measure_layers, chunk_policy).",
            "percentunit",
            [
                Query(
                    "sum by (node, stage) (rate(headwater_stage_wait_seconds_total{N}[$__rate_interval])) / "
                    "(sum by (node, stage) (rate(headwater_stage_wait_seconds_total{N}[$__rate_interval])) + "
                    "sum by (node, stage) (rate(headwater_stage_busy_seconds_total{N}[$__rate_interval])))".replace(
                        "{N}", f"{{{NODE}}}"
                    ),
                    "{{node}} stage {{stage}}",
                )
            ],
            limits=[0.2, 0.5],
        ),
        Panel(
            "Chunk sizes",
            "Chunks by their number of tokens. Short ones are the ends of prompts, or what a policy cut.",
            "short",
            buckets("headwater_prefill_chunk_tokens"),
            kind="heatmap",
        ),
        Panel(
            "Step time by stage",
            "Computing one step, without waiting for its input. Stages should be alike.",
            "s",
            quantiles("headwater_prefill_chunk_seconds", 0.5, 0.99, by="node, stage"),
        ),
        Panel(
            "Step time by rank",
            "The same on each rank. One that is slower than the others of its stage holds all of them up.",
            "s",
            quantiles("headwater_rank_step_seconds", 0.5, by="node, rank"),
        ),
        Panel(
            "Cost model error",
            "How wrong the predicted time of a step is. Chunks are cut, and groups chosen, by these predictions.",
            "percentunit",
            quantiles("headwater_prefill_cost_error_ratio", 0.5, 0.9, by="node, stage"),
            limits=[0.3],
        ),
        Row("Queue"),
        Panel(
            "Requests",
            "queued wait for pages; running hold pages.",
            "short",
            [
                Query(f"sum by (node) (headwater_prefill_queued_requests{{{NODE}}})", "{{node}} queued"),
                Query(f"sum by (node) (headwater_prefill_running_requests{{{NODE}}})", "{{node}} running"),
            ],
        ),
        Panel(
            "Age and backlog",
            "How long the oldest of the queued has waited, and how long what is not planned yet will take.",
            "s",
            [
                Query(f"max by (node) (headwater_prefill_oldest_queued_seconds{{{NODE}}})", "{{node}} oldest"),
                Query(f"max by (node) (headwater_prefill_backlog_seconds{{{NODE}}})", "{{node}} backlog"),
            ],
        ),
        Panel(
            "From queued to the first step",
            "Waiting for pages and turns.",
            "s",
            quantiles("headwater_prefill_queue_seconds", 0.5, 0.99, by="node"),
        ),
        Panel(
            "From the first step to the first token",
            "The prompt on its way through the pipeline.",
            "s",
            quantiles("headwater_prefill_seconds", 0.5, 0.99, by="node"),
        ),
        Panel(
            "Pages",
            "KV pages of each group, which add up to its pool. cached: kept for later prompts until they are needed. "
            "All held: requests queue.",
            "short",
            [Query(f"sum by (node, state) (headwater_prefill_pages{{{NODE}}})", "{{node}} {{state}}")],
            stacked=True,
        ),
        Panel(
            "Prefix cache",
            "Share of prompt tokens whose KV was there already, and need not be computed.",
            "percentunit",
            [
                Query(
                    "sum by (node) (rate(headwater_prefix_cache_hit_tokens_total{N}[$__rate_interval])) / "
                    "sum by (node) (rate(headwater_prefix_cache_query_tokens_total{N}[$__rate_interval]))".replace(
                        "{N}", f"{{{NODE}}}"
                    ),
                    "{{node}}",
                )
            ],
        ),
        Row("Work"),
        Panel(
            "Prompt tokens",
            "That left the last stage.",
            "short",
            [rate("headwater_prefill_tokens_total", "node", "{{node}} tokens/s")],
        ),
        Panel("Steps", "Sent to the workers.", "ops", [rate("headwater_prefill_steps_total", "node", "{{node}}")]),
        Panel(
            "Requests by outcome",
            "As the groups saw them: a request that a router sent to two groups counts twice.",
            "reqps",
            [rate("headwater_prefill_requests_total", "outcome", "{{outcome}}")],
            stacked=True,
        ),
        Panel(
            "Restarts and fetches",
            "Times that lost workers were started again, and resumed requests whose earlier KV was fetched.",
            "short",
            [
                increase("headwater_prefill_restarts_total", "node", "{{node}} restarts"),
                increase("headwater_prefill_fetch_seconds_count", "node", "{{node}} fetches"),
            ],
        ),
    ],
)
