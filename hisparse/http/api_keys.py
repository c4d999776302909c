"""API keys: one a line in a file that only its owner may read; blank lines and lines that begin with # are skipped.

Compared by digest, all of them every time, so that the time taken says nothing about any key. The file is read at
start, and again at a reload: a removed key is refused from then on; requests that it began are answered to their end.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Sequence
from typing import Final

from hisparse.http.errors import Unauthorized
from protocol.errors import ConfigError

KEY_CHARS_MIN: Final = 16
KEYS_MAX: Final = 1_024
#: Permission bits of a file that others than its owner and group can use.
OTHERS: Final = 0o007
FIELD: Final = "http.api_keys_file"
#: Of an owner's name.
OWNER_CHARS: Final = 12
#: Of the file: KEYS_MAX keys with as many comments.
FILE_BYTES_MAX: Final = 1024 * 1024


class ApiKeys:
    """Without any key configured, every client that reaches the port may ask."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._owners = {_digest(key): owner_of(key) for key in keys}

    def replace(self, other: ApiKeys) -> str:
        """Go by these from now on; says how many they are."""
        self._owners = other._owners
        return f"{len(self._owners)} keys"

    def check(self, authorization: str) -> str:
        """The key's owner, "" where there are no keys. `authorization` is the value of that header, empty when there is
        none. Raises Unauthorized."""
        if not self._owners:
            return ""
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        known = [owner for digest, owner in self._owners.items() if hmac.compare_digest(given, digest)]
        if scheme.lower() != "bearer" or not known:
            raise Unauthorized(
                "no API key, or not one of ours", field="authorization", remedy="send Authorization: Bearer KEY"
            )
        return known[0]


def read_keys(path: str) -> ApiKeys:
    """The keys of the file at `path`; no keys for "". Raises ConfigError."""
    if not path:
        return ApiKeys(())
    try:
        text = read_secret(path, FIELD).decode()
    except UnicodeDecodeError as error:
        remedy = "name a file of keys, one a line"
        raise ConfigError("cannot be read: not text", field=FIELD, value=path, remedy=remedy) from error
    return ApiKeys(parse_keys(text, path))


def read_secret(path: str, field: str) -> bytes:
    """A file that others may not read: see `read_file`."""
    data, mode = read_file(path, field)
    if mode & OTHERS:
        raise ConfigError("others may read it", field=field, value=path, remedy=f"chmod 600 {path}")
    return data


def read_file(path: str, field: str) -> tuple[bytes, int]:
    """A small regular file, and its mode. Raises ConfigError.

    Opened without waiting: a pipe in its place would hold the process until something writes to it.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(FILE_BYTES_MAX + 1) if stat.S_ISREG(mode) else b""
    except OSError as error:
        remedy = "name a file that this user may read"
        raise ConfigError(f"cannot be read: {error.strerror}", field=field, value=path, remedy=remedy) from error
    if not stat.S_ISREG(mode):
        raise ConfigError("is no regular file", field=field, value=path, remedy="name a file, no pipe or device")
    if len(data) > FILE_BYTES_MAX:
        text = f"more than {FILE_BYTES_MAX} bytes"
        raise ConfigError(text, field=field, value=path, remedy="is it the file that was meant?")
    return data, mode


def parse_keys(text: str, path: str) -> list[str]:
    """Raises ConfigError, which never shows a key."""
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not 0 < len(keys) <= KEYS_MAX:
        raise ConfigError(f"{len(keys)} keys, not 1 to {KEYS_MAX}", field=FIELD, value=path, remedy="one key a line")
    short = sum(len(key) < KEY_CHARS_MIN or not key.isascii() or " " in key for key in keys)
    if short:
        raise ConfigError(
            f"{short} of {len(keys)} keys are shorter than {KEY_CHARS_MIN} characters, or have blanks in them",
            field=FIELD,
            value=path,
            remedy="make keys with: openssl rand -hex 32",
        )
    return keys


def owner_of(key: str) -> str:
    """What a key is called where it must not be shown: in request ids and in shares. The same in every front."""
    return _digest(f"owner of {key}").hex()[:OWNER_CHARS]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
