"""Digests of host page ids in a worker's inventory."""

from __future__ import annotations

import zlib
from typing import Final

from protocol.arrays import Int32Array

#: Most host pages that one inventory digests. Requests beyond it report only their number of pages.
PAGES_MAX: Final = 8_192
#: `Inventory.digests` of a request whose page ids were not digested.
UNCHECKED: Final = -1
#: Digest of a leaving request. The ledger counts its later grants; the worker ignores them.
LEAVING: Final = -2


def digest_of(pages: Int32Array) -> int:
    """CRC-32 of the page ids as little-endian int32."""
    return zlib.crc32(pages.astype("<i4", copy=False).tobytes())
