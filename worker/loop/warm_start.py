"""The last top-k of a request: what its next worker loads before its first step there (a warm start).

Successive steps select mostly the same tokens, so what a prompt's last token selected, or a request's last step before
it was retracted, is what the next step will ask for. It is a hint: it travels with reports and commands, is kept in
memory alone, may be missing, and is trusted with nothing. What cannot be read is refused as a whole; positions outside
the context are left out, since a request may go on from fewer rows than its last step had.

    bytes     counts of G groups, then each group's positions, ascending, as distances from the one before (from -1),
              all as varints, lowest septet first. Of 2048 of 32k tokens each takes one byte, as int32 four

Rejected: a bit per token of the context (at 128k four times as long), a general compressor (slow, in the decode
loop's thread), slots and stamps instead of positions (the next buffer may be of another size).
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.layout import Geometry
from protocol.arrays import Int32Array
from protocol.errors import BadInput
from protocol.messages import WARM_START_BYTES_MAX
from protocol.units import CONTEXT_MAX_TOKENS, TOPK_MAX
from worker.loop.inputs import host_tensor

#: Requests whose last top-k is on its way to the host at the same time; beyond them one starts cold. 0.5 MB each.
BUFFERS: Final = 16
#: Of the septets of a varint.
SHIFTS: Final = (0, 7, 14)

assert max(TOPK_MAX, CONTEXT_MAX_TOKENS) < 1 << SHIFTS[-1] + 7  # counts and distances fit


class TopkBuffers:
    """Places in host memory, int32[G, k] each, that operations download to: taken, read once nothing writes there."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._memory = host_tensor(BUFFERS, geometry.groups, geometry.topk, dtype=torch.int32, device=device)
        self._free = deque(range(BUFFERS))

    def take(self) -> int | None:
        """A place; None when all are in use."""
        return self._free.popleft() if self._free else None

    def __getitem__(self, place: int) -> Tensor:
        return self._memory[place]

    def read(self, place: int) -> bytes:
        """What was downloaded to `place`, packed, which is free then; nothing if that is too long to be sent."""
        packed = pack(self._memory[place].numpy())
        self._free.append(place)
        return packed if len(packed) <= WARM_START_BYTES_MAX else b""


def pack(topk: Int32Array) -> bytes:
    """`topk` int32[G, k], in any order, distinct within a group, -1 padded."""
    ordered = np.sort(topk, axis=1)
    distances = np.diff(ordered, axis=1, prepend=np.int32(-1))
    return _encode(np.concatenate([(distances > 0).sum(1, dtype=np.int32), distances[distances > 0]]))


def unpack(packed: bytes, geometry: Geometry, length: int) -> list[Int32Array]:
    """Positions below `length` by group, ascending. BadInput unless `packed` is what `pack` makes for `geometry`."""
    numbers = _decode(packed)
    counts, distances = numbers[: geometry.groups], numbers[geometry.groups :]
    if len(counts) < geometry.groups or counts.max() > geometry.topk or counts.sum() != len(distances):
        raise _unreadable(f"not {geometry.groups} groups of {geometry.topk} positions at most")
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
