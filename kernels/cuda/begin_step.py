"""begin_step on CUDA: the contract of kernels/begin_step.py, launched on the current stream as two kernels.

The second one is launched once for each depth, since victims at one depth depend on what the depth before retired: on
addresses that begin with the rows at that depth. Entries by group lie as far apart as those of the whole batch.
"""

from __future__ import annotations

import ctypes

from kernels.cuda import parameters, structures
from kernels.cuda.launch import begin_step_of, stream_of
from kernels.state import BackupPlan, DeviceState, StepBatch

OPEN_THREADS = 128


def begin_step(state: DeviceState, batch: StepBatch, plan: BackupPlan) -> None:
    """As kernels.begin_step.begin_step, unchecked; `state` has been through `prepare`."""
    rows = batch.seats.shape[0]
    block = structures.BeginStep(
        state=parameters.state_parameters(state),
        batch=parameters.batch_parameters(batch),
        new_rows=batch.new_rows.data_ptr(),
        new_index_rows=batch.new_index_rows.data_ptr(),
        opened=batch.opened.data_ptr(),
        device_row=plan.device_row.data_ptr(),
        index_row=plan.index_row.data_ptr(),
        host_page=plan.host_page.data_ptr(),
        host_offset=plan.host_offset.data_ptr(),
        granted_rows=state.granted_rows.data_ptr(),
        rejected=batch.rejected.data_ptr(),
        seat_rows=batch.seat_rows,
    )
    stream = stream_of(state)
    step_seats = rows // batch.seat_rows
    grid = (-(-step_seats // OPEN_THREADS), 1)
    begin_step_of(state, "open_rows").launch(grid, block, stream, threads=OPEN_THREADS)
    grid = (step_seats, state.geometry.groups + 1)  # blocks of the last one write batch.opened
    rotate_tail = begin_step_of(state, "rotate_tail")
    for depth in batch.depths():
        rotate_tail.launch(grid, _of_depth(block, batch, depth.start), stream, threads=structures.ROTATE_THREADS)


def _of_depth(block: structures.BeginStep, batch: StepBatch, first: int) -> structures.BeginStep:
    """`block` as rotate_tail takes it, for the depth that begins with row `first`."""
    if not first:
        return block
    block = structures.BeginStep.from_buffer_copy(block)
    block.batch.seats += first * batch.seats.element_size()
    block.batch.lengths += first * batch.lengths.element_size()
    block.new_rows += first * batch.new_rows.element_size()
    block.new_index_rows += first * batch.new_index_rows.element_size()
    block.device_row += first * batch.new_rows.element_size()
    block.opened += first * ctypes.sizeof(structures.OpenedRow)
    return block
