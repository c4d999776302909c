"""Open a decode step: give each request's new token its device row, and plan its backup.

Tail rule. The T newest tokens written by decoding lie in tail slots and are never evicted: their backup may still be in
flight (I3). The token at position p takes ring place r = p % T:

    place unset    it takes slot H+r, which is empty
    place set      the slot there retires: it becomes an ordinary slot, used last in the step before, and keeps its
                   token; the LRU victim among the other ordinary slots becomes the tail slot of place r, and its token
                   becomes absent

Nothing is copied, and the newest rows stay hot. The caller has waited for `backed_up` of step n - T // R, so the row
that retires is in host memory before it can be evicted. The slot that has just retired is not a candidate: it holds a
token that the model most probably reads again.

Where a state's seats bring R > 1 rows (docs/architecture.md: "Speculative decoding: kernels"), a seat's rows are placed
one after the other. A slot of the seat that holds position p already, since p was written and rejected, becomes (or
stays) the tail slot of place r as it is; a slot at place r that holds another token retires, and nothing is evicted.
If place r was unset, slot H+r is an ordinary one from then on, and the seat's eviction queue begins anew.

Where slots hold a page, the tail holds the T newest pages. A token takes a slot when it begins a page; else its page
lies in a slot already, in every selection (a page that was not loaded is refused: Tripwire.UNGRANTED). The page at
place r retires when its successor of T pages later begins, at least (T - 1) * 64 positions behind its last token.

A row retires once it cannot be rejected any more, and its last write is backed up. A step begins at most R positions
behind the one before. So position p - T, which the last row of a step retires, lies more than j R positions before the
step's first one, T = (j + 1) R: none of the j steps before wrote it. With T >= 2 R there is one such step at least.
"""

from __future__ import annotations

import torch

from kernels.backend import backend
from kernels.check import Sizes
from kernels.layout import OPENED_WORDS
from kernels.state import BackupPlan, DeviceState, StepBatch
from protocol.errors import BadInput


def begin_step(state: DeviceState, batch: StepBatch, plan: BackupPlan) -> None:
    """Advance `now`, place the new token (position lengths-1) of each real row in every group, fill the outputs.

    Reads `batch.seats`, `lengths`, `num_real`. Writes every entry of `batch.new_rows`, `batch.new_index_rows` and of
    `plan`: -1 for padding, and for rows that trip Tripwire.SEAT or Tripwire.UNGRANTED; a seat none of whose rows is
    placed stays as it was. On CUDA it also leaves the seats' tables by row in `batch.opened`: until the step ends they
    must not change.

    Where state.seat_rows is above 1 it first fills `seats` and `lengths` at depths from 1 on. Row j of a seat has the
    length of row 0 and j, and is no row (length 0) if its position is not below `state.granted_rows`. Padding is
    no row either, nor is any row of a seat that trips Tripwire.SEAT, which counts once. `batch.rejected` is 0 for rows
    that were placed, 1 elsewhere. Raises BadInput before any change.
    """
    check_begin_step(state, batch, plan)
    backend(state, __name__).begin_step(state, batch, plan)


def check_begin_step(state: DeviceState, batch: StepBatch, plan: BackupPlan) -> None:
    """Raises BadInput unless every tensor of a begin_step fits the others."""
    if batch.seat_rows > state.seat_rows:
        remedy = f"at most {state.seat_rows}, or allocate the state with more seat_rows"
        raise BadInput("more than the state's", field="batch.seat_rows", value=batch.seat_rows, remedy=remedy)
    sizes = Sizes(places=state.geometry.places)
    sizes.check("batch.seats", batch.seats, ("batch",), torch.int32, torch.int64)
    sizes.check("batch.lengths", batch.lengths, ("batch",), torch.int32, torch.int64)
    sizes.check("batch.num_real", batch.num_real, (1,), torch.int32)
    sizes.check("batch.new_rows", batch.new_rows, ("places", "batch"), torch.int32)
    sizes.check("batch.new_index_rows", batch.new_index_rows, ("batch",), torch.int32)
    sizes.check("batch.opened", batch.opened, ("batch", OPENED_WORDS), torch.int32)
    sizes.check("batch.rejected", batch.rejected, ("batch",), torch.int32)
    sizes.check("plan.device_row", plan.device_row, ("places", "batch"), torch.int32)
    for name in ("index_row", "host_page", "host_offset"):
        sizes.check(f"plan.{name}", getattr(plan, name), ("batch",), torch.int32)
