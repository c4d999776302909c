"""What a worker's inventory says of host pages: a digest of their ids for some, their number for the rest."""

from __future__ import annotations

import zlib
from typing import Final

from protocol.arrays import Int32Array

#: Host pages whose ids one inventory checks; of requests beyond it only the number.
PAGES_MAX: Final = 8_192
#: `Inventory.digests` of a request whose ids were not looked at.
UNCHECKED: Final = -1
#: Of a request that is leaving: what it was granted since, the ledger counts and the worker does not take any more.
LEAVING: Final = -2


def digest_of(pages: Int32Array) -> int:
    return zlib.crc32(pages.astype("<i4", copy=False).tobytes())
