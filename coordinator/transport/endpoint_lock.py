"""An ipc path held for one process: a second bind to a live path would succeed and steal it."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from typing import Final

from coordinator.config_checks import SOCKET_PATH_BYTES_MAX
from coordinator.errors import ConfigError, Unavailable

RUNTIME_DIR_MODE: Final = 0o700


class EndpointLock:
    """Holds an ipc path for this process, by a lock file beside it; does nothing for other transports.

    The lock dies with its process, so a path left behind by a killed coordinator can be taken at once. The lock file
    stays: removing it would let two processes lock two files of one name.
    """

    def __init__(self, endpoint: str) -> None:
        """Raises ConfigError (path too long, directory open to others) or Unavailable (held by another process)."""
        self._file: int | None = None
        if not endpoint.startswith("ipc://"):
            return
        path = endpoint.removeprefix("ipc://")
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigError(
                f"the path is longer than the {SOCKET_PATH_BYTES_MAX} bytes a socket can have",
                field="endpoint",
                value=endpoint,
                remedy="choose a shorter runtime_dir",
            )
        make_private_dir(os.path.dirname(path) or ".")
        self._file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._path = path
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise Unavailable(
                f"process {owner} serves it already",
                field="endpoint",
                value=endpoint,
                remedy="stop that process or choose another runtime_dir",
            ) from error
        os.truncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Remove the socket's path and let go. Idempotent."""
        if self._file is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._path)
            os.close(self._file)
            self._file = None


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
