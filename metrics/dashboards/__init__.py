"""Grafana dashboards: written in Python, provisioned from the JSON files beside it.

python -m metrics.dashboards      write them anew; a test holds files and code equal
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from metrics.dashboards.fleet import FLEET
from metrics.dashboards.grafana import Dashboard, as_json
from metrics.dashboards.requests import REQUESTS
from metrics.dashboards.worker import WORKER

DASHBOARDS: Final[dict[str, Dashboard]] = {"fleet.json": FLEET, "worker.json": WORKER, "requests.json": REQUESTS}
DIRECTORY: Final = Path(__file__).parent


def as_text(dashboard: Dashboard) -> str:
    return json.dumps(as_json(dashboard), indent=1) + "\n"
