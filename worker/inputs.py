"""What the host hands to operations: buffers at fixed addresses, reused in turn, never before they were read.

The host fills a buffer and launches the operation that reads it; the operation runs later. `Ring` gives out buffers in
turn and waits for `inputs_consumed` of a buffer's last use before it gives it out again. On a device the buffers are
pinned memory and the operations that read them start with an upload.

Seat tables are edited the same way: changes are gathered on the host and applied by one operation per flush, before
whatever is launched next on `compute`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coordinator.errors import InternalError
from kernels.state import DeviceState, StepBatch
from worker.streams import Fence, Stream

#: Buffers per ring of step inputs and prompt chunks: one is read while the next is filled.
RING_BUFFERS: Final = 2
#: Buffers of table edits: a step boundary with some admissions and resizes does not wait for the step before it.
EDIT_BUFFERS: Final = 8
TABLES: Final = ("index_table", "host_table", "chunk_table", "slab_table")

B = TypeVar("B")
Ids = npt.NDArray[np.int32]


class Ring(Generic[B]):
    """Buffers in turn. Each `next` is followed by one `launched` with the fence recorded after its reader."""

    def __init__(self, buffers: Sequence[B]) -> None:
        self._buffers = list(buffers)
        self._consumed: list[Fence | None] = [None] * len(self._buffers)
        self._place = -1

    def next(self) -> B:
        """The buffer used longest ago, once its reader has run. Blocks the host until then."""
        self._place = (self._place + 1) % len(self._buffers)
        fence = self._consumed[self._place]
        if fence is not None:
            fence.wait()
        return self._buffers[self._place]

    def launched(self, consumed: Fence) -> None:
        self._consumed[self._place] = consumed


class StepInputs:
    """Seats, lengths and inputs of one step of `rows` rows: int32[3, rows], and the number of real rows: int32[1]."""

    def __init__(self, rows: int) -> None:
        self.tensor = torch.zeros(3, rows, dtype=torch.int32)
        self.count = torch.zeros(1, dtype=torch.int32)
        self._array: Ids = self.tensor.numpy()

    def fill(self, seats: list[int], lengths: list[int], inputs: list[int]) -> None:
        real = len(seats)
        self._array[:, :real] = (seats, lengths, inputs)
        self._array[0::2, real:] = -1
        self._array[1, real:] = 0
        self.count[0] = real

    def upload(self, batch: StepBatch) -> None:
        """Operation: into the step's fixed addresses."""
        for place, target in enumerate((batch.seats, batch.lengths, batch.inputs)):
            target.copy_(self.tensor[place])
        batch.num_real.copy_(self.count)


class _Edits:
    """Entries of the seat tables to be written: flat places and values, table after table."""

    def __init__(self, entries: int) -> None:
        self.places = torch.zeros(entries, dtype=torch.int64)
        self.values = torch.zeros(entries, dtype=torch.int32)

    def apply(self, state: DeviceState, bounds: tuple[tuple[str, int, int], ...]) -> None:
        """Operation: write entries start..stop-1 into their table."""
        for table, start, stop in bounds:
            target: Tensor = getattr(state, table)
            target.view(-1)[self.places[start:stop]] = self.values[start:stop]


class SeatTables:
    """Edits of the seat tables, applied on `compute` in the order in which they were made."""

    def __init__(self, compute: Stream, state: DeviceState) -> None:
        self._compute = compute
        self._state = state
        self._widths = {table: int(getattr(state, table).shape[1]) for table in TABLES}
        self._entries = sum(self._widths.values())
        self._ring = Ring([_Edits(self._entries) for _ in range(EDIT_BUFFERS)])
        self._pending: dict[str, list[tuple[int, Ids]]] = {table: [] for table in TABLES}
        self._size = 0

    def set(self, table: str, seat: int, start: int, values: Sequence[int]) -> None:
        """Entries start.. of `seat` become `values` at the next flush; a full buffer flushes first.

        InternalError when they do not fit the table.
        """
        if start + len(values) > self._widths[table]:
            raise InternalError(
                f"{len(values)} entries from {start} on", field=table, value=f"width {self._widths[table]}"
            )
        if self._size + len(values) > self._entries:
            self.flush()
        self._pending[table].append((seat * self._widths[table] + start, np.asarray(values, dtype=np.int32)))
        self._size += len(values)

    def flush(self) -> None:
        """Launch what was set since the last flush; nothing when there is none."""
        if not self._size:
            return
        edits = self._ring.next()
        bounds = tuple(self._fill(edits))
        self._compute.launch("edit tables", partial(edits.apply, self._state, bounds))
        self._ring.launched(self._compute.record("inputs_consumed"))
        self._size = 0

    def _fill(self, edits: _Edits) -> list[tuple[str, int, int]]:
        places, values = edits.places.numpy(), edits.values.numpy()
        bounds, stop = [], 0
        for table, pending in self._pending.items():
            start = stop
            for place, ids in pending:
                places[stop : stop + len(ids)] = np.arange(place, place + len(ids))
                values[stop : stop + len(ids)] = ids
                stop += len(ids)
            if stop > start:
                bounds.append((table, start, stop))
            pending.clear()
        return bounds
