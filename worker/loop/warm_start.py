"""The last top-k of a request: what its next worker loads before its first step there (a warm start).

Successive steps select mostly the same tokens, so what a prompt's last token selected, or a request's last step before
it was retracted, is what the next step will ask for. It is a hint: it travels with reports and commands, is kept in
memory alone, may be missing, and is trusted with nothing. What cannot be read is refused as a whole; positions outside
the context are left out, since a request may go on from fewer rows than its last step had.

worker/loop/topk_bytes.py has its bytes.

Rejected: slots and stamps instead of positions (the next buffer may be of another size).
"""

from __future__ import annotations

from collections import deque
from typing import Final

import torch
from torch import Tensor

from kernels.layout import Geometry
from protocol.messages import WARM_START_BYTES_MAX
from worker.device.pinned import host_tensor
from worker.loop.topk_bytes import pack

#: Requests whose last top-k is on its way to the host at the same time; beyond them one starts cold. 0.5 MB each.
BUFFERS: Final = 16


class TopkBuffers:
    """Places in host memory, int32[selections, k] each, that operations download to: taken, read once nothing writes
    there."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._memory = host_tensor(BUFFERS, geometry.selections, geometry.topk, dtype=torch.int32, device=device)
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
