"""swap_in and replay_misses on CUDA: the contracts of kernels/swap_in.py, launched on the current stream.

How many thread blocks share a request: as many as a cluster may have while all clusters run at once and what they
write to each other stays little. Fewer at large batches than there are multiprocessors, because clusters of many
blocks leave some unused: a second wave of blocks costs more than larger blocks do (batch 16 without misses: 6.4 us in
clusters of 8, 3.4 in clusters of 4). At batch 4, 20 misses take 6.1 us in clusters of 8, 6.4 in clusters of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate

from torch import Tensor

from kernels.cuda import parameters
from kernels.cuda.launch import RANKS_MAX, has_clusters, kernel_of, processors, slots_limit, stream_of
from kernels.layout import NEXT_SLOTS, PAGE_TOKENS
from kernels.state import DeviceState, MissPlan, StepBatch

SEEN_MAX = 4096  # places of the hash set of tokens; twice the top-k up to half of that
STAGED_PAGES = 1024  # swap_in_block.cuh
MAIL_MAX = RANKS_MAX**2  # messages in a step: every block of a request writes to every other
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
    early: bool = True,
) -> None:
    """As kernels.swap_in.swap_in, unchecked; `state` has been through `prepare`. `ranks` overrides blocks per request.

    Each row of `plan` is written by that row's blocks; nothing waits on the host. `early`: the launch may begin while
    the kernel ahead in the stream is at work, and awaits its end by itself (programmatic dependent launch, from sm_90).
    """
    rows, k = topk.shape
    ranks = ranks or ranks_of(state, rows, k)
    limit = slots_limit(state)
    seen = seen_places(k)
    sections, shared_bytes = lay_out(k, ranks, limit)
    block = parameters.SwapIn(
        state=parameters.group_parameters(state, group),
        batch=parameters.batch_parameters(batch),
        plan=parameters.plan_parameters(plan),
        topk=topk.data_ptr(),
        out_rows=out_rows.data_ptr(),
        k=k,
        anchor_layer=state.geometry.layers_of_group(group)[0],
        slots_limit=limit,
        seen_mask=seen - 1,
        copies=_copies.get(),
        sections=sections,
    )
    kernel_of(state, "swap_in", "swap_in").launch(
        (ranks, rows),
        block,
        stream_of(state),
        cluster=ranks,
        shared_bytes=shared_bytes,
        early=early and has_clusters(state),
    )


def replay_misses(state: DeviceState, layer: int, plan: MissPlan) -> None:
    """As kernels.swap_in.replay_misses: the copies of `plan` for another layer of its group."""
    rows, k = plan.device_row.shape
    block = parameters.ReplayMisses(
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


def ranks_of(state: DeviceState, rows: int, k: int) -> int:
    """Blocks that share a request in a step of `rows` rows, top-k `k`."""
    if not has_clusters(state):
        return 1
    kernel, limit = kernel_of(state, "swap_in", "swap_in"), slots_limit(state)
    return blocks_per_request(rows, lambda ranks: kernel.clusters_at_once(ranks, lay_out(k, ranks, limit)[1]))


def blocks_per_request(rows: int, clusters_at_once: Callable[[int], int]) -> int:
    """The largest power of two whose clusters the device holds all at once, with little enough mail; it may be 1."""
    ranks = RANKS_MAX
    while ranks > 1 and (rows * ranks * ranks > MAIL_MAX or rows > clusters_at_once(ranks)):
        ranks //= 2
    return ranks


def seen_places(k: int) -> int:
    return max(16, min(SEEN_MAX, 2 << (k - 1).bit_length()))


def share_of(k: int, ranks: int) -> int:
    """Top-k entries of one block at most: whole warps are dealt out in turn."""
    return -(-k // (32 * ranks)) * 32


def lay_out(k: int, ranks: int, limit: int) -> tuple[parameters.Sections, int]:
    """Offsets and size of one block's dynamic shared memory: struct Shared in swap_in_block.cuh. `limit`: slots."""
    share = share_of(k, ranks)
    mail = 16 * (1 + -(-limit // 128))
    sizes = {
        "keys": 4 * share,
        "pages": 4 * share,
        "victims": 2 * share,
        "order": 2 * share,
        "seen": 4 * seen_places(k),
        "chunks": -(-(4 * (limit // PAGE_TOKENS)) // 16) * 16,
        "index": 4 * STAGED_PAGES,
        "next": (2 + 4) * NEXT_SLOTS,
        "stay": mail,
        "mail": ranks * mail,
        "lists": ranks * 4 * share,
    }
    ends = list(accumulate(sizes.values()))
    places = dict(zip(list(sizes)[1:], ends, strict=False))
    return parameters.Sections(**places, mail_bytes=mail, list_bytes=4 * share), ends[-1]
