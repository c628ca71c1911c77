"""What clients ask and get, and the groups."""

from __future__ import annotations

from deploy.dashboards.panels import Dashboard, Panel, Query
from deploy.dashboards.queries import NODE, increase, quantiles, rate, states
from deploy.dashboards.shared import OUTCOMES

_GROUP_STATES = [
    (1, "serving", "green"),
    (2, "draining", "blue"),
    (3, "not_serving", "orange"),
    (4, "unreachable", "red"),
]
_BREAKER_STATES = [(1, "closed", "green"), (2, "half_open", "yellow"), (3, "open", "red")]

ROUTER = Dashboard(
    "router",
    "Router and groups",
    "What clients ask and get, and which groups can be given work.",
    'up{job="headwater", role="router"}',
    [
        Panel(
            "Groups",
            "As the routers see them.",
            "none",
            states("group_state", _GROUP_STATES),
            kind="state-timeline",
            states=_GROUP_STATES,
        ),
        Panel(
            "Breakers",
            "open: failed three times in a row, and is left alone for a while. half_open: one request tries it.",
            "none",
            states("breaker_state", _BREAKER_STATES),
            kind="state-timeline",
            states=_BREAKER_STATES,
        ),
        Panel(
            "Requests in flight",
            "Received and not ended (`max_requests` is the most that a router takes), and of them those that wait in "
            "the router for a group that can take them (`max_waiting`).",
            "short",
            [
                Query(f"sum by (node) (headwater_requests_in_flight{{{NODE}}})", "{{node}} in flight"),
                Query(f"sum by (node) (headwater_requests_waiting{{{NODE}}})", "{{node}} waiting"),
            ],
        ),
        OUTCOMES,
        Panel(
            "Request duration",
            "From receiving a request to its end.",
            "s",
            quantiles("gen_ai_server_request_duration_seconds", 0.5, 0.99, only=f'{NODE}, outcome="ok"'),
        ),
        Panel(
            "Retries and resumes",
            "Requests that were started anew on other groups, and those that went on from where a group was lost.",
            "short",
            [
                increase("headwater_retries_total", "node", "{{node}} retries"),
                increase("headwater_resumes_total", "role", "resumed without a {{role}} group", ""),
            ],
        ),
        Panel(
            "Tokens in",
            "Of the prompts that were sent to a prefill group.",
            "short",
            [rate("headwater_prompt_tokens_total", "node", "{{node}} tokens/s")],
        ),
        Panel(
            "Tokens out",
            "Sent to clients.",
            "short",
            [rate("headwater_generated_tokens_total", "node", "{{node}} tokens/s")],
        ),
        Panel(
            "Processes",
            "That the routers know of; 0: it cannot be scraped.",
            "none",
            [Query('up{job="headwater"}', "{{role}} {{node}} {{rank}}")],
            kind="state-timeline",
            states=[(0, "down", "red"), (1, "up", "green")],
        ),
        Panel(
            "Versions",
            "Of every process.",
            "none",
            [Query("max by (role, node, rank, version, python) (headwater_build_info)")],
            kind="table",
        ),
    ],
)
