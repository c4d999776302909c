"""swap_in and replay_misses on CUDA: the contracts of kernels/swap_in.py, launched on the current stream.

How many thread blocks share a request: enough to fill the card, at most a cluster. Fewer blocks at large batches, since
each of them repeats the choice of victims; more at small ones, since a block resolves top-k entries and loads rows at
its own pace.
"""

from __future__ import annotations

from torch import Tensor

from kernels.cuda import parameters
from kernels.cuda.launch import RANKS_MAX, has_clusters, kernel_of, processors, slots_limit, stream_of
from kernels.state import DeviceState, MissPlan, StepBatch

AGE_BINS = 2048  # swap_in.cuh
WARP = 32
REPLAY_PARTS_MAX = 16


def swap_in(
    state: DeviceState,
    group: int,
    topk: Tensor,
    batch: StepBatch,
    out_rows: Tensor,
    plan: MissPlan,
    *,
    ranks: int | None = None,
) -> None:
    """As kernels.swap_in.swap_in, unchecked; `state` has been through `prepare`. `ranks` overrides blocks per request.

    Each row of `plan` is written by that row's blocks; nothing waits on the host.
    """
    rows, k = topk.shape
    ranks = ranks or blocks_per_request(rows, processors(topk.device), has_clusters(state))
    span = -(-k // (ranks * WARP)) * WARP
    distinct = 2 << (k - 1).bit_length()
    limit = slots_limit(state)
    block = parameters.SwapIn(
        state=parameters.state_parameters(state),
        batch=parameters.batch_parameters(batch),
        plan=parameters.plan_parameters(plan),
        topk=topk.data_ptr(),
        out_rows=out_rows.data_ptr(),
        k=k,
        group=group,
        anchor_layer=state.geometry.layers_of_group(group)[0],
        span=span,
        slots_limit=limit,
        distinct_mask=distinct - 1,
    )
    kernel_of(state, "swap_in", "swap_in").launch(
        (rows * ranks, 1),
        block,
        stream_of(state),
        cluster=ranks,
        shared_bytes=max(shared_bytes(span, ranks, limit), 4 * distinct),
    )


def replay_misses(state: DeviceState, layer: int, plan: MissPlan) -> None:
    """As kernels.swap_in.replay_misses: the copies of `plan` for another layer of its group."""
    rows, k = plan.device_row.shape
    parts = max(1, min(REPLAY_PARTS_MAX, 2 * processors(plan.count.device) // rows))
    block = parameters.ReplayMisses(
        state=parameters.state_parameters(state),
        plan=parameters.plan_parameters(plan),
        k=k,
        layer=layer,
        parts=parts,
    )
    kernel_of(state, "copy_rows", "replay_misses").launch((rows * parts, 1), block, stream_of(state), threads=256)


def blocks_per_request(rows: int, multiprocessors: int, clusters: bool) -> int:
    """A power of two: as many as give each multiprocessor one block, two once that leaves a request alone."""
    if not clusters:
        return 1
    ranks = RANKS_MAX
    while ranks > 1 and rows * ranks > multiprocessors:
        ranks //= 2
    return 2 if ranks == 1 and 2 * rows <= 2 * multiprocessors else ranks


def shared_bytes(span: int, ranks: int, limit: int) -> int:
    """Dynamic shared memory of one block: the sections of struct Shared in swap_in.cuh."""
    results, records = 2 * ranks * span, 18 * span
    chunks = 4 * (-(-(limit // 64) // 4) * 4)
    return results + 4 * AGE_BINS + records + chunks + 3 * limit
