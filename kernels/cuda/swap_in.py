"""swap_in and replay_misses on CUDA: the contracts of kernels/swap_in.py, launched on the current stream.

Thread blocks per request (ranks): as many as possible while all clusters run at once, a refill block for each request
beside them, and messages between blocks stay few. At large batches that is fewer blocks than multiprocessors, because
clusters of many blocks leave some multiprocessors unused, and a second wave of blocks costs more than larger blocks do
(batch 16 without misses, an earlier kernel: 6.4 us in clusters of 8, 3.4 in clusters of 4). 20 misses take 7.6, 7.8 and
8.0 us in clusters of 8, 6 and 4 at batch 12, 9.0 and 9.2 in clusters of 5 and 4 at batch 16.

Beside other kernels a batch has blocks on half of the multiprocessors: a product that fills the others begins at once,
and the link bounds 64 requests with 64 blocks as with 128 (a step of theirs 0.7 % shorter).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from kernels.cuda import parameters, structures
from kernels.cuda.launch import RANKS, has_clusters, kernel_of, processors, slots_limit, stream_of, swap_in_of
from kernels.state import DeviceState, MissPlan, StepBatch
from protocol.errors import BadInput
from protocol.units import PAGE_TOKENS, TOPK_MAX

PEER_MESSAGES_MAX = 13 * 8**2  # in a step: each block of a request writes to all others
REPLAY_ROWS = 8  # copies per block of replay_misses, until half the processors fill the link

_copies: ContextVar[bool] = ContextVar("copies", default=True)


def swap_in(
    state: DeviceState,
    group: int,
    topk: Tensor,
    batch: StepBatch,
    out_rows: Tensor,
    plan: MissPlan,
    *,
    ranks: int | None = None,
    beside: bool = False,
    early: bool = True,
    refill_blocks: bool = True,
) -> None:
    """As kernels.swap_in.swap_in, unchecked; `state` has been through `prepare`. `ranks` overrides blocks per request.

    Launched once for each depth of `batch`, on its rows. Each row of `plan` is written by that row's blocks; nothing
    waits on the host. `early`: the launch may begin while the kernel ahead in the stream is at work, and awaits its end
    by itself (programmatic dependent launch, from sm_90).
    `refill_blocks`: further blocks refill eviction queues, where the device has room for them.
    """
    k = topk.shape[1]
    if ranks and not has_room(k, ranks):
        raise BadInput("more than a block has room for", field="ranks", value=ranks, remedy="a power of two")
    rows = topk.shape[0] // batch.seat_rows
    ranks = ranks or ranks_of(state, rows, k, beside=beside)
    refilling = refill_clusters(rows, ranks, clusters_at_once(state, ranks)) if refill_blocks and ranks > 1 else 0
    for depth in batch.depths():
        part = topk[depth], batch.at_depth(depth), out_rows[depth], plan.at_depth(depth)
        swap_in_of(state, ranks, draft=depth.start > 0).launch(
            (ranks, rows + refilling),
            block_of(state, group, *part, ranks, refill_blocks=refilling > 0),
            stream_of(state),
            cluster=ranks,
            shared_bytes=structures.SWAP_IN_SHARED_BYTES,
            early=early and has_clusters(state),
        )


def block_of(
    state: DeviceState,
    group: int,
    topk: Tensor,
    batch: StepBatch,
    out_rows: Tensor,
    plan: MissPlan,
    ranks: int,
    *,
    refill_blocks: bool,
) -> structures.SwapIn:
    """The parameter block of a swap_in of one row a seat."""
    rows, k = topk.shape
    geometry, layer = state.geometry, state.geometry.layers_of_group(group)[0]
    arena = state.rows.shape[1]
    before = [layer * geometry.row_bytes + begin for begin in (0, geometry.split)]  # bytes of a token, up to each plane
    return structures.SwapIn(
        state=parameters.group_parameters(state, group),
        opened=batch.opened.data_ptr(),
        plan=parameters.plan_parameters(plan),
        topk=topk.data_ptr(),
        out_rows=out_rows.data_ptr(),
        rows=rows,
        k=k,
        slots_limit=slots_limit(state),
        block_entries=block_entries_of(k, ranks),
        copies=_copies.get(),
        page_bytes=geometry.page_bytes,
        refill_blocks=refill_blocks,
        host_rows=(state.host.data_ptr() + before[0] * PAGE_TOKENS, state.host.data_ptr() + before[1] * PAGE_TOKENS),
        device_rows=(state.rows.data_ptr() + before[0] * arena, state.rows.data_ptr() + before[1] * arena),
        rejected=batch.rejected.data_ptr(),
    )


def replay_misses(state: DeviceState, layer: int, plan: MissPlan, head: int = 0) -> None:
    """As kernels.swap_in.replay_misses: the copies of `plan` for another layer of its group. Rows have one head."""
    del head
    rows, k = plan.device_row.shape
    block = structures.ReplayMisses(
        state=parameters.state_parameters(state),
        plan=parameters.plan_parameters(plan),
        k=k,
        layer=layer,
        rows=rows,
    )
    blocks = min(-(-rows * k // REPLAY_ROWS), processors(plan.count.device) // 2)
    kernel_of(state, "copy_rows", "replay_misses").launch(
        (blocks, 1), block, stream_of(state), threads=256, shared_bytes=4 * rows
    )


@contextmanager
def without_copies() -> Iterator[None]:
    """Launches in here, captured ones too, resolve and evict but copy no row: what attention reads is stale.

    For benchmarks that ask what the copies cost.
    """
    token = _copies.set(False)
    try:
        yield
    finally:
        _copies.reset(token)


def ranks_of(state: DeviceState, rows: int, k: int, *, beside: bool = False) -> int:
    """Blocks per request in a step of `rows` rows of top-k `k`; `beside`: as swap_in has it."""
    if not has_clusters(state):
        return 1
    most = processors(state.rows.device) // 2 if beside else None
    return blocks_per_request(rows, k, lambda ranks: clusters_at_once(state, ranks), most)


def refill_clusters(rows: int, ranks: int, at_once: int) -> int:
    """Clusters of `ranks` refill blocks, one block for each of `rows` rows.

    None when the device, which holds `at_once` clusters, has no room for them beside the rows' clusters: blocks of the
    rows refill the queues then.
    """
    clusters = -(-rows // ranks)
    return clusters if rows + clusters <= at_once else 0


def clusters_at_once(state: DeviceState, ranks: int) -> int:
    """Clusters of `ranks` blocks of swap_in that the device holds at once."""
    return swap_in_of(state, ranks).clusters_at_once(ranks, structures.SWAP_IN_SHARED_BYTES)


def blocks_per_request(
    rows: int, k: int, clusters_at_once: Callable[[int], int], blocks_most: int | None = None
) -> int:
    """The largest of RANKS whose clusters run at once with refill blocks; if there is none, without.

    Only ranks whose blocks have room for a top-k of `k` and send each other few enough messages count, and of which
    `rows` requests have `blocks_most` blocks at most, refill blocks aside. It may be 1.
    """
    fit = [
        ranks
        for ranks in RANKS[1:]
        if rows * ranks**2 <= PEER_MESSAGES_MAX
        and has_room(k, ranks)
        and rows <= clusters_at_once(ranks)
        and (blocks_most is None or rows * ranks <= blocks_most)
    ]
    refilled = [ranks for ranks in fit if refill_clusters(rows, ranks, clusters_at_once(ranks))]
    return max(refilled or fit or RANKS[:1])


def block_entries_of(k: int, ranks: int) -> int:
    """Top-k entries that a block has room for: a power of two. Entries go to blocks by whole warps, in turn."""
    return 32 << (-(-k // (32 * ranks)) - 1).bit_length()


def has_room(k: int, ranks: int) -> bool:
    """Whether a block has room for the codes of all blocks; it may not when `ranks` is no power of two."""
    return ranks * block_entries_of(k, ranks) <= TOPK_MAX
