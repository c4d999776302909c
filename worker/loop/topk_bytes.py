"""One top-k of all index groups as bytes: what warm starts and traces of selections hold. Pure.

    bytes     counts of G groups, then each group's positions, ascending, as distances from the one before (from -1),
              all as varints, lowest septet first. Of 2048 of 32k tokens each takes one byte, as int32 four

Rejected: a bit per token of the context (at 128k four times as long), a general compressor (slow, in the decode
loop's thread).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from protocol.arrays import Int32Array
from protocol.errors import BadInput
from protocol.units import CONTEXT_MAX_TOKENS, TOPK_MAX

#: Of the septets of a varint.
SHIFTS: Final = (0, 7, 14)

assert max(TOPK_MAX, CONTEXT_MAX_TOKENS) < 1 << SHIFTS[-1] + 7  # counts and distances fit


def pack(topk: Int32Array) -> bytes:
    """`topk` int32[G, k], in any order, distinct within a group, -1 padded."""
    ordered = np.sort(topk, axis=1)
    distances = np.diff(ordered, axis=1, prepend=np.int32(-1))
    return _encode(np.concatenate([(distances > 0).sum(1, dtype=np.int32), distances[distances > 0]]))


def unpack(packed: bytes, groups: int, topk: int, length: int) -> list[Int32Array]:
    """Positions below `length` by group, ascending. BadInput unless `packed` is what `pack` makes for such sizes."""
    numbers = _decode(packed)
    counts, distances = numbers[:groups], numbers[groups:]
    if len(counts) < groups or counts.max() > topk or counts.sum() != len(distances):
        raise _unreadable(f"not {groups} groups of {topk} positions at most")
    parts = np.split(distances, np.cumsum(counts)[:-1])
    if not distances.all():
        raise _unreadable("a position comes twice")
    positions = (np.cumsum(part) - 1 for part in parts)
    return [part[part < length].astype(np.int32) for part in positions]


def _encode(numbers: Int32Array) -> bytes:
    """Varints of `numbers`, each at least 0 and below 1 << 21."""
    more = [numbers >= 1 << shift for shift in SHIFTS[1:]]
    encoded = np.stack([numbers >> shift & 0x7F for shift in SHIFTS], axis=1).astype(np.uint8)
    encoded[:, :-1] |= np.stack(more, axis=1).view(np.uint8) << 7
    return encoded[np.stack([np.ones_like(more[0]), *more], axis=1)].tobytes()


def _decode(encoded: bytes) -> Int32Array:
    """Raises BadInput."""
    data = np.frombuffer(encoded, dtype=np.uint8)
    ends = np.flatnonzero(data < 0x80)
    sizes = np.diff(ends, prepend=-1)
    if not len(data) or data[-1] >= 0x80 or sizes.max() > len(SHIFTS):
        raise _unreadable("no varints")
    numbers = np.zeros(len(ends), dtype=np.int32)
    for at, shift in enumerate(SHIFTS):
        has = sizes > at
        numbers[has] |= (data[ends[has] - sizes[has] + 1 + at] & 0x7F).astype(np.int32) << shift
    return numbers


def _unreadable(why: str) -> BadInput:
    return BadInput(f"cannot be read: {why}", field="warm_start", value="", remedy="run workers of one release")
