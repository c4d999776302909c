"""worker/oracle.py as a program: it must not see this project even by accident."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import worker.oracle


def run_oracle(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers to `job` (worker/oracle.py has its form), one for each prompt."""
    done = subprocess.run(
        [sys.executable, "-P", worker.oracle.__file__],
        input=json.dumps(job), capture_output=True, text=True, cwd="/", check=True, timeout=600,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]
