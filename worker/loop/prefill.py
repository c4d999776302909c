"""Prefill: one prompt chunk at a time through the runner into the slab, and behind it, layer group by layer group, to
host memory.

The slab is chunks of the hot arena, held by the request from admission until `staged`. Chunks of a fixed size from
position 0, or from the end of a shared prefix, whatever else runs, so that a prompt's rows do not depend on its
neighbours. A prefix is being loaded into the slab and the index pages since admission. The chunk waits for what it
reads: for the index keys as a whole, for rows before the layers of a layer group attend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernels.state import DeviceState
from protocol.logprobs import ROW_WORDS_MAX
from worker.device.pinned import host_tensor
from worker.loop.batch import INDEX_KEYS, RunningRequest
from worker.loop.inputs import RING_BUFFERS, Ring
from worker.loop.swap import Swap
from worker.loop.warm_start import TopkBuffers
from worker.runners.base import Runner, SamplerState, StepOutputs
from worker.runners.logprobs import allocate_rows
from worker.streams import Streams
from worker.transfer.layer_groups import LayerGroups


class Prefill:
    """Launches prompt chunks. First tokens and their log-probabilities are kept in one place per seat."""

    def __init__(
        self,
        runner: Runner,
        streams: Streams,
        state: DeviceState,
        sampler: SamplerState,
        swap: Swap,
        *,
        chunk_tokens: int,
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
        self._chunk_tokens = chunk_tokens
        buffers = [host_tensor(chunk_tokens + 1, dtype=torch.int64, device=device) for _ in range(RING_BUFFERS)]
        self._ring = Ring(buffers)
        self._tokens = torch.zeros(chunk_tokens + 1, dtype=torch.int64, device=device)
        self._first_tokens = host_tensor(state.seats, dtype=torch.int32, device=device)
        self._first_logprobs = host_tensor(state.seats, ROW_WORDS_MAX, dtype=torch.int32, device=device)

    def launch_chunk(self, request: RunningRequest) -> bool:
        """Launch the next chunk of `request` and its staging; whether it was the last, with `first_token` set then."""
        start = request.prefilled
        stop = min(start + self._chunk_tokens, request.prompt_tokens)
        last = stop == request.prompt_tokens
        tokens, outputs = self._upload(request, start, stop), self._outputs_of(request) if last else None
        behind = {} if last or not self._drafts else {"following": self._tokens[stop - start : stop - start + 1]}
        self._await_prefix(request, INDEX_KEYS)
        written = partial(self._written, request, start, stop)
        self._runner.launch_prefill_chunk(
            self._streams,
            self._state,
            self._sampler,
            request.seat,
            tokens,
            start,
            outputs,
            written,
            request.adjust,
            **behind,
        )
        if outputs is not None:
            if request.prefills_only and request.prompt_tokens > self._state.geometry.topk:  # else any buffer holds it
                request.topk_place = self._warm_starts.take()
            keep = partial(self._keep, outputs, request.seat, request.topk_place)
            self._streams.compute.launch("keep results", keep)
            request.first_token = self._streams.compute.record("sampled")
        request.prefilled = stop
        return last

    def first_token(self, seat: int) -> int:
        """What prefill drew for `seat`; read it once the request's `first_token` fence is complete."""
        return int(self._first_tokens[seat])

    def first_logprobs(self, request: RunningRequest) -> bytes:
        """Likewise the row of it, as far as the request asks for log-probabilities."""
        return self._first_logprobs.numpy()[request.seat, : request.logprob_words].tobytes()

    def _outputs_of(self, request: RunningRequest) -> StepOutputs:
        return self._outputs_with_logprobs if request.logprob_words else self._outputs

    def _written(self, request: RunningRequest, start: int, stop: int, layer: int) -> None:
        """`layer` of start..stop-1 is written, and attends next. Staging does not wait for the prefix."""
        self._stage(request, start, stop, layer)
        self._await_prefix(request, layer)

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

    def _upload(self, request: RunningRequest, start: int, stop: int) -> Tensor:
        """The tokens of a chunk on the device; the one behind it follows them."""
        given = request.prompt[start : stop + 1]
        buffer, target = self._ring.next(), self._tokens[: len(given)]
        buffer.numpy()[: len(given)] = given
        upload = partial(target.copy_, buffer[: len(given)], non_blocking=True)
        self._streams.compute.launch("upload prompt", upload)
        self._ring.launched(self._streams.compute.record("inputs_consumed"))
        return self._tokens[: stop - start]

    def _keep(self, outputs: StepOutputs, seat: int, topk_place: int | None) -> None:
        self._first_tokens[seat : seat + 1].copy_(outputs.tokens[:1], non_blocking=True)
        if outputs.logprobs is not None:
            self._first_logprobs[seat].copy_(outputs.logprobs[0], non_blocking=True)
        if topk_place is not None and outputs.warm_start is not None:
            self._warm_starts[topk_place].copy_(outputs.warm_start, non_blocking=True)
