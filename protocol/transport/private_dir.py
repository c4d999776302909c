"""Directories that only their owner may enter: what guards an ipc path."""

from __future__ import annotations

import os
import stat
from typing import Final

from protocol.errors import ConfigError

RUNTIME_DIR_MODE: Final = 0o700


def make_private_dir(path: str) -> None:
    """Make `path` with mode 0700 unless it exists; raise ConfigError when others than its owner may enter it."""
    try:
        os.makedirs(path, mode=RUNTIME_DIR_MODE, exist_ok=True)
    except OSError as error:
        reason, remedy = error.strerror or "cannot be made", "choose a directory that this user may make and write"
        raise ConfigError(reason, field="cluster.runtime_dir", value=path, remedy=remedy) from error
    check_private_dir(path)


def check_private_dir(path: str, *, missing_ok: bool = False) -> None:
    """Raise ConfigError unless `path` is a directory of ours that nobody else may enter.

    Both ends look: in a directory such as /tmp anybody may have made one of that name, and listen there. Not a link to
    a directory either, which could lead elsewhere a moment later.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        if missing_ok:
            return
        raise
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        what, remedy = "not a directory", "choose a directory of your own"
    elif status.st_uid != os.geteuid() or mode & 0o077:
        what = f"owner {status.st_uid}, mode {mode:04o}: others could reach the sockets in it"
        remedy = f"chmod 700 {path}, or choose a directory of your own"
    else:
        return
    raise ConfigError(what, field="cluster.runtime_dir", value=path, remedy=remedy)
