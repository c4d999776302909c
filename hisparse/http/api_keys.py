"""API keys: one a line in a file that only its owner may read; blank lines and lines that begin with # are skipped.

Compared by digest, all of them every time, so that the time taken says nothing about any key. The file is read at
start, and again at SIGHUP: whoever lost a key is refused from then on; what was being answered is answered to its end.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hisparse.http.errors import Unauthorized
from protocol.errors import ConfigError

KEY_CHARS_MIN: Final = 16
KEYS_MAX: Final = 1_024
#: Permission bits of a file that others than its owner and group can use.
OTHERS: Final = 0o007
FIELD: Final = "http.api_keys_file"


class ApiKeys:
    """None at all: whoever reaches the port may ask."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def replace(self, other: ApiKeys) -> None:
        """Go by these from now on."""
        self._digests = other._digests

    def check(self, authorization: str) -> None:
        """`authorization` is the value of that header, empty when there is none. Raises Unauthorized."""
        if not self._digests:
            return
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        known = sum([hmac.compare_digest(given, digest) for digest in self._digests])
        if scheme.lower() != "bearer" or not known:
            raise Unauthorized(
                "no API key, or not one of ours", field="authorization", remedy="send Authorization: Bearer KEY"
            )


def read_keys(path: str) -> ApiKeys:
    """The keys of the file at `path`; no keys for "". Raises ConfigError."""
    if not path:
        return ApiKeys(())
    file = Path(path)
    try:
        mode, text = file.stat().st_mode, file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        remedy = "name a file of keys that this user may read"
        raise ConfigError(f"cannot be read: {reason}", field=FIELD, value=path, remedy=remedy) from error
    if mode & OTHERS:
        raise ConfigError("others may read it", field=FIELD, value=path, remedy=f"chmod 600 {path}")
    return ApiKeys(parse_keys(text, path))


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


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
