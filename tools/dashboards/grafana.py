"""A dashboard as data, and Grafana's JSON of it. Pure.

A dashboard is rows of panels; a row's panels share its 24 columns by `span`. Grafana's model has some hundred fields
with defaults of its own: only those that differ are written, so that the files can be read and compared.

Rejected: grafana-foundation-sdk and grafanalib (thousands of generated classes for the eight fields used here); JSON by
hand (an expression and its description get lost in positions).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

#: JSON as Grafana reads it.
Json: TypeAlias = dict[str, object]

COLUMNS: Final = 24
ROW_HEIGHT: Final = 8
SCHEMA_VERSION: Final = 39
SOURCE: Final[Json] = {"type": "prometheus", "uid": "prometheus"}
#: Of a series of `hisparse_info`, what a variable shows and what it stands for.
NAME_AND_INSTANCE: Final = '/[{,]name="(?<text>[^"]+)|[{,]instance="(?<value>[^"]+)/g'


class View(Enum):
    """Form of a panel: lines, lines on top of each other, one number per series; over time in colours, the counts of
    buckets, or a row for each series, in the order of their names."""

    LINES = "timeseries"
    STACK = "stack"
    NUMBER = "stat"
    HEATMAP = "heatmap"
    ROWS = "rows"


@dataclass(frozen=True)
class Query:
    """A PromQL expression, and the name of each of its series: `{{label}}` is filled in. `rare`: there are none until
    something happens."""

    expr: str
    legend: str = ""
    rare: bool = False


def named(expr: str) -> str:
    """`expr`, whose series have the labels `job` and `instance`, with the name of each one's process as `name`."""
    return f"({expr}) * on (job, instance) group_left (name) hisparse_info"


@dataclass(frozen=True)
class Panel:
    """`description` says what is drawn and what a bad value looks like. `unit` is Grafana's. `bad_above` and
    `bad_below` draw a line from which on values are bad."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    view: View = View.LINES
    span: int = 1
    bad_above: float | None = None
    bad_below: float | None = None


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A choice at the top among the processes of one kind: it shows their names. `$name` in expressions is a pattern of
    their instances."""

    name: str
    process: str

    @property
    def query(self) -> str:
        """The series that are offered, one line each: `hisparse_info{instance="...", ...} 1 TIME`."""
        return f'query_result(hisparse_info{{process="{self.process}"}})'


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


def as_json(dashboard: Dashboard) -> Json:
    """Return what is provisioned."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["hisparse"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_variable(variable) for variable in dashboard.variables]},
        "links": [{"type": "dashboards", "tags": ["hisparse"], "title": "HiSparse", "keepTime": True}],
        "annotations": {"list": [_alerts()]},
        "panels": list(_panels(dashboard.rows)),
    }


def _variable(variable: Variable) -> Json:
    return {
        "name": variable.name,
        "type": "query",
        "datasource": SOURCE,
        "query": variable.query,
        "regex": NAME_AND_INSTANCE,
        "refresh": 2,  # on each change of the time range
        "includeAll": True,
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _alerts() -> Json:
    """Firing alerts, drawn into every panel."""
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "expr": 'ALERTS{alertname=~"HiSparse.*", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "iconColor": "red",
    }


def _panels(rows: tuple[Row, ...]) -> Iterator[Json]:
    number = 0
    for index, row in enumerate(rows):
        top = index * (ROW_HEIGHT + 1)
        number += 1
        heading = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        yield {"id": number, "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1}, **heading}
        left, share = 0, COLUMNS // sum(panel.span for panel in row.panels)
        for panel in row.panels:
            number += 1
            width = share * panel.span
            place = {"x": left, "y": top + 1, "w": width, "h": ROW_HEIGHT}
            yield {"id": number, "gridPos": place, **_panel(panel)}
            left += width


def _panel(panel: Panel) -> Json:
    drawn_as = {View.STACK: View.LINES, View.ROWS: View.HEATMAP}
    return {
        "type": drawn_as.get(panel.view, panel.view).value,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "targets": [_target(index, query, panel.view) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, **_limits(panel), **_style(panel)}},
        **_options(panel),
    }


def _target(index: int, query: Query, view: View) -> Json:
    return {
        "refId": chr(ord("A") + index),
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "format": "heatmap" if view is View.HEATMAP else "time_series",
        "instant": view is View.NUMBER,
        "range": view is not View.NUMBER,
    }


def _limits(panel: Panel) -> Json:
    """Colours by threshold: steps ascend, each holds from its value on."""
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.bad_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.bad_below}]
    if panel.bad_above is not None:
        steps.append({"color": "red", "value": panel.bad_above})
    return {"thresholds": {"mode": "absolute", "steps": steps}} if len(steps) > 1 else {}


def _style(panel: Panel) -> Json:
    style: Json = {"noValue": "none so far"} if all(query.rare for query in panel.queries) else {}
    match panel.view:
        case View.LINES:
            return style | {"custom": {"thresholdsStyle": {"mode": "line"}}}
        case View.STACK:
            return style | {"custom": {"stacking": {"mode": "normal"}, "fillOpacity": 40}}
        case _:
            return style


def _options(panel: Panel) -> Json:
    match panel.view:
        case View.NUMBER:
            return {"options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"}}
        case View.HEATMAP:
            return {"options": {"calculate": False, "yAxis": {"unit": "s"}}}
        case View.ROWS:
            return {"options": {"calculate": False, "cellValues": {"unit": panel.unit}, "yAxis": {"unit": "none"}}}
        case _:
            return {"options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}}}
