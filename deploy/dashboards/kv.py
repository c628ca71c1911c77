"""KV on its way from prefill workers to decode nodes."""

from __future__ import annotations

from deploy.dashboards.panels import Dashboard, Panel, Query, Row
from deploy.dashboards.queries import NODE, buckets, increase, quantiles, rate
from deploy.dashboards.shared import EXPOSED

KV = Dashboard(
    "kv",
    "KV transfer",
    "How KV moves from prefill workers to decode nodes, and what became of it.",
    'up{job="headwater", role=~"worker|decode"}',
    [
        Row("Speed"),
        Panel(
            "KV sent and received",
            "Bytes whose receipt was sent, and bytes that were verified and unpacked.",
            "Bps",
            [
                rate("headwater_kv_sent_bytes_total", "node", "{{node}} sent", f'{NODE}, role="worker"'),
                rate("headwater_kv_received_bytes_total", "node", "{{node}} received", f'{NODE}, role="decode"'),
            ],
        ),
        Panel(
            "Rate of one delivery attempt",
            "An attempt of one rank: its bytes over the time in which any of them was under way. Not the speed of the "
            "network: a chunk may wait for a slot.",
            "Bps",
            quantiles(
                "headwater_kv_delivery_bytes_per_second", 0.1, 0.5, 0.9, by="node", only=f'{NODE}, role="worker"'
            ),
        ),
        EXPOSED,
        Panel(
            "Delivery and transfer time",
            "Of one rank's attempt, counting only time in which a box was under way; and of a whole request, from its "
            "first receipt to the commit, which contains the computing of later chunks.",
            "s",
            [
                Query(query.expr, f"delivery {query.legend}")
                for query in quantiles("headwater_kv_delivery_seconds", 0.5, 0.99)
            ]
            + [
                Query(query.expr, f"transfer {query.legend}")
                for query in quantiles("headwater_kv_transfer_seconds", 0.5, 0.99)
            ],
        ),
        Panel(
            "Write time",
            "One write by the transfer engine.",
            "s",
            quantiles("headwater_kv_write_seconds", 0.5, 0.99, by="node", only=f'{NODE}, role="worker"'),
        ),
        Panel(
            "Pack time",
            "Packing and digest of one box, on the worker's processor.",
            "s",
            quantiles("headwater_kv_pack_seconds", 0.5, 0.99, by="node", only=f'{NODE}, role="worker"'),
        ),
        Panel(
            "Transfer sizes",
            "Committed transfers by their bytes.",
            "bytes",
            buckets("headwater_kv_transfer_bytes"),
            kind="heatmap",
        ),
        Panel(
            "Transport",
            "What really carries KV. tcp where rdma was meant: see `transport` in the cluster file.",
            "none",
            [Query(f"max by (node, role, rank, transport) (headwater_kv_transport_info{{{NODE}}})")],
            kind="table",
        ),
        Row("What became of it"),
        Panel(
            "Receipts by outcome",
            "refused: malformed, misplaced or with a wrong digest; the transfer failed. late: of an attempt that was "
            "over, as after a cancel; harmless.",
            "ops",
            [rate("headwater_kv_receipts_total", "outcome", "{{outcome}}", f'{NODE}, role="decode"')],
            stacked=True,
        ),
        Panel(
            "Deliveries by state",
            "Attempts of ranks to deliver. aborted: cancelled by its own side.",
            "ops",
            [rate("headwater_kv_deliveries_total", "state", "{{state}}", f'{NODE}, role="worker"')],
            stacked=True,
        ),
        Panel(
            "Transfers by state",
            "As the decode nodes saw them.",
            "ops",
            [rate("headwater_kv_transfers_total", "state", "{{state}}", f'{NODE}, role="decode"')],
            stacked=True,
        ),
        Panel(
            "Lost and found",
            "Slots fenced because a late write could land in them; attempts whose lease expired because no chunk came; "
            "attempts that went on from what earlier ones had delivered.",
            "short",
            [
                increase("headwater_slots_fenced_total", "node", "{{node}} fenced", f'{NODE}, role="decode"'),
                increase("headwater_kv_leases_expired_total", "node", "{{node}} expired", f'{NODE}, role="decode"'),
                increase("headwater_kv_resumes_total", "node", "{{node}} resumed", f'{NODE}, role="decode"'),
            ],
        ),
        Row("Decode nodes"),
        Panel(
            "Landing slots",
            "quarantined: a failed write may still land there. Comes back when it is fenced, within seconds.",
            "short",
            [Query(f"sum by (node, state) (headwater_landing_slots{{{NODE}}})", "{{node}} {{state}}")],
            stacked=True,
        ),
        Panel(
            "Promised tokens",
            "Of the requests that the node has admitted, as a share of what it can promise. 100 %: it refuses.",
            "percentunit",
            [
                Query(
                    f"sum by (node) (headwater_decode_promised_tokens{{{NODE}}}) / "
                    f'sum by (node) (headwater_decode_capacity_tokens{{{NODE}, role="decode"}})',
                    "{{node}}",
                )
            ],
            limits=[0.9],
        ),
        Panel(
            "Requests",
            "That the node has admitted.",
            "short",
            [Query(f'sum by (node) (headwater_decode_active_requests{{{NODE}, role="decode"}})', "{{node}}")],
        ),
        Panel(
            "Tokens",
            "Generated.",
            "short",
            [rate("headwater_decode_tokens_total", "node", "{{node}} tokens/s", f'{NODE}, role="decode"')],
        ),
    ],
)
