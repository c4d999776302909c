"""swap_in and replay_misses on CUDA: the contracts of kernels/swap_in.py, launched on the current stream.

How many thread blocks share a request: enough to fill the card, at most a cluster. Fewer blocks at large batches, since
each of them repeats the choice of victims; more at small ones, since a block resolves top-k entries and loads rows at
its own pace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate

from torch import Tensor

from kernels.cuda import parameters
from kernels.cuda.launch import RANKS_MAX, has_clusters, kernel_of, processors, slots_limit, stream_of
from kernels.layout import PAGE_TOKENS
from kernels.state import DeviceState, MissPlan, StepBatch

SEEN_MAX = 4096  # places of the hash set of tokens; twice the top-k up to half of that
REPLAY_PARTS_MAX = 16

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
) -> None:
    """As kernels.swap_in.swap_in, unchecked; `state` has been through `prepare`. `ranks` overrides blocks per request.

    Each row of `plan` is written by that row's blocks; nothing waits on the host.
    """
    rows, k = topk.shape
    ranks = ranks or blocks_per_request(rows, processors(topk.device), has_clusters(state))
    limit = slots_limit(state)
    seen = seen_places(k)
    sections, shared_bytes = lay_out(k, ranks, limit)
    block = parameters.SwapIn(
        state=parameters.state_parameters(state),
        batch=parameters.batch_parameters(batch),
        plan=parameters.plan_parameters(plan),
        topk=topk.data_ptr(),
        out_rows=out_rows.data_ptr(),
        k=k,
        group=group,
        anchor_layer=state.geometry.layers_of_group(group)[0],
        slots_limit=limit,
        seen_mask=seen - 1,
        copies=_copies.get(),
        wide_topk=int(k % 4 == 0 and topk.data_ptr() % 16 == 0),
        sections=sections,
    )
    kernel_of(state, "swap_in", "swap_in").launch(
        (rows * ranks, 1),
        block,
        stream_of(state),
        cluster=ranks,
        shared_bytes=shared_bytes,
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


def blocks_per_request(rows: int, multiprocessors: int, clusters: bool) -> int:
    """A power of two: as many as give each multiprocessor one block, two once that leaves a request alone."""
    if not clusters:
        return 1
    ranks = RANKS_MAX
    while ranks > 1 and rows * ranks > multiprocessors:
        ranks //= 2
    return 2 if ranks == 1 and rows <= multiprocessors else ranks


def seen_places(k: int) -> int:
    return max(16, min(SEEN_MAX, 2 << (k - 1).bit_length()))


def lay_out(k: int, ranks: int, limit: int) -> tuple[parameters.Sections, int]:
    """Offsets and size of one block's dynamic shared memory: struct Shared in swap_in_block.cuh. `limit`: slots."""
    topk = -(-k // 8) * 8
    mail = 16 * (1 + -(-limit // 128))
    sizes = {
        "entries": 4 * topk,
        "key": 4 * topk,
        "page": 4 * topk,
        "slot": 2 * topk,
        "missing": 2 * topk,
        "seen": 4 * seen_places(k),
        "chunks": -(-(4 * (limit // PAGE_TOKENS)) // 16) * 16,
        "stay": mail,
        "mail": ranks * mail,
    }
    ends = list(accumulate(sizes.values()))
    places = dict(zip(list(sizes)[1:], ends, strict=False))
    return parameters.Sections(**places, mail_bytes=mail, last=topk - 1), ends[-1]
