"""Open a decode step: give each request's new token its device row, and plan its backup.

Tail rule. The T newest tokens written by decoding lie in tail slots and are never evicted: their backup may still be in
flight (I3). The token at position p takes ring place r = p % T:

    place unset    it takes slot H+r, which is empty
    place set      the slot there retires: it becomes an ordinary slot, used last in the step before, and keeps its
                   token; the LRU victim among the other ordinary slots becomes the tail slot of place r, and its token
                   becomes absent

Nothing is copied, and the newest rows stay hot. The caller has waited for `backed_up` of step n-T, so the row that
retires is in host memory before it can be evicted. The slot that has just retired is not a candidate: it holds a
token that the model most probably reads again.
"""

from __future__ import annotations

import torch

from kernels.backend import backend
from kernels.check import Sizes
from kernels.layout import OPENED_WORDS
from kernels.state import BackupPlan, DeviceState, StepBatch


def begin_step(state: DeviceState, batch: StepBatch, plan: BackupPlan) -> None:
    """Advance `now`, place the new token (position lengths-1) of each real row in every group, fill the outputs.

    Reads `batch.seats`, `lengths`, `num_real`. Writes every entry of `batch.new_rows`, `batch.new_index_rows` and of
    `plan`: -1 for padding, and for rows that trip Tripwire.SEAT or Tripwire.UNGRANTED, whose seats stay as they were.
    On CUDA it also leaves the seats' tables by row in `batch.opened`: until the step ends they must not change.
    Raises BadInput before any change.
    """
    check_begin_step(state, batch, plan)
    backend(state, __name__).begin_step(state, batch, plan)


def check_begin_step(state: DeviceState, batch: StepBatch, plan: BackupPlan) -> None:
    """Raises BadInput unless every tensor of a begin_step fits the others."""
    sizes = Sizes(groups=state.geometry.groups)
    sizes.check("batch.seats", batch.seats, ("batch",), torch.int32, torch.int64)
    sizes.check("batch.lengths", batch.lengths, ("batch",), torch.int32, torch.int64)
    sizes.check("batch.num_real", batch.num_real, (1,), torch.int32)
    sizes.check("batch.new_rows", batch.new_rows, ("groups", "batch"), torch.int32)
    sizes.check("batch.new_index_rows", batch.new_index_rows, ("batch",), torch.int32)
    sizes.check("batch.opened", batch.opened, ("batch", OPENED_WORDS), torch.int32)
    sizes.check("plan.device_row", plan.device_row, ("groups", "batch"), torch.int32)
    for name in ("index_row", "host_page", "host_offset"):
        sizes.check(f"plan.{name}", getattr(plan, name), ("batch",), torch.int32)
