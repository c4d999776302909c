"""The ends of a decode step and of a prompt, the same for all runners: tokens that go in, and draws of their logits."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.state import StepBatch, real_rows
from worker.runners.adjust import Adjust
from worker.runners.base import SamplerState, StepOutputs
from worker.runners.logprobs import write_logprobs
from worker.runners.sampling import draw


def fed_tokens(sampler: SamplerState, batch: StepBatch, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token id and the position int64[B] that each row of a step feeds; those of padding, where `real`
    bool[B] is false, mean nothing."""
    drawn = sampler.last_token[batch.seats.long().clamp(min=0)]
    tokens = torch.where(batch.inputs >= 0, batch.inputs, drawn).masked_fill(~real, 0)
    return tokens.long(), (batch.lengths.long() - 1).clamp(min=0)


def draw_step(
    logits: Tensor, sampler: SamplerState, batch: StepBatch, outputs: StepOutputs, adjust: Adjust | None
) -> None:
    """Draw the tokens of a step of its `logits` float32[B, vocab], as Runner.launch_sample says."""
    real, seats, positions = real_rows(batch), batch.seats.long().clamp(min=0), batch.lengths.long()
    if adjust is not None and adjust.grammar:
        real = real & sampler.adjust.drawn(seats)
    if adjust is not None and adjust.penalties:
        fed = torch.where(batch.inputs >= 0, batch.inputs, sampler.last_token[seats]).masked_fill(~real, 0)
        sampler.adjust.feed(seats, fed.long(), positions - 1, real)
    tokens = draw(logits, sampler, seats, positions, adjust, real)
    outputs.tokens.copy_(tokens.masked_fill(~real, -1))
    _keep_drawn(sampler.last_token, seats, tokens, real)
    if outputs.logits is not None:
        outputs.logits.copy_(logits)
    if outputs.logprobs is not None:
        write_logprobs(logits, tokens, outputs.logprobs)


def draw_first(
    logits: Tensor, seat: int, position: int, sampler: SamplerState, outputs: StepOutputs, adjust: Adjust | None
) -> None:
    """Draw the first token of a prompt in `seat`, at `position`, of `logits` float32[1, vocab]."""
    own, positions = slice(seat, seat + 1), torch.full((1,), position, device=logits.device)
    token = draw(logits, sampler, torch.full_like(positions, seat), positions, adjust)
    outputs.tokens[:1] = token
    sampler.last_token[own] = token
    if outputs.logits is not None:
        outputs.logits[:1] = logits
    if outputs.logprobs is not None:
        write_logprobs(logits, token, outputs.logprobs[:1])


def _keep_drawn(last_token: Tensor, seats: Tensor, tokens: Tensor, real: Tensor) -> None:
    """last_token[seats] = tokens where `real` bool[B]. No shape depends on data. With drafts, a seat is in several
    rows, and `verify` writes its token again."""
    numbers = torch.arange(len(last_token), device=seats.device)
    owned = (numbers.unsqueeze(1) == seats) & real
    drawn = torch.where(owned, tokens, 0).sum(1, dtype=torch.int32)
    last_token.copy_(torch.where(owned.any(1), drawn, last_token))
