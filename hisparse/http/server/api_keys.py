"""API keys: one a line in a file that only its owner may read; blank lines and lines that begin with # are skipped.

    KEY                          an owner of its own, without a name; asks for priority 0 at most (KEY_PRIORITY_DEFAULT)
    KEY priority=N               asks for priority N at most
    KEY name=NAME                belongs to the owner NAME, and so may other keys
    KEY priority=N name=NAME     both, in either order

An owner's requests take turns with those of other owners, share their ids and reuse each other's prefixes. One with a
name outlives its keys: give a new key the old one's name, and remove the old one when no client uses it any more.

Compared by digest, all of them every time, so that the time taken says nothing about any key. The file is read at
start, and again at a reload: a removed key is refused from then on; requests that it began are answered to their end.
"""

from __future__ import annotations

import hashlib
import hmac
import re
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
#: How the words behind a key begin.
PRIORITY: Final = "priority"
NAME: Final = "name"
#: Hexadecimal digits that stand for an owner in request ids, and for one without a name everywhere.
OWNER_CHARS: Final = 12
OWNER_NAME_CHARS_MAX: Final = 64
_OWNER_NAME: Final = re.compile(rf"[A-Za-z0-9._@-]{{1,{OWNER_NAME_CHARS_MAX}}}")
_DIGITS: Final = re.compile(rf"[0-9a-f]{{{OWNER_CHARS}}}")


class ApiKey(NamedTuple):
    """`owner` "": the key is the only one of its owner."""

    secret: str
    priority_max: int = KEY_PRIORITY_DEFAULT
    owner: str = ""


class KeyOwner(NamedTuple):
    """The owner of a key, and the highest priority that the key may ask for."""

    name: str
    priority_max: int

    @property
    def scope(self) -> str:
        """What stands for the owner in request ids: OWNER_CHARS digits, the same for all keys of one name."""
        return self.name if not self.name or _DIGITS.fullmatch(self.name) else owner_of(self.name)


#: All clients together, where there are no keys.
NO_OWNER: Final = KeyOwner("", PRIORITY_MAX)


class ApiKeys:
    """Without any key configured, every client that reaches the port may ask."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._owners = {
            _digest(key.secret): KeyOwner(key.owner or owner_of(key.secret), key.priority_max) for key in keys
        }

    @property
    def is_open(self) -> bool:
        """Whether there are no keys: all clients are one owner."""
        return not self._owners

    def replace(self, other: ApiKeys) -> str:
        """Go by these from now on; says how many they are."""
        self._owners = other._owners
        return f"{len(self._owners)} keys"

    def describe(self) -> str:
        owners = len({it.name for it in self._owners.values()})
        return f"{len(self._owners)} keys of {owners} owners"

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
    """A second word that begins like a right or a name is one; any other makes the line a key with blanks in it."""
    secret, *words = line.split()
    if not words or not words[0].startswith((PRIORITY, NAME)):
        return ApiKey(line)
    rights = {word.partition("=")[0]: word for word in words}
    if len(rights) < len(words):
        remedy = f"write {PRIORITY}=N and {NAME}=NAME once each behind a key"
        raise ConfigError("said twice of one key", field=FIELD, value=path, remedy=remedy)
    limit, name = rights.pop(PRIORITY, ""), rights.pop(NAME, "")
    for unknown in rights.values():
        read_limit(unknown, f"{FIELD} {path}")  # raises
    priority_max = read_limit(limit, f"{FIELD} {path}") if limit else KEY_PRIORITY_DEFAULT
    return ApiKey(secret, priority_max, _read_name(name, path) if name else "")


def _read_name(word: str, path: str) -> str:
    """The NAME of `name=NAME`. One that looks like the digits of an owner without a name could be taken for it."""
    name = word.removeprefix(f"{NAME}=")
    if word == name or not _OWNER_NAME.fullmatch(name) or _DIGITS.fullmatch(name):
        raise ConfigError(
            "no name of an owner",
            field=f"{FIELD} {path}",
            value=word[:OWNER_NAME_CHARS_MAX],
            remedy=f"write {NAME}=NAME, NAME being 1 to {OWNER_NAME_CHARS_MAX} letters, digits or . _ @ -, "
            f"and not {OWNER_CHARS} hexadecimal digits",
        )
    return name


def owner_of(key_or_name: str) -> str:
    """Digits that stand for the owner of a key, or for an owner's name: the same in every front. They do not show the
    key."""
    return _digest(f"owner of {key_or_name}").hex()[:OWNER_CHARS]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
