"""The trace of selections: what each step of each request selected, in a file. Pure.

    file      MAGIC, then little-endian uint16 index groups, uint16 top-k, and records until the end
    record    little-endian uint64 step, uint32 request, uint32 length, uint32 size, and `size` bytes of its top-k
              (worker/loop/topk_bytes.py)

`step` counts the decode steps of one worker from 0. Steps that a full queue left out are missing, so that a request
whose steps do not follow one another has gaps. `request` is the number of its placement. `length` is the context's,
the new token included. A record that the end of the file cuts off is left out: its worker was killed.

Rejected: additions and removals against the step before (a tenth of the bytes at an overlap of 0.9, but a record that
was left out would spoil all that follow, and the file is written beside steps, not within them).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct
from typing import BinaryIO, Final

from protocol.arrays import Int32Array
from protocol.errors import BadInput
from worker.loop.topk_bytes import pack, unpack

MAGIC: Final = b"hisparse selections 1\n"
_SIZES: Final = Struct("<HH")
_RECORD: Final = Struct("<QIII")
#: Bytes of one top-k at most: varints of three bytes.
_PACKED_BYTES_MAX: Final = 64 << 20
_REMEDY: Final = "give a file that worker.record_selections of this release wrote"


@dataclass(frozen=True)
class TraceSizes:
    groups: int
    topk: int


@dataclass(frozen=True, eq=False)
class Selection:
    """One step of one request; `positions` by index group: int32, ascending, distinct, below `length`."""

    step: int
    request: int
    length: int
    positions: list[Int32Array]


def encode_head(sizes: TraceSizes) -> bytes:
    return MAGIC + _SIZES.pack(sizes.groups, sizes.topk)


def encode(step: int, request: int, length: int, topk: Int32Array) -> bytes:
    """One record; `topk` int32[G, k] in any order, distinct within a group, -1 padded."""
    packed = pack(topk)
    return _RECORD.pack(step, request, length, len(packed)) + packed


def read_head(file: BinaryIO) -> TraceSizes:
    """Raises BadInput unless a trace begins here."""
    head = file.read(len(MAGIC) + _SIZES.size)
    if len(head) < len(MAGIC) + _SIZES.size or not head.startswith(MAGIC):
        raise BadInput("is no trace of selections", field="trace", value=head[: len(MAGIC)], remedy=_REMEDY)
    sizes = TraceSizes(*_SIZES.unpack(head[len(MAGIC) :]))
    if not sizes.groups or not sizes.topk:
        raise BadInput("has no index groups or no top-k", field="trace", value=sizes, remedy=_REMEDY)
    return sizes


def read_records(file: BinaryIO, sizes: TraceSizes) -> Iterator[Selection]:
    """The records behind the head, in the order of the file. Raises BadInput for one that cannot be read."""
    number = 0
    while len(head := file.read(_RECORD.size)) == _RECORD.size:
        step, request, length, size = _RECORD.unpack(head)
        if size > _PACKED_BYTES_MAX:
            raise BadInput(f"record {number} claims too many bytes", field="trace", value=size, remedy=_REMEDY)
        packed = file.read(size)
        if len(packed) < size:
            return
        try:
            positions = unpack(packed, sizes.groups, sizes.topk, length)
        except BadInput as error:
            raise BadInput(f"record {number} {error.message}", field="trace", value=size, remedy=_REMEDY) from error
        yield Selection(step, request, length, positions)
        number += 1
