"""Write the JSON files of all dashboards: `python -m tools.dashboards`."""

from tools.dashboards import DASHBOARDS, DIRECTORY, as_text

for name, dashboard in DASHBOARDS.items():
    (DIRECTORY / name).write_text(as_text(dashboard))
