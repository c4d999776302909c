"""The swap-ins of a decode step: beside what a layer computes meanwhile, or in line with it.

Of a group of layers that share a selection, in the order of launches, for a batch padded to BESIDE_ROWS or more:

    compute   index projections and index_topk of the anchor, record selected, its other projections · attention
    swap      wait selected, swap_in, record swapped_in · replay_misses of each follower, record prefetched
    compute   wait swapped_in before the anchor's attention, prefetched before a follower's

and for a smaller one, whose swap-ins are shorter than what a fork of streams costs:

    compute   index projections and index_topk of the anchor, swap_in, record plan_ready where there are followers
    swap      wait plan_ready · replay_misses of each follower, record prefetched

In halves (worker.decode_halves), for a batch of so many seats or more:

    swap      wait selected, swap_in of the first half, record first_half, swap_in of the second, record second_half;
              replay_misses of each follower likewise
    compute   wait first_half, attention of the first half · wait second_half, attention of the second

What swap_in writes is used again by the next group: `compute` reaches the next selection only behind the attention
that read the device rows of this one, and the next swap_in comes only behind the replays that read the plan, since
the followers' attention waited for them. The projections beside a swap_in write the new token's row, which lies in a
tail slot: never a victim. Attention of one half reads rows of its seats alone, and a swap_in of the other half evicts
rows of its own.

Halves are cuts of the padded seats, by views: depth by depth, since rows of a seat stay together. Attention chooses how
it splits a result by the number of rows of a launch. So bits follow from the bucket and from whether it runs in halves:
alike for resident requests, and not those of the whole batch on a GPU. Seats of an odd number give halves of two sizes,
which deterministic mode refuses.

Whether halves pay was not measured. What is known (H200, one layer, 64 requests): attention A takes 80 us over bfloat16
rows and 103 over fp8 ones; loads L take 95 us (102 misses a request, 45 GB/s), 200 at the rate of a large pool;
projections P beside them take 25 to 30. A block of attention fills a multiprocessor (230 KB of shared memory) and never
shares one with swap_in (97 KB). Half a batch, split in two, is 128 blocks for 132 multiprocessors, and takes about
0.6 A alone (hopper_cut_of: 20 against 34); beside swap_in, up to 1.2 A, where some of its blocks wait for others.

    whole     max(L, P) + A                                from the selection to the end of attention
    halves    max(L/2, P) + max(L/2, A') + 0.6 A           A': attention of the first half, 0.6 A to 1.2 A

    fp8 rows, L =  95    198 us; in halves 172 to 233
    fp8 rows, L = 200    303 us; in halves 262 to 286, of about 890 us that a layer takes
    fp8 rows, L = 360    463 us; in halves 422, of about 1,060

less two launches and two edges of a graph, some 5 us. So halves gain 0.4 A a layer at most, 4 % of a step, where loads
last longer than attention; they lose where few rows miss. The second swap_in is `sparing`: one block a request, which
16 multiprocessors hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from torch import Tensor

from kernels.state import DeviceState, MissPlan, StepBatch
from kernels.swap_in import replay_misses, swap_in
from worker.streams import Fence, Streams

#: Rows of a padded batch from which swap_in runs on `swap`. A step of 8 layers over contexts of 32k with 99 % hits, on
#: an H200, against swap_in in line: 32 rows -1.9 %, 58 rows -2.6 %; 16 rows +0.6 %, 8 -1.0 %, 4 +1.3 %, 1 +1.2 %
#: (benchmarks/results/decode-overlap-H200.json). Nothing between 16 and 32 was measured.
BESIDE_ROWS: Final = 24
#: Fences of the parts of a batch, in order.
HALVES: Final = ("first_half", "second_half")

#: Launched as an operation on `compute`, with rows of the batch: their attention.
Attend = Callable[[slice], object]


@dataclass(frozen=True)
class SwappedIn:
    """What is swapped in for the layers of a group. `parts`: rows of the batch that are loaded and attended to
    together, as slices; `fences`: of each layer that waits for `swap`, a fence for each part."""

    parts: tuple[tuple[slice, ...], ...]
    fences: dict[int, tuple[Fence, ...]]

    def launch_attention(self, streams: Streams, layer: int, attend: Attend) -> None:
        """Launch the attention of all rows of `layer`, each part behind what it waits for; the last rows come last."""
        compute, fences = streams.compute, self.fences.get(layer, ())
        for number, part in enumerate(self.parts):
            if fences:
                compute.wait(fences[number])
            for rows in part:
                compute.launch(f"attend {layer}", partial(attend, rows))


def halves_of(seats: int) -> tuple[slice, slice]:
    """The halves of two padded seats or more; the first is the larger one."""
    middle = (seats + 1) // 2
    return slice(0, middle), slice(middle, seats)


def is_halved(seats: int, halves_from: int) -> bool:
    """Whether a batch of so many padded seats runs in halves; `halves_from` 0: none does."""
    return 0 < halves_from <= seats and seats > 1


def parts_of(rows: int, seats: int, halves_from: int) -> tuple[tuple[slice, ...], ...]:
    """Parts of a batch of so many rows and padded seats that are loaded and attended to one after the other, each as
    the rows of a launch: the whole batch, or halves depth by depth."""
    if not is_halved(seats, halves_from):
        return ((slice(0, rows),),)
    depths = range(0, rows, seats)
    return tuple(tuple(slice(at + half.start, at + half.stop) for at in depths) for half in halves_of(seats))


def launch_swap_in(
    streams: Streams,
    state: DeviceState,
    group: int,
    topk: Tensor,
    batch: StepBatch,
    out_rows: Tensor,
    plan: MissPlan,
    *,
    halves_from: int = 0,
) -> SwappedIn:
    """Swap in what `compute` has selected for `group`; arguments as kernels.swap_in.swap_in has them.

    In halves where the batch has `halves_from` padded seats or more. Which stream it is, and whether there are halves,
    follows from the padded batch alone, so that resident requests compute alike.
    """
    load = partial(swap_in, state, group, topk, batch, out_rows, plan)
    parts = parts_of(len(batch.seats), batch.step_seats, halves_from)
    if len(parts) > 1:
        loads = [partial(load, seats=half, sparing=half.start > 0) for half in halves_of(batch.step_seats)]
        return _launch_halves(streams, state, group, parts, plan, loads)
    compute, swap = streams.compute, streams.swap
    anchor, *followers = state.geometry.layers_of_group(group)
    timed = streams.of_layer(anchor, load)
    fences: dict[int, tuple[Fence, ...]] = {}
    if len(batch.seats) >= BESIDE_ROWS:
        swap.wait(compute.record("selected"))
        swap.launch(f"swap in {anchor}", timed)
        fences[anchor] = (swap.record("swapped_in"),)
    else:
        compute.launch(f"swap in {anchor}", timed)
        if followers:
            swap.wait(compute.record("plan_ready"))
    for layer in followers:
        swap.launch(f"replay {layer}", streams.of_layer(layer, partial(replay_misses, state, layer, plan)))
        fences[layer] = (swap.record("prefetched"),)
    return SwappedIn(parts, fences)


def _launch_halves(
    streams: Streams,
    state: DeviceState,
    group: int,
    parts: tuple[tuple[slice, ...], ...],
    plan: MissPlan,
    loads: list[partial[None]],
) -> SwappedIn:
    """`loads` are the swap_ins of the `parts`."""
    anchor, *followers = state.geometry.layers_of_group(group)
    streams.swap.wait(streams.compute.record("selected"))
    fences = {anchor: _launch_parts(streams, f"swap in {anchor}", anchor, loads)}
    for layer in followers:
        replays = [partial(_replay, state, layer, plan, part) for part in parts]
        fences[layer] = _launch_parts(streams, f"replay {layer}", layer, replays)
    return SwappedIn(parts, fences)


def _launch_parts(streams: Streams, label: str, layer: int, loads: list[partial[None]]) -> tuple[Fence, ...]:
    fences = []
    for load, name in zip(loads, HALVES, strict=True):
        streams.swap.launch(label, streams.of_layer(layer, load))
        fences.append(streams.swap.record(name))
    return tuple(fences)


def _replay(state: DeviceState, layer: int, plan: MissPlan, part: tuple[slice, ...]) -> None:
    for rows in part:
        replay_misses(state, layer, plan.at_depth(rows))
