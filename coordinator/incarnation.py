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
from protocol.small_files import read_small_file

FIELD: Final = "cluster.runtime_dir"
FILE_NAME: Final = "incarnation"
#: Above any clock's milliseconds and any count of restarts. A higher number in the file is damage.
INCARNATION_MAX: Final = 1 << 53
#: Of the file: the digits of INCARNATION_MAX and a newline take 17.
FILE_BYTES_MAX: Final = 64


def next_incarnation(runtime_dir: Path, now_ms: int | None = None) -> int:
    """Take and record the next number. Raises ConfigError when the record cannot be read or written."""
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    path = runtime_dir / FILE_NAME
    last = _last(path)
    incarnation = max(now_ms, last + 1)
    try:
        with tempfile.NamedTemporaryFile("w", dir=runtime_dir, delete=False) as file:
            file.write(str(incarnation))
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)
    except OSError as error:
        raise _refusal(f"cannot be written: {error}", path) from error
    return incarnation


def _last(path: Path) -> int:
    """The number in the file, 0 without one."""
    if not os.path.lexists(path):
        return 0
    try:
        data, _ = read_small_file(path, FIELD, bytes_max=FILE_BYTES_MAX, follows_links=False)
        last = int(data)
    except ConfigError as error:
        raise _refusal(error.message, path) from error
    except ValueError as error:
        raise _refusal("holds no number", path) from error
    if not 0 <= last < INCARNATION_MAX:
        raise _refusal(f"holds {last}, which is no number from 0 to {INCARNATION_MAX - 1}", path)
    return last


def _refusal(message: str, path: Path) -> ConfigError:
    return ConfigError(
        f"the file of the coordinator's incarnation {message}",
        field=FIELD,
        value=path,
        remedy="make the directory writable, or remove the file",
    )
