"""Two protocol versions: this one, and one before it that lacks more fields than the version that is served lacks."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import pytest

from protocol import skew
from protocol.messages import PROTOCOL_VERSION, Admit, Commands, Ended, RequestDetail, RequestRow, RequestRows

BEFORE: Final = PROTOCOL_VERSION - 1
#: How many of the last fields are taken to be newer than BEFORE.
NEWER_FIELDS: Final = MappingProxyType({Ended: 2, RequestRow: 2, Admit: 2})
CHANGED: Final = frozenset({Ended, RequestRows, RequestDetail, Commands})


def serve_version_before(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(skew, "PROTOCOL_VERSION_MIN", BEFORE)
    patched.setattr(skew, "NEWER_FIELDS", NEWER_FIELDS)
    patched.setattr(skew, "CHANGED", CHANGED)
