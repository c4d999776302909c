"""Prefill: prompt passes through the runner into the slab, and behind them, layer by layer, to host memory.

The slab holds rows of two layers: those of layer l lie over those of layer l - 2. A pass has pages of it for the rows
of its prompts that it reads and writes, from its begin until its last unit was launched, or the draft layer's rows; of
a request that leaves, until it has. When the first unit of layer l is launched, earlier rows of the pass's
prompts (of earlier passes, of cached prefixes) begin to come back from host memory for layer l + 1:

    compute   layer 0 ───────┐ layer 1 ───────┐ layer 2 ──────────    writes rows of its block, then attends
    stage          rows of 0 │      rows of 1 │      rows of 2        copies them to host pages
    refill    1 ───┐         2 ───┐           3 ───┐                  loads the rows below each part

    a unit of layer l writes      waits for `slab_staged` of layer l - 2: its rows lie over those. In the first two
                                  layers for all that was staged before: the pages may be those of an earlier pass
    a unit of layer l attends     waits for `refilled` of layer l
    a refill of layer l           waits for `slab_read`: behind the units of layer l - 2, over whose rows it loads; in
                                  the first layer also for all that was staged before: what it loads may be of that

Refill and staging touch other rows of one page, so they do not wait for each other within a pass. Beside decode steps a
unit is launched once what it waits for was seen, since it would hold the steps up. In the pass that ends a prompt, each
layer's newest rows are copied from the slab to the hot buffer behind the layer's last unit. Index keys of a cached
prefix are loaded at admission; a pass waits for those of all its prompts.

Each pass that is open has a place of its own for its tokens on the device. First tokens, and their log-probabilities,
are kept in one place per seat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import cast

import numpy as np
import torch
from torch import Tensor

from kernels.layout import SLAB_LAYERS
from kernels.state import DeviceState
from protocol.logprobs import ROW_WORDS_MAX
from worker.device.passes import PARTS_MAX, PASSES_MAX, PassUnit
from worker.device.pinned import host_tensor
from worker.loop.batch import RunningRequest
from worker.loop.inputs import RING_BUFFERS, Ring
from worker.loop.seats import Seats
from worker.loop.swap import FillPlaces, StagedRows, Swap
from worker.loop.warm_start import TopkBuffers
from worker.runners.base import (
    DraftRunner,
    GroupRunner,
    PromptPart,
    PromptPass,
    Runner,
    SamplerState,
    StepOutputs,
    UnitWritten,
)
from worker.runners.logprobs import allocate_rows
from worker.streams import Fence, Streams
from worker.transfer.layer_groups import LayerGroups


@dataclass(eq=False)
class LaunchedPass:
    """A pass that was begun.

    By number of its part: the request and, on the device, the token behind the part; where its earlier rows lie, if it
    has any; where rows for its hot buffer lie, if it ends its prompt and has one. By layer: what a unit waits for.
    """

    requests: tuple[RunningRequest, ...]
    prompts: PromptPass
    following: Tensor  # int64[parts]
    earlier: dict[int, list[Tensor]]
    filled: dict[int, FillPlaces]
    slab_staged: dict[int, Fence]
    refilled: dict[int, Fence] = field(default_factory=dict)

    def part(self, number: int) -> PromptPart:
        return self.prompts.parts[number]

    def leave(self, request: RunningRequest) -> None:
        """`request` leaves: nothing more is launched for it."""
        for number, held in enumerate(self.requests):
            if held is request:
                self.prompts.leave(number)

    def staying(self) -> list[int]:
        """Numbers of the parts whose request has not left."""
        return [number for number in range(len(self.requests)) if number not in self.prompts.left]

    @property
    def copied_rows(self) -> int:
        """Rows of a layer that copies move, earlier ones and its own."""
        return sum(self.part(number).stop for number in self.staying())

    def may_enter(self, layer: int) -> bool:
        """Tell whether what the next unit of `layer` waits for was seen."""
        fences = self.slab_staged.get(layer - SLAB_LAYERS), self.refilled.get(layer)
        return all(fence is None or fence.done() for fence in fences)


class Prefill:
    """Launches passes, their units, and what follows them."""

    def __init__(
        self,
        runner: Runner,
        streams: Streams,
        state: DeviceState,
        sampler: SamplerState,
        swap: Swap,
        seats: Seats,
        *,
        pass_tokens: int,
        groups: LayerGroups,
        drafts: bool = False,
        outputs: StepOutputs,
        warm_start: TopkBuffers,
        staging: Callable[[RunningRequest, int, int], None],
    ) -> None:
        """`staging` is told of each layer group that is staged: of what request, of rows below which position."""
        self._runner = runner
        self._drafts = drafts
        self._streams = streams
        self._state = state
        self._sampler = sampler
        self._swap = swap
        self._seats = seats
        self._groups = groups
        self._outputs = outputs
        self._outputs_with_logprobs = replace(outputs, logprobs=allocate_rows(1, state.rows.device))
        self._warm_starts = warm_start
        self._staging = staging
        device = state.rows.device
        width = pass_tokens + PARTS_MAX
        self._ring = Ring([host_tensor(width, dtype=torch.int64, device=device) for _ in range(RING_BUFFERS)])
        self._tokens = torch.zeros(PASSES_MAX, width, dtype=torch.int64, device=device)
        self._first_tokens = host_tensor(state.seats, dtype=torch.int32, device=device)
        self._first_logprobs = host_tensor(state.seats, ROW_WORDS_MAX, dtype=torch.int32, device=device)

    def begin(self, taken: Sequence[tuple[RunningRequest, int, int]], place: int) -> LaunchedPass:
        """Begin a pass of requests with the positions start..stop-1 that it takes of each. `place`: how many passes are
        open already."""
        requests = tuple(request for request, _, _ in taken)
        firsts = accumulate((stop - start for _, start, stop in taken), initial=0)
        parts = tuple(
            PromptPart(request.seat, start, stop, first, stop == request.prompt_tokens)
            for (request, start, stop), first in zip(taken, firsts, strict=False)
        )
        for request, _, stop in taken:
            self._seats.take_slab(request, stop)
        self._seats.flush()
        tokens, following = self._upload(taken, place)
        for request in requests:
            if request.prefix_load is not None:
                self._streams.compute.wait(request.prefix_load)
                request.prefix_load = None
        prompts = self._runner.begin_pass(self._streams, self._state, parts, tokens)
        before = dict.fromkeys(range(-SLAB_LAYERS, 0), self._swap.slab_staged())
        this = LaunchedPass(requests, prompts, following, {}, {}, before)
        for number, part in enumerate(parts):
            self._note_places(this, number, part)
        if this.earlier:
            self._swap.await_staged()
            self._refill(this, 0)
        return this

    def launch(self, this: LaunchedPass, unit: PassUnit, rows: int = 0) -> None:
        """Launch a unit, the staging of what it has written and, ahead of the first one of a layer, the refill of the
        next layer. `rows`: of the group's round."""
        where = unit.layer, unit.first, unit.stop

        def launch(written: UnitWritten) -> None:
            self._runner.launch_unit(self._streams, self._state, this.prompts, *where, written, rows)

        self._launch(this, unit, launch)

    def launch_split(self, this: LaunchedPass, unit: PassUnit, span: PassUnit, owner: int) -> None:
        """`launch` of a unit of a pass that this rank, its `owner`, splits with others: rows of the `span` of all."""
        runner = cast(GroupRunner, self._runner)
        launch = partial(runner.launch_split, self._streams, self._state, this.prompts, unit, owner)
        self._launch(this, span, launch)

    def _launch(self, this: LaunchedPass, unit: PassUnit, launch: Callable[[UnitWritten], None]) -> None:
        if not unit.first:
            self._await_slab(this, unit.layer)
            self._refill(this, unit.layer + 1)
        launch(partial(self._written, this, unit))
        for number, piece in this.prompts.pieces(unit.first, unit.stop):
            if piece.ends:
                self._fill(this, number, unit.layer)

    def end(self, this: LaunchedPass, number: int) -> None:
        """End a part behind the last unit: launch the draft layer's rows, and give its slab pages back. Of a part that
        ends its prompt `draw` does both, if there is a draft layer."""
        if self._drafts:
            if this.part(number).ends:
                return
            self._launch_drafts(this, number, following=this.following[number : number + 1])
        self._seats.free_slab(this.requests[number])

    def draw(self, this: LaunchedPass, number: int) -> None:
        """Launch, behind the last unit, the first token of a part that ends its prompt; `first_token` is set then. Its
        request has a mask, if it has a grammar."""
        request = this.requests[number]
        outputs = self._outputs_with_logprobs if request.logprob_words else self._outputs
        self._runner.launch_first_token(self._streams, self._sampler, this.prompts, number, outputs, request.adjust)
        if self._drafts:
            self._launch_drafts(this, number, outputs=outputs)
            self._seats.free_slab(request)
        selected = self._state.geometry.topk * self._state.geometry.slot_tokens
        if request.prefills_only and request.prompt_tokens > selected:  # else any buffer holds it
            request.topk_place = self._warm_starts.take()
        keep = partial(self._keep, outputs, request.seat, request.topk_place)
        self._streams.compute.launch("keep results", keep)
        request.first_token = self._streams.compute.record("sampled")

    def first_token(self, seat: int) -> int:
        """What prefill drew for `seat`; read it once the request's `first_token` fence is complete."""
        return int(self._first_tokens[seat])

    def first_logprobs(self, request: RunningRequest) -> bytes:
        """Likewise the row of it, as far as the request asks for log-probabilities."""
        return self._first_logprobs.numpy()[request.seat, : request.logprob_words].tobytes()

    def _launch_drafts(
        self,
        this: LaunchedPass,
        number: int,
        *,
        outputs: StepOutputs | None = None,
        following: Tensor | None = None,
    ) -> None:
        runner, layer = cast(DraftRunner, self._runner), self._state.geometry.layers - 1
        self._await_slab(this, layer)
        runner.launch_prompt_drafts(self._streams, self._state, self._sampler, this.prompts, number, outputs, following)
        self._stage(this, [(number, this.part(number))], layer)
        self._await_refill(this, layer)
        self._fill(this, number, layer)

    def _written(self, this: LaunchedPass, unit: PassUnit) -> None:
        """Rows of `unit` are written, and attend next. Staging does not wait for earlier rows."""
        self._stage(this, list(this.prompts.pieces(unit.first, unit.stop)), unit.layer)
        self._await_refill(this, unit.layer)

    def _note_places(self, this: LaunchedPass, number: int, part: PromptPart) -> None:
        request, memory = this.requests[number], this.requests[number].memory
        if part.start:
            this.earlier[number] = self._swap.refill_places(memory.slab, memory.host_pages, part.start)
        if part.ends and not request.prefills_only:
            request.is_filling = True
            this.filled[number] = self._swap.fill_places(memory.slab, memory.hot, memory.index_pages, part.stop)

    def _await_slab(self, this: LaunchedPass, layer: int) -> None:
        """Rows of `layer` are written next."""
        fence = this.slab_staged.pop(layer - SLAB_LAYERS, None)
        if fence is not None:
            self._streams.compute.wait(fence)

    def _await_refill(self, this: LaunchedPass, layer: int) -> None:
        fence = this.refilled.pop(layer, None)
        if fence is not None:
            self._streams.compute.wait(fence)

    def _refill(self, this: LaunchedPass, layer: int) -> None:
        """Load the earlier rows of a layer that is there; rows of the draft layer for hot buffers alone."""
        is_draft, places = layer >= self._runner.info.layers, list[Tensor]()
        for number in this.staying() if layer < self._state.geometry.layers else ():
            if not is_draft or number in this.filled:
                places += this.earlier.get(number, ())
        if places:
            this.refilled[layer] = self._swap.refill(places, layer)

    def _fill(self, this: LaunchedPass, number: int, layer: int) -> None:
        if number in this.filled:
            self._swap.fill(this.filled[number], layer)

    def _stage(self, this: LaunchedPass, pieces: Sequence[tuple[int, PromptPart]], layer: int) -> None:
        """`layer` of `pieces` is written."""
        if not pieces:
            return
        rows, group = list[StagedRows](), self._groups.ending_with(layer)
        for number, piece in pieces:
            memory = this.requests[number].memory
            rows.append(StagedRows(memory.slab, memory.index_pages, memory.host_pages, piece.start, piece.stop))
        this.slab_staged[layer] = self._swap.stage(rows, layer)
        if group is not None:
            for number, piece in pieces:
                self._staging(this.requests[number], group, piece.stop)

    def _upload(self, taken: Sequence[tuple[RunningRequest, int, int]], place: int) -> tuple[Tensor, Tensor]:
        """The tokens of a pass on the device, and the one behind each part (0 behind a whole prompt)."""
        given = np.concatenate(
            [request.prompt[start:stop] for request, start, stop in taken]
            + [request.prompt[stop : stop + 1] if stop < request.prompt_tokens else [0] for request, _, stop in taken]
        )
        buffer, target = self._ring.next(), self._tokens[place, : len(given)]
        buffer.numpy()[: len(given)] = given
        upload = partial(target.copy_, buffer[: len(given)], non_blocking=True)
        self._streams.compute.launch("upload prompt", upload)
        self._ring.launched(self._streams.compute.record("inputs_consumed"))
        rows = len(given) - len(taken)
        return target[:rows], target[rows:]

    def _keep(self, outputs: StepOutputs, seat: int, topk_place: int | None) -> None:
        self._first_tokens[seat : seat + 1].copy_(outputs.tokens[:1], non_blocking=True)
        if outputs.logprobs is not None:
            self._first_logprobs[seat].copy_(outputs.logprobs[0], non_blocking=True)
        if topk_place is not None and outputs.warm_start is not None:
            self._warm_starts[topk_place].copy_(outputs.warm_start, non_blocking=True)
