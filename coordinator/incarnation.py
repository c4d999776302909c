"""The incarnation: the number of this coordinator process, higher than any earlier one in its runtime directory (I4).

It is milliseconds since the epoch, or the last incarnation plus one when the clock went back. The caller holds the
locks of the endpoints, so no two processes take a number at the same time.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Final

from protocol.errors import ConfigError

FILE_NAME: Final = "incarnation"
#: Above any clock's milliseconds and any count of restarts. A higher number in the file is damage.
INCARNATION_MAX: Final = 1 << 53


def next_incarnation(runtime_dir: Path, now_ms: int | None = None) -> int:
    """Take and record the next number. Raises ConfigError when the record cannot be read or written."""
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    path = runtime_dir / FILE_NAME
    try:
        last = int(path.read_text()) if path.exists() else 0
        incarnation = max(now_ms, last + 1)
        _check_range(last)
        with tempfile.NamedTemporaryFile("w", dir=runtime_dir, delete=False) as file:
            file.write(str(incarnation))
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read or write the coordinator's incarnation: {error}",
            field="cluster.runtime_dir",
            value=path,
            remedy="make the directory writable, or remove the file",
        ) from error
    return incarnation


def _check_range(last: int) -> None:
    if not 0 <= last < INCARNATION_MAX:
        raise ValueError(f"the file does not hold a number from 0 to {INCARNATION_MAX - 1}")
