"""Panels and dashboards as Grafana's JSON model (schema 39: Grafana 11 and later). Knows no metric.

https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]

_SCHEMA = 39
_GRID_WIDTH = 24
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Green up to the first limit, then these.
_COLORS = ("yellow", "red")


@dataclasses.dataclass(frozen=True)
class Query:
    """One PromQL query and how its series are called: `{{label}}` is replaced by the label's value."""

    expr: str
    legend: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """A heading."""

    title: str


@dataclasses.dataclass(frozen=True)
class Panel:
    """One chart.

    Args:
        kind: Grafana's name of the chart.
        unit: Grafana's id of the unit: "s", "Bps", "percentunit", "short", …
        description: what is seen, and what to think of it.
        width: of 24.
        stacked: series add up.
        limits: values from which it is yellow, then red.
        states: what some values mean: value, text, colour.
    """

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    width: int = 12
    height: int = 8
    stacked: bool = False
    limits: Sequence[float] = ()
    states: Sequence[tuple[int, str, str]] = ()


@dataclasses.dataclass(frozen=True)
class Dashboard:
    """One dashboard. `nodes` selects the series of `up` whose label `node` the variable $node offers."""

    name: str
    title: str
    description: str
    nodes: str
    contents: Sequence[Row | Panel]


def dashboard_json(dashboard: Dashboard) -> Json:
    """The whole dashboard, panels left to right in the order given."""
    return {
        "uid": f"headwater-{dashboard.name}",
        "title": f"Headwater: {dashboard.title}",
        "description": dashboard.description,
        "tags": ["headwater"],
        "schemaVersion": _SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [
            {"type": "dashboards", "title": "Headwater", "tags": ["headwater"], "asDropdown": True, "keepTime": True}
        ],
        "templating": {"list": _variables(dashboard.nodes)},
        "panels": _laid_out(dashboard.contents),
    }


def _variables(nodes: str) -> list[Json]:
    query = f"label_values({nodes}, node)"
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}},
        {
            "name": "node",
            "label": "Node",
            "type": "query",
            "datasource": _DATASOURCE,
            "definition": query,
            "query": {"query": query, "refId": "nodes"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


def _laid_out(contents: Sequence[Row | Panel]) -> list[Json]:
    panels: list[Json] = []
    left, top, line = 0, 0, 0
    for number, content in enumerate(contents, start=1):
        width, height = (_GRID_WIDTH, 1) if isinstance(content, Row) else (content.width, content.height)
        if left + width > _GRID_WIDTH:
            left, top, line = 0, top + line, 0
        place = {"id": number, "gridPos": {"x": left, "y": top, "w": width, "h": height}}
        panels.append(place | (_row(content) if isinstance(content, Row) else _panel(content)))
        left, line = left + width, max(line, height)
    return panels


def _row(row: Row) -> Json:
    return {"type": "row", "title": row.title, "collapsed": False, "panels": []}


def _panel(panel: Panel) -> Json:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "targets": [_target(panel.kind, number, query) for number, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _OPTIONS[panel.kind] | _heat(panel),
    } | ({"transformations": [_LABELS_ONLY]} if panel.kind == "table" else {})


def _target(kind: str, number: int, query: Query) -> Json:
    latest = kind in {"stat", "table"}
    return {
        "refId": chr(ord("A") + number),
        "datasource": _DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "format": {"heatmap": "heatmap", "table": "table"}.get(kind, "time_series"),
        "instant": latest,
        "range": not latest,
    }


def _field(panel: Panel) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    steps += [{"color": color, "value": limit} for color, limit in zip(_COLORS, panel.limits, strict=False)]
    field: Json = {
        "unit": panel.unit,
        "color": {"mode": "thresholds" if panel.kind in {"stat", "state-timeline"} else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
        "custom": {},
    }
    if panel.kind == "timeseries":
        field["min"] = 0
        field["custom"] = {
            "fillOpacity": 60 if panel.stacked else 5,
            "lineWidth": 1,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if panel.limits else "off"},
        }
    if panel.states:
        states = {
            str(value): {"text": text, "color": color, "index": index}
            for index, (value, text, color) in enumerate(panel.states)
        }
        field["mappings"] = [{"type": "value", "options": states}]
    return field


def _heat(panel: Panel) -> Json:
    if panel.kind != "heatmap":
        return {}
    # The values are counts; the unit is that of the buckets.
    return {"yAxis": {"unit": panel.unit, "axisPlacement": "left"}, "cellValues": {"unit": "short"}}


_LABELS_ONLY: Json = {"id": "labelsToFields", "options": {"mode": "columns"}}
_OPTIONS: Mapping[str, Json] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "none",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": False},
    },
    "state-timeline": {
        "mergeValues": True,
        "showValue": "auto",
        "rowHeight": 0.8,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "single"},
    },
    "table": {"showHeader": True, "cellHeight": "sm"},
}
