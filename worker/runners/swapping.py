"""The swap-ins of a decode step, on a stream of their own beside what a layer computes meanwhile.

Of a group of layers that share a selection, in the order of launches:

    compute   index projections and index_topk of the anchor, record selected, its other projections · attention
    swap      wait selected, swap_in, record swapped_in · replay_misses of each follower, record prefetched
    compute   wait swapped_in before the anchor's attention, prefetched before a follower's

What swap_in writes is used again by the next group: `compute` reaches the next `selected` only behind the attention
that read the device rows of the selection, and `swap` reaches the next swap_in only behind the replays that read the
plan. The projections beside a swap_in write the new token's row, which lies in a tail slot: never a victim.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from kernels.state import DeviceState, MissPlan, StepBatch
from kernels.swap_in import replay_misses, swap_in
from worker.streams import Fence, Streams


def launch_swap_in(
    streams: Streams, state: DeviceState, group: int, topk: Tensor, batch: StepBatch, out_rows: Tensor, plan: MissPlan
) -> dict[int, Fence]:
    """Swap in on `swap` what `compute` has selected for `group`; arguments as kernels.swap_in.swap_in has them.

    Returns the fence of each layer of the group: `compute` waits for it before it gathers the layer's rows.
    """
    swap = streams.swap
    anchor, *followers = state.geometry.layers_of_group(group)
    swap.wait(streams.compute.record("selected"))
    load = partial(swap_in, state, group, topk, batch, out_rows, plan)
    swap.launch(f"swap in {anchor}", streams.of_layer(anchor, load))
    loaded = {anchor: swap.record("swapped_in")}
    for layer in followers:
        swap.launch(f"replay {layer}", streams.of_layer(layer, partial(replay_misses, state, layer, plan)))
        loaded[layer] = swap.record("prefetched")
    return loaded
