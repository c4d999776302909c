"""The GPUs of this machine, asked of a child process, whose torch sees what that of workers will see.

Nothing is allocated on them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

from hisparse.cluster.children import child_environ

#: Longest time to import torch, from a slow disk, and to count.
ASK_LIMIT_S: Final = 120.0
QUESTION: Final = (
    "import json; from worker.device.gpu_memory import whole_device_bytes; print(json.dumps(whole_device_bytes()))"
)


def gpu_bytes() -> list[int]:
    """Whole memory of each GPU that a worker would see; empty where that cannot be told, and where there is none."""
    command = [sys.executable, "-c", QUESTION]
    try:
        done = subprocess.run(
            command, env=child_environ(), capture_output=True, text=True, timeout=ASK_LIMIT_S, check=True
        )
        return [int(size) for size in json.loads(done.stdout.splitlines()[-1])]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []
