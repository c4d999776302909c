"""Pointers of Git LFS: small texts that stand for large files which a clone has not fetched. Pure."""

from __future__ import annotations

from typing import Final

from protocol.errors import ConfigError

#: How each begins.
LFS_POINTER: Final = b"version https://git-lfs"


def lfs_pointer(field: str, path: object) -> ConfigError:
    """The refusal of a file that begins as LFS_POINTER does."""
    return ConfigError(
        "is a Git LFS pointer, which stands for the file itself",
        field=field,
        value=path,
        remedy="fetch the file: git lfs pull",
    )
