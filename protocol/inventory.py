"""The memory of a worker as rows of one struct, in its hello and in answers to audits. Pure.

    hello    as of the commands applied and the reports acknowledged (worker/link/outbox.py). Reports that were not
             acknowledged are sent again after the welcome
    audit    as of the step boundary where the Audit was applied (worker/loop/executor.py). Page ids are compared by a
             digest, for at most PAGES_MAX pages an audit

Rows travel as one array of packed records, 61 bytes each: little-endian, in the order of the fields.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Final

import numpy as np

from protocol.arrays import Int32Array
from protocol.errors import ProtocolError

#: Most host pages that one audit digests. Requests beyond it report only their number of pages.
PAGES_MAX: Final = 8_192
#: `digest` of page ids that were not digested.
UNCHECKED: Final = -1
#: `resize_slots` when no Resize is under way.
NO_RESIZE: Final = -2


@dataclass(slots=True)
class InventoryRow:
    """One placement on a worker: its granted memory, its use, its progress.

    A hello leaves out the fields that only an audit has (`digest` to `is_leaving`); an audit leaves out progress
    (`request_index` to `is_released`).
    """

    placement: int
    host_pages: int = 0  # how many
    hot_chunks: int = 0  # granted
    # audit
    digest: int = UNCHECKED  # of the ids of its host pages
    index_pages: int = 0
    chunks: int = 0  # in use
    is_leaving: bool = False  # the worker ignores further grants
    # hello
    request_index: int = -1
    generated_tokens: int = 0
    durable_tokens: int = 0
    hot_slots: int = 0
    resize_slots: int = NO_RESIZE  # of the Resize under way
    resize_chunks: int = 0
    is_staged: bool = False
    is_started: bool = False
    is_parked: bool = False
    is_released: bool = False  # and its Released was not acknowledged

    @property
    def resizing(self) -> tuple[int, int] | None:
        """Hot slots and chunks of the Resize under way."""
        return None if self.resize_slots == NO_RESIZE else (self.resize_slots, self.resize_chunks)


def _wire_type(name: str, kind: object) -> str:
    return "?" if kind == "bool" else "<i8" if name in ("placement", "digest") else "<i4"


_RECORD: Final = np.dtype([(it.name, _wire_type(it.name, it.type)) for it in fields(InventoryRow)])
_values = attrgetter(*(it.name for it in fields(InventoryRow)))

assert _RECORD.itemsize == 61


def pack_rows(rows: Iterable[InventoryRow]) -> bytes:
    return np.array(list(map(_values, rows)), dtype=_RECORD).tobytes()


def unpack_rows(data: bytes) -> list[InventoryRow]:
    """The inverse of `pack_rows`. Raises ProtocolError when `data` is not whole records."""
    if len(data) % _RECORD.itemsize:
        raise ProtocolError(
            f"does not divide into records of {_RECORD.itemsize} bytes",
            field="inventory",
            value=f"{len(data)} bytes",
            remedy="install the same hisparse everywhere",
        )
    return [InventoryRow(*record) for record in np.frombuffer(data, dtype=_RECORD).tolist()]


def digest_of(pages: Int32Array) -> int:
    """CRC-32 of the page ids as little-endian int32."""
    return zlib.crc32(pages.astype("<i4", copy=False).tobytes())
