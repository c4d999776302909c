"""swap_in: resolve a group's top-k to device rows, loading what is not hot.

Contract, the same for every backend:

  * top-k entries in any order, duplicates allowed, -1 padding anywhere. A position below -1 or not below the length
    gives -1 and counts Tripwire.POSITION; it never touches memory.
  * Every output entry is written in every case (I6): the device row of the token, or -1. Padded rows are all -1.
  * Resident seats read the chunk table alone. Managed seats look tokens up in `slot_of`; absent tokens are loaded from
    host memory into the slots of LRU victims (kernels.lru). Tail slots and slots used by this step are never victims.
    With H >= k there is a victim for every miss; without one the entry is -1 and counts Tripwire.VICTIMS.
  * Rows of a seat are resolved depth by depth, in order of position: what an earlier row of the step found or loaded is
    a hit and no victim. A row behind depth 0 whose distinct misses outnumber the slots that may be evicted
    loads nothing: its misses give -1, its hits count and stay, `batch.rejected` is 1, and no tripwire counts.
  * A duplicate gets the row of its first occurrence, and is loaded once. `misses` counts what is loaded, `hits` every
    other entry that gets a row: together, the entries that do.
  * `batch` and the seats' tables are as begin_step left them. A change in between has undefined effect: CUDA reads the
    copy in `batch.opened`. A batch without a begin_step gives -1 everywhere.
  * A host row is read only for a token that lies outside the tail, so its backup has completed (I3).
  * Where slots hold a page, "token" above is a unit: entries number pages of the context, and device rows chunks. Each
    head selects for itself, and the copies are of its planes.

Which missed token goes to which of the victim slots is not part of the contract: compare sets and bytes, not slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import backend
from kernels.check import Sizes, check_number
from kernels.layout import OPENED_WORDS
from kernels.state import DeviceState, MissPlan, StepBatch
from protocol.errors import BadInput
from protocol.units import TOPK_MAX


def swap_in(
    state: DeviceState,
    selection: int,
    topk: Tensor,
    batch: StepBatch,
    out_rows: Tensor,
    plan: MissPlan,
    *,
    beside: bool = False,
) -> None:
    """Device rows of `topk` int32[B, k] into `out_rows` int32[B, k]; the misses of the anchor layer are copied.

    `selection`: a group, or where rows have several heads group * heads + head.

    `beside`: other kernels run meanwhile, to which half of the device is left where the batch allows it.

    `plan` receives the copies for replay_misses. `batch` as begin_step left it. Changes slot_of,
    slot_token, stamp, eviction queue, hits, misses of `selection`, rows of its anchor layer, and `batch.rejected` of
    rows behind depth 0 that did not fit; nothing else. Raises BadInput before any change when a tensor does not fit.
    """
    check_swap_in(state, selection, topk, batch, out_rows, plan)
    backend(state, __name__).swap_in(state, selection, topk, batch, out_rows, plan, beside=beside)


def replay_misses(state: DeviceState, layer: int, plan: MissPlan, head: int = 0) -> None:
    """Make the copies of `plan` (host rows to device rows) for `layer`, any layer of the group that planned them, and
    the `head` that did. Raises BadInput for a head that there is none of."""
    check_number("head", head, state.geometry.heads)
    backend(state, __name__).replay_misses(state, layer, plan, head)


def check_swap_in(
    state: DeviceState, selection: int, topk: Tensor, batch: StepBatch, out_rows: Tensor, plan: MissPlan
) -> None:
    """Raises BadInput unless every tensor of a swap_in fits the others."""
    check_number("selection", selection, state.geometry.selections)
    sizes = Sizes()
    sizes.check("topk", topk, ("batch", "k"), torch.int32)
    sizes.check("out_rows", out_rows, ("batch", "k"), torch.int32)
    sizes.check("batch.seats", batch.seats, ("batch",), torch.int32, torch.int64)
    sizes.check("batch.lengths", batch.lengths, ("batch",), torch.int32, torch.int64)
    sizes.check("batch.num_real", batch.num_real, (1,), torch.int32)
    sizes.check("batch.opened", batch.opened, ("batch", OPENED_WORDS), torch.int32)
    sizes.check("batch.rejected", batch.rejected, ("batch",), torch.int32)
    if not 1 <= sizes["k"] <= TOPK_MAX:
        raise BadInput("out of range", field="topk", value=f"k={sizes['k']}", remedy=f"k from 1 to {TOPK_MAX}")
    for name in ("device_row", "host_page", "host_offset"):
        sizes.check(f"plan.{name}", getattr(plan, name), ("batch", "k"), torch.int32)
    sizes.check("plan.count", plan.count, ("batch",), torch.int32)
