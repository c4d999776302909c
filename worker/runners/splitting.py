"""Units of a prompt pass that the ranks of a group split: what each of them computes, and what they exchange.

A unit of n rows is n neighbouring rows on each rank, its *stripe*; those of all ranks are the *span*
(worker/device/passes.py). Every rank keeps states, selections and angles as if the whole pass were its own, and
computes those of its stripes.

    project      rows and, on an anchor layer, index keys of the stripe
    all-gather   rows and keys of the span, which each rank writes to its memory
    broadcast    ahead of the first unit of a layer, from the owner: earlier keys of the pass's prompts, and rows once
                 they were loaded
    attend       the stripe selects, attends, and goes through the MLP or the experts, as rows of any round do
    all-gather   behind the last layer, hidden states of the span: the owner draws first tokens, and writes the rows of
                 a draft layer. Then what the last tokens of prompts selected

Only the owner's memory is that of requests. The others have the prompts in a guest view of their state, under the
number of a part in place of a seat; what a part that left sends there attends in its own rows alone.

Rejected: earlier rows from the host pool on every rank (the pages are the owner's, and other ranks would be readers
whose end it had to await; ranks of other nodes have another pool); stripes of single tokens, which balance the search
of keys better (a few percent of a layer) and are no neighbours for any kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kernels.rows import (
    read_index_keys,
    read_slab_rows,
    write_prompt_index_keys,
    write_slab_rows,
)
from kernels.state import DeviceState
from worker.device.passes import PassUnit
from worker.group.exchange import Collectives
from worker.runners import attention as mla
from worker.runners.base import PromptPart
from worker.runners.layers import Layer, Layers
from worker.runners.prompt import ModelPass, PromptAttention, PromptBlock
from worker.weights.layout import EARLIER_ROWS_MAX


@dataclass(eq=False)
class SplitUnit:
    """A unit of a split pass on this rank, as it was when it was launched."""

    block: PromptBlock  # the stripe; it may have no row
    unit: PassUnit
    span: PassUnit
    owner: int
    pieces: list[PromptPart]  # of the span, of parts that had not left
    earlier: list[tuple[PromptPart, bool]]  # parts with earlier rows, and whether they have left

    @property
    def rows(self) -> slice:
        return slice(self.span.first, self.span.stop)

    @property
    def begins_layer(self) -> bool:
        return not self.unit.first

    @property
    def ends_pass(self) -> bool:
        """Tell whether no row of the last layer lies behind it."""
        return self.span.stop == self.block.prompts.rows


class Splitting:
    """Split units over the `layers` of a model. Operations on `compute`, in the same order on all ranks."""

    def __init__(self, layers: Layers, prompt: PromptAttention, collectives: Collectives, layer_count: int) -> None:
        self._layers, self._prompt, self._collectives = layers, prompt, collectives
        self._last_layer = layer_count - 1

    def unit(self, prompts: ModelPass, unit: PassUnit, owner: int) -> SplitUnit:
        """This rank's part in `unit` of the pass of rank `owner`."""
        rank, ranks = self._collectives.rank, self._collectives.size
        span, stripe = unit.span(ranks, prompts.rows), unit.stripe(rank, ranks, prompts.rows)
        block = PromptBlock.of(prompts, stripe.first, stripe.stop)
        block.is_guest = rank != owner
        pieces = [piece for _, piece in prompts.pieces(span.first, span.stop)]
        earlier = [(part, number in prompts.left) for number, part in enumerate(prompts.parts) if part.start]
        return SplitUnit(block, unit, span, owner, pieces, earlier)

    @torch.inference_mode()
    def project(self, split: SplitUnit, state: DeviceState, layer: Layer) -> None:
        """Rows and index keys of the span are written, and the stripe has selected, if `layer` is an anchor."""
        block, index = split.block, None
        rows = torch.empty(0, state.geometry.row_bytes, dtype=torch.uint8, device=state.rows.device)
        keys = rows.new_empty(0, state.geometry.index_row_bytes)
        if block.first < block.stop:
            rows, index = self._project_stripe(block, layer)
        self._write(split, self._gathered(rows, split.unit.rows), partial(write_slab_rows, state, layer.number))
        if not layer.anchor:
            return
        if index is not None:
            assert index.keys is not None
            keys = index.keys[0]
        group = block.keys_of(layer.group)
        write = partial(write_prompt_index_keys, state, group)
        self._write(split, self._gathered(keys, split.unit.rows), write)
        if split.begins_layer:
            read = partial(read_index_keys, state, group)
            self._share_earlier(split, read, write, keys.new_empty(0, state.geometry.index_row_bytes))
        if index is not None and block.pieces:
            self._prompt.select(state, layer.group, block, index, layer.attention.indexer.softmax_scale)

    def _project_stripe(self, block: PromptBlock, layer: Layer) -> tuple[Tensor, mla.IndexProjected | None]:
        """Rows uint8[n, row_bytes] of the stripe, and what an anchor layer's indexer needs. Keeps its queries."""
        layers, prompts = self._layers, block.prompts
        cos, sin = prompts.angles
        entered, angles = layers.enter(layer, prompts.hidden[:, block.rows]), (cos[:, block.rows], sin[:, block.rows])
        inputs = layers.compress(layer, entered)
        projected = layers.project(layer, inputs, angles)
        assert projected.rows is not None
        block.projected = replace(projected, rows=None)
        return projected.rows[0], layers.project_index(layer, inputs, angles) if layer.anchor else None

    @torch.inference_mode()
    def attend(self, split: SplitUnit, state: DeviceState, layer: Layer) -> None:
        """The stripe goes through the rest of `layer`. Earlier rows of prompts are in the owner's slab."""
        block, experts = split.block, self._layers.prompt_experts
        if split.begins_layer:
            read, write = partial(read_slab_rows, state, layer.number), partial(write_slab_rows, state, layer.number)
            shape = 0, state.geometry.row_bytes
            self._share_earlier(split, read, write, torch.empty(shape, dtype=torch.uint8, device=state.rows.device))
        if block.first < block.stop:
            hidden, ending = block.prompts.hidden[:, block.rows], block.ending
            attended = self._prompt.attend(state, layer, block)
            self._layers.finish(layer, hidden, attended, experts, ending=ending, rows=split.unit.rows)
        else:
            self._layers.pad(layer, split.unit.rows)
        if layer.number == self._last_layer:
            self._share_states(split)

    def _share_states(self, split: SplitUnit) -> None:
        """The owner, and the others too, have the states of the span; and behind the pass what last tokens selected."""
        prompts, block = split.block.prompts, split.block
        states = self._gathered(prompts.hidden[0, block.rows], split.unit.rows)
        prompts.hidden[0, split.rows] = states[: split.span.rows]
        if split.ends_pass:
            for selected in prompts.warm_start:
                selected.copy_(self._gathered(selected[None], 1).amax(0))  # -1 on all ranks but one

    def _write(self, split: SplitUnit, rows: Tensor, write: Callable[[int, int, Tensor], None]) -> None:
        """Write what was gathered of the span, piece by piece."""
        for piece in split.pieces:
            first = piece.first - split.span.first
            write(piece.seat, piece.start, rows[first : first + piece.tokens])

    def _share_earlier(
        self,
        split: SplitUnit,
        read: Callable[..., Tensor],
        write: Callable[[int, int, Tensor], None],
        like: Tensor,
    ) -> None:
        """All ranks have what the owner has below the parts of a pass; zeros of parts that left, whose memory may be
        another's."""
        rank, owner = self._collectives.rank, split.owner
        for part, has_left in split.earlier:
            for first in range(0, part.start, EARLIER_ROWS_MAX):
                stop = min(first + EARLIER_ROWS_MAX, part.start)
                is_read = rank == owner and not has_left
                data = read(part.seat, stop, start=first) if is_read else like.new_zeros(stop - first, like.shape[1])
                self._collectives.broadcast(data, owner)
                if rank != owner:
                    write(part.seat, first, data)

    def _gathered(self, own: Tensor, rows: int) -> Tensor:
        """[R * rows, ...] of `own` [n, ...] of each rank, n at most `rows`; anything behind the n."""
        if len(own) < rows:
            padded = own.new_zeros(rows, *own.shape[1:])
            padded[: len(own)] = own
            own = padded
        output = own.new_empty(self._collectives.size * rows, *own.shape[1:])
        self._collectives.all_gather(output, own.contiguous())
        return output
