"""What costs long is made once in a run of the suite, whatever the number of its processes."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def made_once(run_dir: Path, name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, as JSON holds it. The first process that asks makes it; others wait for it.

    If `make` raises, the next one that asks tries again.
    """
    path = run_dir / f"{name}.json"
    with (run_dir / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = json.dumps(make())
            path.write_text(made)
        return json.loads(path.read_text())
