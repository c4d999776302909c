"""Prefill: prompt passes through the runner into the slab, and behind them, layer group by layer group, to host memory.

The slab is chunks of the hot arena, held by a request from admission until `staged`. A prefix of a prompt is being
loaded into the slab and the index pages since admission. A pass waits for what it reads: for the index keys of its
prompts as a whole, for their rows before a unit of the layer group attends.

Each pass that is open has a place of its own for its tokens on the device. First tokens, and their log-probabilities,
are kept in one place per seat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import cast

import numpy as np
import torch
from torch import Tensor

from kernels.state import DeviceState
from protocol.logprobs import ROW_WORDS_MAX
from worker.device.passes import PASSES_MAX, PassUnit
from worker.device.pinned import host_tensor
from worker.loop.batch import INDEX_KEYS, RunningRequest
from worker.loop.inputs import RING_BUFFERS, Ring
from worker.loop.prompt_order import PARTS_MAX
from worker.loop.swap import Swap
from worker.loop.warm_start import TopkBuffers
from worker.runners.base import DraftRunner, PromptPart, PromptPass, Runner, SamplerState, StepOutputs
from worker.runners.logprobs import allocate_rows
from worker.streams import Streams
from worker.transfer.layer_groups import LayerGroups


@dataclass(eq=False)
class LaunchedPass:
    """A pass that was begun: by number of its part, the request and, on the device, the token behind the part."""

    requests: tuple[RunningRequest, ...]
    prompts: PromptPass
    following: Tensor  # int64[parts]

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


class Prefill:
    """Launches passes, their units, and what follows them."""

    def __init__(
        self,
        runner: Runner,
        streams: Streams,
        state: DeviceState,
        sampler: SamplerState,
        swap: Swap,
        *,
        pass_tokens: int,
        groups: LayerGroups,
        drafts: bool = False,
        outputs: StepOutputs,
        warm_start: TopkBuffers,
        staging: Callable[[RunningRequest, int, int], None],
    ) -> None:
        """`staging` is told of each launch: of what request, which layer group, of rows below which position."""
        self._runner = runner
        self._drafts = drafts
        self._streams = streams
        self._state = state
        self._sampler = sampler
        self._swap = swap
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
        tokens, following = self._upload(taken, place)
        for request in requests:
            self._await_prefix(request, INDEX_KEYS)
        prompts = self._runner.begin_pass(self._streams, self._state, parts, tokens)
        return LaunchedPass(requests, prompts, following)

    def launch(self, this: LaunchedPass, unit: PassUnit, rows: int = 0) -> None:
        """Launch a unit and the staging of what it has written. `rows`: of the group's round."""
        written = partial(self._written, this, unit)
        where = unit.layer, unit.first, unit.stop
        self._runner.launch_unit(self._streams, self._state, this.prompts, *where, written, rows)

    def end(self, this: LaunchedPass, number: int) -> None:
        """Launch, behind the last unit, the draft layer's rows of a part that does not end its prompt."""
        if self._drafts:
            following = this.following[number : number + 1]
            self._launch_drafts(this, number, following=following)

    def draw(self, this: LaunchedPass, number: int) -> None:
        """Launch, behind the last unit, the first token of a part that ends its prompt; `first_token` is set then. Its
        request has a mask, if it has a grammar."""
        request = this.requests[number]
        outputs = self._outputs_with_logprobs if request.logprob_words else self._outputs
        self._runner.launch_first_token(self._streams, self._sampler, this.prompts, number, outputs, request.adjust)
        if self._drafts:
            self._launch_drafts(this, number, outputs=outputs)
        if request.prefills_only and request.prompt_tokens > self._state.geometry.topk:  # else any buffer holds it
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
        runner, part = cast(DraftRunner, self._runner), this.part(number)
        runner.launch_prompt_drafts(self._streams, self._state, self._sampler, this.prompts, number, outputs, following)
        layer = self._state.geometry.layers - 1
        self._stage(this.requests[number], part.start, part.stop, layer)
        self._await_prefix(this.requests[number], layer)

    def _written(self, this: LaunchedPass, unit: PassUnit) -> None:
        """Rows of `unit` are written, and attend next. Staging does not wait for a prefix."""
        for number, piece in this.prompts.pieces(unit.first, unit.stop):
            self._stage(this.requests[number], piece.start, piece.stop, unit.layer)
            self._await_prefix(this.requests[number], unit.layer)

    def _await_prefix(self, request: RunningRequest, layer: int) -> None:
        fence = request.prefix_loads.pop(layer, None)
        if fence is not None:
            self._streams.compute.wait(fence)

    def _stage(self, request: RunningRequest, start: int, stop: int, layer: int) -> None:
        """`layer` of start..stop-1 is written: stage its group, if that is whole now."""
        group = self._groups.ending_with(layer)
        if group is None:
            return
        memory, layers = request.memory, self._groups.layers(group)
        self._swap.stage(memory.slab, memory.index_pages, memory.host_pages, start, stop, layers)
        self._staging(request, group, stop)

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
