"""The hash runner with a draft layer: rows, keys and a selection like the other layers', of hashes of the model's state
and the token behind it. Its drafts are hashes too: right ones are given by tests/support/drafting_rig.py. What both are
of a text, over plain tensors, is `DraftOracle`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.rows import read_index_keys, write_index_keys, write_prompt_index_keys, write_slab_rows
from kernels.state import DeviceState, StepBatch, real_rows
from tests.support.fakes.hash_runner import (
    BLOCK_TOKENS,
    SHARED,
    VOCAB,
    FakePass,
    FakeRunner,
    attend,
    embed,
    geometry_of,
    keys_of,
    mix,
    rows_of,
    select,
)
from worker.runners.base import DraftRows, PromptPass, SamplerState, StepOutputs
from worker.runners.swapping import launch_selection
from worker.streams import Streams


class DraftingFakeRunner(FakeRunner):
    """See worker/runners/base.py: DraftRunner."""

    def __init__(
        self, groups: Sequence[int] = SHARED, *, eos: tuple[int, ...] = (), block_tokens_max: int = BLOCK_TOKENS
    ) -> None:
        super().__init__(groups, eos=eos, block_tokens_max=block_tokens_max)
        self.layers = len(groups)
        self.geometry = geometry_of((*groups, groups[-1] + 1))
        self._outputs: dict[int, Tensor] = {}

    def launch_prompt_drafts(
        self,
        streams: Streams,
        state: DeviceState,
        sampler: SamplerState,
        prompts: PromptPass,
        number: int,
        outputs: StepOutputs | None = None,
        following: Tensor | None = None,
    ) -> None:
        assert isinstance(prompts, FakePass)
        assert (outputs is None) != (following is None)
        work = partial(self._write_prompt, prompts, number, state, sampler, outputs, following)
        streams.compute.launch("prompt draft layer", work)

    def launch_draft(
        self, streams: Streams, state: DeviceState, sampler: SamplerState, batch: StepBatch, draft: DraftRows
    ) -> None:
        scratch, compute = self._scratch_for(len(batch.seats), state.rows.device), streams.compute
        group = self.geometry.group_of_layer[self.layers]
        compute.launch("enter draft", partial(self._enter_draft, len(batch.seats), draft))
        select, selection = partial(self._select, scratch, state, batch, group), (scratch.topk, batch)
        loaded = launch_selection(streams, state, group, select, *selection, scratch.out_rows, scratch.plan)
        compute.launch("project", partial(self._project, scratch, state, batch, self.layers))
        if self.layers in loaded:
            compute.wait(loaded[self.layers])
        compute.launch("attend", partial(self._attend, scratch, state, self.layers))
        compute.launch("draft", partial(self._draft, len(batch.seats), batch, draft))

    def launch_draft_rows(self, streams: Streams, state: DeviceState, batch: StepBatch, draft: DraftRows) -> None:
        self._scratch_for(len(batch.seats), state.rows.device)
        streams.compute.launch("enter draft", partial(self._enter_draft, len(batch.seats), draft))
        streams.compute.launch("write draft rows", partial(self._write_rows, len(batch.seats), state, batch))

    def _write_rows(self, rows: int, state: DeviceState, batch: StepBatch) -> None:
        scratch, group = self._scratch[rows], self.geometry.group_of_layer[self.layers]
        write_index_keys(state, group, batch, _bytes(keys_of(scratch.hidden, group).unsqueeze(1)))
        self._project(scratch, state, batch, self.layers)

    def _write_prompt(
        self,
        prompts: FakePass,
        number: int,
        state: DeviceState,
        sampler: SamplerState,
        outputs: StepOutputs | None,
        following: Tensor | None,
    ) -> None:
        part, group = prompts.parts[number], self.geometry.group_of_layer[self.layers]
        behind = sampler.last_token[part.seat : part.seat + 1].long() if following is None else following
        tokens = torch.cat((prompts.tokens[part.first + 1 : part.end], behind))
        hidden = mix(prompts.hidden[part.first : part.end] + embed(tokens))
        write_slab_rows(state, self.layers, part.seat, part.start, _bytes(rows_of(hidden, self.layers)))
        write_prompt_index_keys(state, group, part.seat, part.start, _bytes(keys_of(hidden, group).unsqueeze(1)))
        if outputs is not None and outputs.warm_start is not None:
            keys = read_index_keys(state, group, part.seat, part.stop).view(torch.int64).view(1, -1)
            outputs.warm_start[group] = select(hidden[-1:], keys, torch.ones_like(keys, dtype=torch.bool))[0]

    def _enter_draft(self, rows: int, draft: DraftRows) -> None:
        hidden = self._scratch[rows].hidden
        if draft.source is not None:
            hidden = self._outputs[draft.source_rows][draft.source.long().clamp(min=0)]
        self._scratch[rows].hidden = mix(hidden + embed(draft.following.clamp(min=0)))

    def _draft(self, rows: int, batch: StepBatch, draft: DraftRows) -> None:
        self._outputs[rows] = self._scratch[rows].hidden.clone()
        drafts = (mix(self._outputs[rows]).abs() % VOCAB).int()
        draft.tokens.copy_(drafts.masked_fill(~real_rows(batch), -1))


class DraftOracle:
    """What the layer writes and draws of one text. `tokens` are its prompt and output, `states` int64[n] those that
    the model computed of its first n positions; `groups` are the model's."""

    def __init__(self, tokens: Sequence[int], states: Tensor, groups: Sequence[int]) -> None:
        self._layer, self._group = len(groups), groups[-1] + 1
        self._entered = mix(states + embed(torch.tensor(tokens[1 : len(states) + 1])))
        self.rows, self.keys = rows_of(self._entered, self._layer), keys_of(self._entered, self._group)

    def draft(self, place: int, fed: Sequence[int]) -> int:
        """What it draws behind row `place`; with `fed`, behind the drafts that it was applied to from there on."""
        hidden = self._entered[place : place + 1]
        rows, keys, output = self.rows[: place + 1], self.keys[: place + 1], torch.zeros(0)
        for token in (None, *fed):
            if token is not None:
                hidden = mix(output + embed(torch.tensor([token])))
                rows = torch.cat((rows, rows_of(hidden, self._layer)))
                keys = torch.cat((keys, keys_of(hidden, self._group)))
            chosen = select(hidden, keys[None], torch.ones_like(keys[None], dtype=torch.bool))
            output = attend(hidden, rows[chosen.clamp(min=0)], chosen >= 0)
        return int(mix(output).abs() % VOCAB)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)
