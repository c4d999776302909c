"""begin_step on CUDA: the contract of kernels/begin_step.py, launched on the current stream as two kernels."""

from __future__ import annotations

from kernels.cuda import parameters, structures
from kernels.cuda.launch import kernel_of, stream_of
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
    )
    stream = stream_of(state)
    grid = (-(-rows // OPEN_THREADS), 1)
    kernel_of(state, "begin_step", "open_rows").launch(grid, block, stream, threads=OPEN_THREADS)
    grid = (rows, state.geometry.groups + 1)  # blocks of the last one write batch.opened
    kernel_of(state, "begin_step", "rotate_tail").launch(grid, block, stream, threads=structures.ROTATE_THREADS)
