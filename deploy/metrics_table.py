"""Writes deploy/METRICS.md, the table of all Prometheus metrics, from the metrics themselves.

python deploy/metrics_table.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from prometheus_client import Counter, Gauge, Histogram, Info
from prometheus_client.metrics import MetricWrapperBase

from kv_transfer import metrics as kv_metrics
from kv_transfer import metrics_server
from prefill_node import leader_metrics, worker_metrics
from router import metrics as router_metrics

TABLE = Path(__file__).with_name("METRICS.md")

PROCESSES: tuple[tuple[str, tuple[ModuleType, ...]], ...] = (
    ("Every process", (metrics_server,)),
    ("Router", (router_metrics,)),
    ("Leader of a prefill group", (leader_metrics,)),
    ("Worker of a prefill group", (worker_metrics,)),
    ("Both sides of a transfer: workers and decode nodes", (kv_metrics,)),
)
_KINDS: tuple[tuple[type[MetricWrapperBase], str, str], ...] = (
    (Counter, "counter", "_total"),
    (Gauge, "gauge", ""),
    (Histogram, "histogram", ""),
    (Info, "info", "_info"),
)
_HEAD = """# Metrics

Made by `python deploy/metrics_table.py`; a test compares. Every process serves its own at `/metrics`; `headwater
status` shows where. No label grows with requests. Histograms are classic ones: the Python client has no native ones
(prometheus-client 0.26). Names that begin with `gen_ai_` are those of OpenTelemetry's semantic conventions for
generative AI.
"""


def metrics_of(module: ModuleType) -> list[tuple[str, str, str, str]]:
    """Name as it is queried, kind, labels and meaning of each of a module's metrics, in order."""
    rows = []
    for metric in vars(module).values():
        for cls, kind, suffix in _KINDS:
            if isinstance(metric, cls):
                labels = ", ".join(f"`{label}`" for label in metric._labelnames)  # noqa: SLF001 - there is no other way
                rows.append((f"{metric._name}{suffix}", kind, labels, metric._documentation))  # noqa: SLF001
    return rows


def table() -> str:
    """The whole page."""
    parts = [_HEAD]
    for process, modules in PROCESSES:
        parts.append(f"\n## {process}\n\n| metric | kind | labels | meaning |\n| --- | --- | --- | --- |\n")
        for module in modules:
            for name, kind, labels, meaning in metrics_of(module):
                parts.append(f"| `{name}` | {kind} | {labels} | {meaning.replace('|', chr(92) + '|')} |\n")
    return "".join(parts)


def main() -> int:
    """Writes the page, or with --check says whether it is as it would be written."""
    if "--check" in sys.argv[1:]:
        same = TABLE.read_text(encoding="utf-8") == table()
        sys.stderr.write("" if same else f"{TABLE} is not up to date; run python deploy/metrics_table.py\n")
        return 0 if same else 1
    TABLE.write_text(table(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
