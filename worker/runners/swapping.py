"""Launches of a decode step on `swap`, beside those on `compute`: selections, swap-ins, shared experts.

A group of layers that share a selection, in the order of launches, for a batch padded to BESIDE_ROWS or more:

    compute   select: index projections and index_topk of the anchor, record selected, its other projections · attention
    swap      wait selected, swap_in, record swapped_in · replay_misses of each follower, record prefetched
    compute   wait swapped_in before the anchor's attention, prefetched before a follower's

and for a smaller one, whose index_topk leaves much of the device to the other projections:

    compute   record compressed, the anchor's other projections · attention, waits as above
    swap      wait compressed, select, swap_in, record swapped_in · replay_misses of each follower, record prefetched

What swap_in writes is used again by the next group: `compute` reaches the next selection only behind the attention
that read the device rows of this one, and the next swap_in comes only behind the replays that read the plan, since
the followers' attention waited for them. The projections beside a swap_in write the new token's row, which lies in a
tail slot: never a victim.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from torch import Tensor

from kernels.state import DeviceState, MissPlan, StepBatch
from kernels.swap_in import replay_misses, swap_in
from worker.streams import Fence, Streams
from worker.streams.fences import Work

#: Rows of a padded batch from which selections run in line with the projections. A step over contexts of 32k with 99 %
#: hits, on an H200, against selections beside them: 1 row +2.1 %, 8 rows -0.9 %, 16 rows -1.2 % with a library's
#: products; with weights decoded 1 row +5.6 %, 16 rows +0.1 % (benchmarks/NOTES.md: Launches of a decode step).
BESIDE_ROWS: Final = 8


def launch_selection(
    streams: Streams,
    state: DeviceState,
    group: int,
    select: Work,
    topk: Tensor,
    batch: StepBatch,
    out_rows: Tensor,
    plan: MissPlan,
) -> dict[int, Fence]:
    """Let `select` write `topk` of `group`, and swap that in; arguments as kernels.swap_in.swap_in has them.

    Returns the fence of each layer of the group: `compute` waits for it before it gathers the layer's rows. Which
    stream selects follows from the padded batch alone.
    """
    compute, swap = streams.compute, streams.swap
    anchor, *followers = state.geometry.layers_of_group(group)
    beside = len(batch.seats) >= BESIDE_ROWS
    load = streams.of_layer(anchor, partial(swap_in, state, group, topk, batch, out_rows, plan, beside=beside))
    if beside:
        compute.launch(f"select {anchor}", select)
        swap.wait(compute.record("selected"))
    else:
        swap.wait(compute.record("compressed"))
        swap.launch(f"select {anchor}", select)
    swap.launch(f"swap in {anchor}", load)
    loaded = {anchor: swap.record("swapped_in")}
    for layer in followers:
        swap.launch(f"replay {layer}", streams.of_layer(layer, partial(replay_misses, state, layer, plan)))
        loaded[layer] = swap.record("prefetched")
    return loaded


def launch_beside(streams: Streams, label: str, share: Work) -> Fence:
    """Let the shared experts of a mixture form what they add, `share`, on `swap`: beside the routed ones, which begin
    with launches that leave the device idle. Returns the fence that `compute` waits for before it adds that."""
    streams.swap.wait(streams.compute.record("normed"))
    streams.swap.launch(label, share)
    return streams.swap.record("shared")
