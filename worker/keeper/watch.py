"""The keeper of a worker's weights, as the worker sees it while it serves: the answer to what its next start costs."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path


class KeeperWatch:
    """Looks at the keeper that listens at `path`. `is_kept`: it has had the weights of this worker."""

    def __init__(self, path: Path | None, *, is_kept: bool) -> None:
        self._path, self._is_kept = path, is_kept
        self._first = _mark(path)

    def samples(self) -> float | Mapping[str, float]:
        """1 while the next worker would map these weights, else 0; nothing where there was no keeper at all.

        Never waits. A keeper that was started anew has another socket, and none of the weights.
        """
        if self._first is None:
            return {}
        return float(self._is_kept and _mark(self._path) == self._first and _listens(self._path))


def _mark(path: Path | None) -> tuple[int, int] | None:
    """Tell one socket at `path` from the next."""
    try:
        found = os.stat(path) if path is not None else None
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_mtime_ns)


def _listens(path: Path | None) -> bool:
    """Return whether a process listens at `path`, which hears of a connection that says nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as asked:
        try:
            asked.connect(str(path))
        except BlockingIOError:  # it has many to accept
            return True
        except OSError:
            return False
        return True
