"""What reading files again brought: other content, the same content in another file, or the very same file as before.

The last case is told apart because it is often a mistake. A container that mounts a single file keeps that file after
the host has put another one in its place by rename. Mount the directory, or write into the file.

`FileState` is taken beside the read that uses the content. A file that is replaced between the two is described wrongly
until the next reload; what is used is always what was read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from protocol.errors import ConfigError

#: Bytes hashed of one file; files of keys and certificates are smaller.
HASHED_BYTES_MAX: Final = 1024 * 1024


class FileState(NamedTuple):
    """Which file a path named, and a hash of its content."""

    device: int
    inode: int
    digest: bytes

    @property
    def place(self) -> tuple[int, int]:
        return self.device, self.inode


def state_of(path: str | os.PathLike[str]) -> FileState:
    """The state of the file at `path`. Raises ConfigError when it cannot be read."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            data = file.read(HASHED_BYTES_MAX)
    except OSError as error:
        reason, remedy = error.strerror or "cannot be read", "name a file that this user may read"
        raise ConfigError(f"cannot be read: {reason}", field="file", value=os.fspath(path), remedy=remedy) from error
    return FileState(status.st_dev, status.st_ino, hashlib.sha256(data).digest())


def change_text(before: Sequence[FileState], after: Sequence[FileState]) -> str:
    """What a reload found, for operators. Pure."""
    if [it.digest for it in before] != [it.digest for it in after]:
        return "changed"
    numbers = ", ".join(str(it.inode) for it in after)
    if [it.place for it in before] != [it.place for it in after]:
        return f"the same content in another file (inode {numbers})"
    return f"unchanged: the same file (inode {numbers}) and content as before"


class ReloadableFiles:
    """Files that are used together. `read` takes them into use, or raises ConfigError and changes nothing."""

    def __init__(self, what: str, paths: Sequence[str | os.PathLike[str]], read: Callable[[], str]) -> None:
        """`read` returns what is in use now, as in "3 keys". Raises ConfigError when a file cannot be read."""
        self.what = what
        self._paths = tuple(paths)
        self._read = read
        self._states = tuple(map(state_of, self._paths))

    def reload(self) -> str:
        """One line of what was read. Raises ConfigError, after which what was read before holds."""
        states = tuple(map(state_of, self._paths))
        in_use = self._read()
        before, self._states = self._states, states
        return f"{self.what}: {change_text(before, states)}; {in_use}"
