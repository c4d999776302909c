"""API keys: one a line in a file that only its owner may read; blank lines and lines that begin with # are skipped.

    KEY                  asks for priority 0 at most (KEY_PRIORITY_DEFAULT)
    KEY priority=N       asks for priority N at most

Compared by digest, all of them every time, so that the time taken says nothing about any key. The file is read at
start, and again at a reload: a removed key is refused from then on; requests that it began are answered to their end.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final, NamedTuple

from hisparse.http.errors import Unauthorized
from protocol.errors import ConfigError
from protocol.messages import KEY_PRIORITY_DEFAULT, PRIORITY_MAX
from protocol.small_files import read_small_file
from protocol.transport.keys import read_limit

KEY_CHARS_MIN: Final = 16
KEYS_MAX: Final = 1_024
#: Permission bits of a file that others than its owner and group can use.
OTHERS: Final = 0o007
FIELD: Final = "http.api_keys_file"
#: How the right behind a key begins.
RIGHT: Final = "priority"
#: Of an owner's name.
OWNER_CHARS: Final = 12


class ApiKey(NamedTuple):
    secret: str
    priority_max: int = KEY_PRIORITY_DEFAULT


class KeyOwner(NamedTuple):
    """The name of a key's owner, and the highest priority that the key may ask for."""

    name: str
    priority_max: int


#: All clients together, where there are no keys.
NO_OWNER: Final = KeyOwner("", PRIORITY_MAX)


class ApiKeys:
    """Without any key configured, every client that reaches the port may ask."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._owners = {_digest(key.secret): KeyOwner(owner_of(key.secret), key.priority_max) for key in keys}

    def replace(self, other: ApiKeys) -> str:
        """Go by these from now on; says how many they are."""
        self._owners = other._owners
        return f"{len(self._owners)} keys"

    def check(self, authorization: str) -> KeyOwner:
        """The key's owner. `authorization` is the value of that header, empty when there is none. Raises
        Unauthorized."""
        if not self._owners:
            return NO_OWNER
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
    """A small file that others may not read. Raises ConfigError."""
    data, mode = read_small_file(path, field)
    if mode & OTHERS:
        raise ConfigError("others may read it", field=field, value=path, remedy=f"chmod 600 {path}")
    return data


def parse_keys(text: str, path: str) -> list[ApiKey]:
    """Raises ConfigError, which never shows a key. Of a key that is named twice, the last line holds."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    keys = [_parse_key(line, path) for line in lines]
    if not 0 < len(keys) <= KEYS_MAX:
        raise ConfigError(f"{len(keys)} keys, not 1 to {KEYS_MAX}", field=FIELD, value=path, remedy="one key a line")
    short = sum(len(key.secret) < KEY_CHARS_MIN or not key.secret.isascii() or " " in key.secret for key in keys)
    if short:
        raise ConfigError(
            f"{short} of {len(keys)} keys are shorter than {KEY_CHARS_MIN} characters, or have blanks in them",
            field=FIELD,
            value=path,
            remedy="make keys with: openssl rand -hex 32",
        )
    return keys


def _parse_key(line: str, path: str) -> ApiKey:
    """What begins like a right is one; any other second word makes the line a key with blanks in it."""
    secret, _, right = line.partition(" ")
    if not right.lstrip().startswith(RIGHT):
        return ApiKey(line)
    return ApiKey(secret, read_limit(right.lstrip(), f"{FIELD} {path}"))


def owner_of(key: str) -> str:
    """What a key is called where it must not be shown: in request ids and in shares. The same in every front."""
    return _digest(f"owner of {key}").hex()[:OWNER_CHARS]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
