"""Every metric of every process by name, and the page that documents them.

Each metric is declared once, beside its source. Collectors export exactly these (test_metrics.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from metrics.coordinator import CLUSTER_METRICS, ROUTER_METRICS
from metrics.coordinator_totals import COORDINATOR_METRICS, JOURNAL_METRICS, WAIT_METRICS
from metrics.executor import EXECUTOR_METRICS, SWAP_METRICS
from metrics.families import Metric
from metrics.http import HTTP_METRICS
from metrics.link import LINK_METRICS
from metrics.process import PROCESS_METRICS, ROOM_METRICS
from metrics.transfers import TRANSFER_METRICS
from metrics.worker import WORKER_METRICS

Metrics: TypeAlias = tuple[Metric[Any], ...]

EVERY_PROCESS: Final[Metrics] = (*PROCESS_METRICS, *ROOM_METRICS)
WORKER: Final[Metrics] = (*WORKER_METRICS, *EXECUTOR_METRICS, *SWAP_METRICS, *LINK_METRICS, *TRANSFER_METRICS)
COORDINATOR: Final[Metrics] = (*CLUSTER_METRICS, *ROUTER_METRICS, *COORDINATOR_METRICS, *WAIT_METRICS, *JOURNAL_METRICS)
HTTP: Final[Metrics] = HTTP_METRICS

TABLE: Final[Metrics] = (*EVERY_PROCESS, *WORKER, *COORDINATOR, *HTTP)
BY_NAME: Final[dict[str, Metric[Any]]] = {metric.name: metric for metric in TABLE}

assert len(BY_NAME) == len(TABLE)  # a name means one thing


def exported_names(metrics: Iterable[Metric[Any]]) -> frozenset[str]:
    """What a process with these `metrics` of its own exports."""
    return frozenset(metric.name for metric in (*EVERY_PROCESS, *metrics))


def as_markdown() -> str:
    """The table as docs/metrics.md has it: `python -m metrics.names > docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Written by `make docs`; a test holds this page, the declarations in `metrics/` and what the",
        "processes export equal. `/healthz` answers 503 when only a restart helps, `/readyz` when no work is taken.",
    ]
    sections = {"Every process": EVERY_PROCESS, "Worker": WORKER, "Coordinator": COORDINATOR, "HTTP front": HTTP}
    for title, metrics in sections.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| name | type | unit | labels | meaning | question it answers |",
            "|---|---|---|---|---|---|",
        ]
        lines += map(_markdown_row, metrics)
    return "\n".join(lines) + "\n"


def _markdown_row(metric: Metric[Any]) -> str:
    cells = (metric.type.value, metric.unit, ", ".join(metric.labels), metric.help, metric.question)
    return f"| `{metric.name}` | {' | '.join(cells)} |"


if __name__ == "__main__":
    print(as_markdown(), end="")
