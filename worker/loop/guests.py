"""Passes of other ranks that this rank splits with them, and what the owner of such a pass tells the others.

When a split pass opens, its owner sends its parts and tokens to all ranks, in one message of a fixed size on `compute`.
The others read the parts on the host, behind `dealt`: what is launched next depends on them. They take slab pages for
all rows of all parts, which their wish has lent, until the last unit was launched. A page may be one whose rows are
being staged for a prompt of their own; so nothing is written before those are in host memory. Nothing is staged here,
and no host page is read or written: a prompt's pages are its owner's alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from kernels.state import DeviceState
from protocol.arrays import Int32Array
from protocol.units import pages_for
from worker.device.passes import PARTS_MAX, PassUnit
from worker.device.pinned import host_tensor
from worker.group.exchange import Collectives
from worker.loop.inputs import RING_BUFFERS, Ring
from worker.loop.seats import Seats
from worker.loop.swap import Swap
from worker.runners.base import GroupRunner, PromptPart, PromptPass
from worker.streams import Streams

#: Numbers that tell of a part: start, stop, and 1 where it ends its prompt. Ahead of them their count.
PART_NUMBERS: Final = 3
HEAD_NUMBERS: Final = 1 + PART_NUMBERS * PARTS_MAX


class Guests:
    """The split passes of a rank's group, one at a time. Used by the decode loop's thread."""

    def __init__(
        self,
        runner: GroupRunner,
        streams: Streams,
        state: DeviceState,
        seats: Seats,
        swap: Swap,
        collectives: Collectives,
        pass_tokens: int,
    ) -> None:
        self._runner, self._streams, self._seats, self._swap = runner, streams, seats, swap
        self._collectives = collectives
        self._state, device = state.guest(PARTS_MAX), state.rows.device
        width = HEAD_NUMBERS + pass_tokens
        self._ring = Ring([host_tensor(width, dtype=torch.int64, device=device) for _ in range(RING_BUFFERS)])
        self._message = torch.zeros(width, dtype=torch.int64, device=device)
        self._heard = host_tensor(HEAD_NUMBERS, dtype=torch.int64, device=device)

    @property
    def rank(self) -> int:
        return self._collectives.rank

    @property
    def ranks(self) -> int:
        return self._collectives.size

    def tell(self, parts: Sequence[PromptPart], tokens: Sequence[Int32Array]) -> None:
        """Tell the other ranks of the parts of this rank's pass, and of the `tokens` of each. It may have none after
        all."""
        buffer = self._ring.next()
        numbers = [number for part in parts for number in (part.start, part.stop, part.ends)]
        buffer.numpy()[: 1 + len(numbers)] = [len(parts), *numbers]
        for part, ids in zip(parts, tokens, strict=True):
            buffer.numpy()[HEAD_NUMBERS + part.first : HEAD_NUMBERS + part.end] = ids
        self._streams.compute.launch("tell of a pass", partial(self._tell, buffer))
        self._ring.launched(self._streams.compute.record("inputs_consumed"))

    def begin(self, owner: int) -> PromptPass | None:
        """Begin the pass of which rank `owner` tells; None: it has no part. Waits for that rank."""
        compute = self._streams.compute
        compute.launch("hear of a pass", partial(self._hear, owner))
        compute.record("dealt").wait()
        parts = _parts_of(self._heard.tolist())
        if not parts:
            return None
        pages = self._seats.lend_slab([pages_for(part.stop) for part in parts])
        compute.wait(self._swap.slab_staged())
        compute.launch("place guests", partial(self._place, self._places(pages)))
        return self._runner.begin_pass(self._streams, self._state, parts, self._tokens(parts))

    def launch(self, prompts: PromptPass, unit: PassUnit, owner: int) -> None:
        """Launch this rank's stripe of a unit of the pass that has begun."""
        self._runner.launch_split(self._streams, self._state, prompts, unit, owner)

    def pad(self, unit: PassUnit) -> None:
        """Launch a unit in which no rank has a row."""
        self._runner.launch_padding(self._streams, unit.layer, unit.rows)

    def end(self) -> None:
        """The last unit was launched."""
        self._seats.end_loan()

    def _tokens(self, parts: Sequence[PromptPart]) -> Tensor:
        return self._message[HEAD_NUMBERS : HEAD_NUMBERS + parts[-1].end]

    def _places(self, pages: Sequence[Sequence[int]]) -> Tensor:
        """int64[3, n], on the host: part, place and page of each entry of the guests' tables."""
        entries = [(part, place, page) for part, held in enumerate(pages) for place, page in enumerate(held)]
        places = host_tensor(3, len(entries), dtype=torch.int64, device=self._state.rows.device)
        places.numpy()[:] = list(zip(*entries, strict=True))
        return places

    # ---------------------------------------------------------------- operations

    def _tell(self, buffer: Tensor) -> None:
        self._message.copy_(buffer, non_blocking=True)
        self._collectives.broadcast(self._message, self.rank)

    def _hear(self, owner: int) -> None:
        self._collectives.broadcast(self._message, owner)
        self._heard.copy_(self._message[:HEAD_NUMBERS], non_blocking=True)

    def _place(self, places: Tensor) -> None:
        parts, entries, pages = places.to(self._state.rows.device, non_blocking=True).unbind()
        self._state.slab_table[parts, entries] = pages.int()


def _parts_of(numbers: Sequence[int]) -> list[PromptPart]:
    """The parts that the head of a message tells of, each with its number for a seat."""
    parts, first = list[PromptPart](), 0
    for number in range(numbers[0]):
        at = 1 + PART_NUMBERS * number
        start, stop, ends = numbers[at : at + PART_NUMBERS]
        parts.append(PromptPart(number, start, stop, first, bool(ends)))
        first = parts[-1].end
    return parts
