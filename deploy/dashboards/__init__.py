"""The Grafana dashboards of a Headwater cluster: what deploy/grafana/dashboards/*.json is made from.

python -m deploy.dashboards [--check]
"""

from __future__ import annotations

import json
from pathlib import Path

from deploy.dashboards.kv import KV
from deploy.dashboards.panels import dashboard_json
from deploy.dashboards.prefill import PREFILL
from deploy.dashboards.router import ROUTER
from deploy.dashboards.ttft import TTFT

FOLDER = Path(__file__).parents[1] / "grafana" / "dashboards"
DASHBOARDS = (TTFT, PREFILL, KV, ROUTER)


def files() -> dict[Path, str]:
    """What each file says."""
    return {
        FOLDER / f"{dashboard.name}.json": json.dumps(dashboard_json(dashboard), indent=2) + "\n"
        for dashboard in DASHBOARDS
    }
