"""Small files that a process reads at start: opened without waiting, of bounded size, and JSON of bounded depth.

A pipe in a file's place would hold the process until something writes to it; a device may never end. Each refusal is a
ConfigError with the caller's field and the file as value.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from protocol.errors import ConfigError
from protocol.git_lfs import LFS_POINTER, lfs_pointer

#: Of a file, unless the caller sets another bound.
FILE_BYTES_MAX: Final = 1024 * 1024
#: Of a JSON file of a model: a configuration has at most a few hundred kilobytes.
JSON_BYTES_MAX: Final = 16 * 1024 * 1024
#: Objects and lists within each other. Configurations of models have at most about six.
JSON_DEPTH_MAX: Final = 32


@contextmanager
def open_regular(path: str | Path, field: str, *, follows_links: bool = True, remedy: str = "") -> Iterator[BinaryIO]:
    """A regular file, opened for reading without waiting. Raises ConfigError, also for an OSError within the block.

    `remedy` replaces the remedies of these errors.
    """
    more_flags = os.O_NONBLOCK if follows_links else os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | more_flags)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _refusal("is no regular file", field, path, remedy or "name a file, no pipe or device")
            yield file
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refusal("is a symlink, or one of a circle", field, path, remedy or "name the file itself") from error
        remedy = remedy or "name a file that this user may read"
        raise _refusal(f"cannot be read: {error.strerror or error}", field, path, remedy) from error


def read_small_file(
    path: str | Path, field: str, *, bytes_max: int = FILE_BYTES_MAX, follows_links: bool = True, remedy: str = ""
) -> tuple[bytes, int]:
    """A regular file of at most `bytes_max`, and its mode. Raises ConfigError, with `remedy` if it cannot be read."""
    with open_regular(path, field, follows_links=follows_links, remedy=remedy) as file:
        mode = os.fstat(file.fileno()).st_mode
        data = file.read(bytes_max + 1)
    if data.startswith(LFS_POINTER):
        raise lfs_pointer(field, path)
    if len(data) > bytes_max:
        raise _refusal(f"more than {bytes_max} bytes", field, path, "is it the file that was meant?")
    return data, mode


def read_json_object(path: str | Path, field: str) -> dict[str, Any]:
    """The object in a JSON file of at most JSON_BYTES_MAX and JSON_DEPTH_MAX. Raises ConfigError."""
    data, _ = read_small_file(path, field, bytes_max=JSON_BYTES_MAX)
    remedy = "correct the file, or copy it again from where it came"
    try:
        value = json.loads(data)
    except ValueError as error:
        raise _refusal(f"is not JSON: {error}", field, path, remedy) from error
    except RecursionError as error:
        raise _refusal(f"is nested deeper than {JSON_DEPTH_MAX} levels", field, path, remedy) from error
    if depth_of(value) > JSON_DEPTH_MAX:
        raise _refusal(f"is nested deeper than {JSON_DEPTH_MAX} levels", field, path, remedy)
    if not isinstance(value, dict):
        raise _refusal("is JSON, but no object", field, path, remedy)
    return value


def depth_of(value: object) -> int:
    """Levels of objects and lists; 0 for a plain value. Counted without recursion, level by level."""
    depth, level = 0, [value]
    while level := [it for it in level if isinstance(it, dict | list)]:
        depth += 1
        level = [inner for it in level for inner in (it.values() if isinstance(it, dict) else it)]
    return depth


def _refusal(message: str, field: str, path: str | Path, remedy: str) -> ConfigError:
    return ConfigError(message, field=field, value=path, remedy=remedy)
