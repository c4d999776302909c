"""What the host hands to operations: buffers at fixed addresses, reused in turn, never before they were read.

The host fills a buffer and launches the operation that reads it; the operation runs later. `Ring` gives out buffers in
turn and waits for `inputs_consumed` of a buffer's last use before it gives it out again. For a GPU the buffers are
pinned memory (worker/device/pinned.py), and the operations that read them start with an upload: copies from pinned
memory do not wait.

Seat tables are edited the same way: changes are gathered on the host and applied by one operation per flush, before
whatever is launched next on `compute`. An entry set twice between two flushes travels once: writes to equal places
would run in any order on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.state import DeviceState, StepBatch
from protocol.errors import InternalError
from worker.device.pinned import host_tensor
from worker.streams import Fence, Stream

if TYPE_CHECKING:
    from worker.loop.batch import RunningRequest

#: Buffers per ring of step inputs and prompt passes: one is read while the next is filled.
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
    """Seats, lengths and inputs of one step of `rows` rows, and the number of real rows: int32[3 * rows + 1], so that
    they travel in one copy."""

    def __init__(self, rows: int, device: torch.device | str = "cpu") -> None:
        self._host = host_tensor(3 * rows + 1, dtype=torch.int32, device=device)
        array: Ids = self._host.numpy()
        self._rows, self._count = array[:-1].reshape(3, rows), array[-1:]

    def fill(self, requests: Sequence[RunningRequest]) -> None:
        """The next step is one of `requests`."""
        real = len(requests)
        self._rows[0, :real] = [request.seat for request in requests]
        self._rows[1, :real] = [request.progress.position + 1 for request in requests]
        self._rows[2, :real] = [request.next_input() for request in requests]
        self._rows[0::2, real:] = -1
        self._rows[1, real:] = 0
        self._count[0] = real

    def upload(self, target: Tensor) -> None:
        """Operation: into the step's fixed addresses."""
        target.copy_(self._host, non_blocking=True)

    @staticmethod
    def batch(target: Tensor, places: int) -> StepBatch:
        """A batch whose inputs are the parts of `target`, int32[3 * rows + 1] on the device."""
        rows = len(target) // 3
        seats, lengths, inputs, num_real = target.split([rows, rows, rows, 1])
        batch = StepBatch.allocate(rows, places, target.device)
        return replace(batch, seats=seats, lengths=lengths, inputs=inputs, num_real=num_real)


class _Edits:
    """Entries of the seat tables to be written: flat places and values, table after table."""

    def __init__(self, entries: int, device: torch.device) -> None:
        self.places = host_tensor(entries, dtype=torch.int64, device=device)
        self.values = host_tensor(entries, dtype=torch.int32, device=device)

    def apply(self, state: DeviceState, bounds: tuple[tuple[str, int, int], ...]) -> None:
        """Operation: write entries start..stop-1 into their table."""
        for table, start, stop in bounds:
            target: Tensor = getattr(state, table).view(-1)
            places, values = self.places[start:stop], self.values[start:stop]
            target[places.to(target.device, non_blocking=True)] = values.to(target.device, non_blocking=True)


class SeatTables:
    """Edits of the seat tables, applied on `compute` in the order in which they were made."""

    def __init__(self, compute: Stream, state: DeviceState) -> None:
        self._compute = compute
        self._state = state
        self._widths = {table: int(getattr(state, table).shape[1]) for table in TABLES}
        self._entries = sum(self._widths.values())
        self._ring = Ring([_Edits(self._entries, state.rows.device) for _ in range(EDIT_BUFFERS)])
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
            if not pending:
                continue
            start = stop
            set_places = np.concatenate([np.arange(place, place + len(ids)) for place, ids in reversed(pending)])
            set_values = np.concatenate([ids for _, ids in reversed(pending)])
            distinct, latest = np.unique(set_places, return_index=True)
            stop += len(distinct)
            places[start:stop], values[start:stop] = distinct, set_values[latest]
            bounds.append((table, start, stop))
            pending.clear()
        return bounds
