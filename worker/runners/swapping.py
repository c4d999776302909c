"""The swap-ins of a decode step: beside what a layer computes meanwhile, or in line with it.

Of a group of layers that share a selection, in the order of launches, for a batch padded to BESIDE_ROWS or more:

    compute   index projections and index_topk of the anchor, record selected, its other projections · attention
    swap      wait selected, swap_in, record swapped_in · replay_misses of each follower, record prefetched
    compute   wait swapped_in before the anchor's attention, prefetched before a follower's

and for a smaller one, whose swap-ins are shorter than what a fork of streams costs:

    compute   index projections and index_topk of the anchor, swap_in, record plan_ready where there are followers
    swap      wait plan_ready · replay_misses of each follower, record prefetched

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

#: Rows of a padded batch from which swap_in runs on `swap`. A step of 8 layers over contexts of 32k with 99 % hits, on
#: an H200, against swap_in in line: 32 rows -1.9 %, 58 rows -2.6 %; 16 rows +0.6 %, 8 -1.0 %, 4 +1.3 %, 1 +1.2 %
#: (benchmarks/NOTES.md: Swap-in beside projections). Nothing between 16 and 32 was measured.
BESIDE_ROWS: Final = 24


def launch_swap_in(
    streams: Streams, state: DeviceState, group: int, topk: Tensor, batch: StepBatch, out_rows: Tensor, plan: MissPlan
) -> dict[int, Fence]:
    """Swap in what `compute` has selected for `group`; arguments as kernels.swap_in.swap_in has them.

    Returns the fence of each layer of the group whose rows are loaded on `swap`: `compute` waits for it before it
    gathers them. Which stream it is follows from the padded batch alone, so that resident requests compute alike.
    """
    compute, swap = streams.compute, streams.swap
    anchor, *followers = state.geometry.layers_of_group(group)
    load = streams.of_layer(anchor, partial(swap_in, state, group, topk, batch, out_rows, plan))
    loaded: dict[int, Fence] = {}
    if len(batch.seats) >= BESIDE_ROWS:
        swap.wait(compute.record("selected"))
        swap.launch(f"swap in {anchor}", load)
        loaded[anchor] = swap.record("swapped_in")
    else:
        compute.launch(f"swap in {anchor}", load)
        if followers:
            swap.wait(compute.record("plan_ready"))
    for layer in followers:
        swap.launch(f"replay {layer}", streams.of_layer(layer, partial(replay_misses, state, layer, plan)))
        loaded[layer] = swap.record("prefetched")
    return loaded
