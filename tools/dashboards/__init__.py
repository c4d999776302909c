"""Grafana dashboards: written in Python, provisioned from the JSON files in metrics/dashboards/.

python -m tools.dashboards      write them anew; a test holds files and code equal
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import metrics
from tools.dashboards.fleet import FLEET
from tools.dashboards.grafana import Dashboard, as_json
from tools.dashboards.requests import REQUESTS
from tools.dashboards.worker import WORKER

DASHBOARDS: Final[dict[str, Dashboard]] = {"fleet.json": FLEET, "worker.json": WORKER, "requests.json": REQUESTS}
DIRECTORY: Final = Path(metrics.__file__).parent / "dashboards"


def as_text(dashboard: Dashboard) -> str:
    return json.dumps(as_json(dashboard), indent=1) + "\n"
