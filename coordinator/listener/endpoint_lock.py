"""A lock on an ipc path: without it, a second process could bind the same path and take its connections."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress

from protocol.config_checks import SOCKET_PATH_BYTES_MAX
from protocol.errors import ConfigError, Unavailable
from protocol.transport.private_dir import make_private_dir


class EndpointLock:
    """Holds an ipc path for this process, by a lock file beside it; does nothing for other transports.

    The lock ends with its process, so the path of a killed coordinator can be taken at once. The lock file stays:
    removing it would let two processes lock two files of one name.
    """

    def __init__(self, endpoint: str) -> None:
        """Raises ConfigError (path too long, directory open to others, another thing than a file in place of the lock
        file) or Unavailable (held by another process)."""
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
        self._file = _open_lock_file(f"{path}.lock")
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
        """Remove the socket's path and release the lock. Idempotent."""
        if self._file is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._path)
            os.close(self._file)
            self._file = None


def _open_lock_file(path: str) -> int:
    """Open the lock file, made if there is none. A link is not followed: the lock file is emptied and written to."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        reason = "it is a symlink" if os.path.islink(path) else error.strerror or "cannot be opened"
        raise _unusable(path, reason) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _unusable(path, "it is not a regular file")
    return file


def _unusable(path: str, reason: str) -> ConfigError:
    remedy = "remove it, or choose another runtime_dir that this user may write"
    return ConfigError(f"cannot lock the endpoint: {reason}", field="lock file", value=path, remedy=remedy)
