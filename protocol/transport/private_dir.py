"""Directories that only their owner may enter, which protect ipc paths."""

from __future__ import annotations

import os
import stat
from typing import Final

from protocol.errors import ConfigError

RUNTIME_DIR_MODE: Final = 0o700


def make_private_dir(path: str) -> None:
    """Make `path` with mode 0700 unless it exists. Raises ConfigError as `check_private_dir` does, or when it fails."""
    try:
        os.makedirs(path, mode=RUNTIME_DIR_MODE, exist_ok=True)
    except OSError as error:
        reason, remedy = error.strerror or "cannot be made", "choose a directory that this user may make and write"
        raise ConfigError(reason, field="cluster.runtime_dir", value=path, remedy=remedy) from error
    check_private_dir(path)


def check_private_dir(path: str, *, missing_ok: bool = False) -> None:
    """Raise ConfigError unless `path` is a directory of this user that no other user may enter.

    Both ends check: in a directory such as /tmp another user may have made a directory of that name and listen there. A
    link to a directory is refused, because its target may change.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        if missing_ok:
            return
        raise
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        what, remedy = "not a directory", "choose a directory of this user"
    elif status.st_uid != os.geteuid() or mode & 0o077:
        what = f"owner {status.st_uid}, mode {mode:04o}: others could reach the sockets in it"
        remedy = f"chmod 700 {path}, or choose a directory of this user"
    else:
        return
    raise ConfigError(what, field="cluster.runtime_dir", value=path, remedy=remedy)
