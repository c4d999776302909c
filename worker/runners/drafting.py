"""What the draft layer (MTP module) adds to a layer: what goes in, what comes out, and its rows of a prompt.

    x = eh_proj [enorm(embedding of the token at p + 1), hnorm(h at p)]        y = shared_head.norm(layer of x)

`h` is the output of the model's final norm, for further drafts the layer's own `y`. Logits of p + 2 are lm_head of `y`.
The model library's MtpModel, SGLang's deepseek_nextn.py and vLLM since its pull request 45895 do so. The layer between
is one like the model's (layers.py), with rows and index keys of position p (docs/architecture.md says why not p + 1).

A prompt needs the layer's rows and index keys alone: no attention, no experts, nothing of other ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.rows import (
    new_keys,
    new_rows,
    write_index_keys,
    write_new_rows,
    write_prompt_index_keys,
    write_slab_rows,
)
from kernels.state import DeviceState, StepBatch, real_rows
from protocol.errors import InternalError
from worker.runners import attention as mla
from worker.runners.base import DraftRows
from worker.runners.layers import Angles, Layer, Layers
from worker.runners.prompt import PromptAttention
from worker.runners.sampling import draw
from worker.weights.modules import Activations

if TYPE_CHECKING:
    from worker.runners.base import SamplerState


class Drafting:
    """The draft layer of `layers`, which must hold one."""

    def __init__(self, layers: Layers, prompt: PromptAttention) -> None:
        if layers.draft is None:
            raise InternalError("this runner was loaded without the draft layer")
        self._layers, self._prompt = layers, prompt
        self.layer: Layer = layers.draft

    def enter(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """x [N, S, hidden] of states `hidden` and of the `tokens` int64[N, S] behind them."""
        embedded, module = self._layers.embed_tokens(tokens), self.layer.module
        pair = mla.normed(module.enorm, embedded), mla.normed(module.hnorm, hidden)
        entered: Tensor = module.eh_proj(torch.cat(pair, dim=-1))
        return entered

    def enter_step(self, draft: DraftRows, real: Tensor, hidden: Tensor) -> Tensor:
        """`enter` for the rows of a step, whose states are `hidden` [B, 1, hidden]. `real` bool[B] tells padding."""
        tokens = draft.following.masked_fill(~real, 0).clamp(min=0)
        return self.enter(tokens.unsqueeze(1), hidden)

    def draw(self, output: Tensor, sampler: SamplerState, batch: StepBatch, draft: DraftRows) -> None:
        """Draw the drafts of the rows whose y is `output` [B, 1, hidden]."""
        logits, real = self._layers.head(output), real_rows(batch)
        seats, positions = batch.seats.long().clamp(min=0), batch.lengths.long() + 1
        tokens = draw(logits, sampler, seats, positions, None, real)
        draft.tokens.copy_(tokens.masked_fill(~real, -1))
        if draft.logits is not None:
            draft.logits.copy_(logits)

    def write_step(self, state: DeviceState, batch: StepBatch, entered: Activations, angles: Angles) -> None:
        """Rows and index keys of a step, of the layer's norm `entered` [B, 1, hidden] of its x."""
        layers, layer = self._layers, self.layer
        targets = new_rows(state, layer.number, batch), new_keys(state, layer.group, batch)
        rows, keys = layers.kept(layer, entered, angles, targets)
        if rows is not None:
            write_new_rows(state, layer.number, batch, rows.squeeze(1))
        if keys is not None:
            write_index_keys(state, layer.group, batch, keys.squeeze(1))

    def write_prompt(
        self, state: DeviceState, seat: int, start: int, following: Tensor, hidden: Tensor, warm_start: Tensor | None
    ) -> None:
        """Rows and index keys of prompt tokens from `start` on: its states `hidden` [1, S, hidden], and the
        tokens int64[S] behind each. `warm_start` int32[k] receives what the last one selects."""
        layers, layer = self._layers, self.layer
        at = start + len(following) - 1
        positions = torch.arange(start, at + 1, device=following.device)
        entered = layers.enter(layer, self.enter(following[None], hidden))
        angles = layers.angles(hidden, positions[None])
        rows, keys = layers.kept(layer, entered, angles)
        assert rows is not None
        assert keys is not None
        write_slab_rows(state, layer.number, seat, start, rows[0])
        write_prompt_index_keys(state, layer.group, seat, start, keys[0])
        if warm_start is not None:
            cos, sin = angles
            inputs = layers.compress(layer, Activations(entered.values[:, -1:]))
            last = layers.project_index(layer, inputs, (cos[:, -1:], sin[:, -1:]))
            self._prompt.select_last(
                state, layer.group, seat, at, last, layer.attention.indexer.softmax_scale, warm_start
            )
