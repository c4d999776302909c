"""A text for prompts, and how one goes through passes and units, as the executor does, for tests of a runner alone."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from kernels.state import DeviceState
from tests import ROOT
from worker.runners.adjust import Adjust
from worker.runners.base import PromptPart, PromptPass, Runner, SamplerState, StepOutputs
from worker.streams import Streams

PASS_TOKENS = 8_192
#: Prompts are cut from it. No edit of the product changes it, and with it near-ties and the drafts that are accepted.
TEXT: Final = b" ".join((ROOT / "LICENSE").read_bytes().split()) * 8


def launch_prompt(
    runner: Runner,
    streams: Streams,
    state: DeviceState,
    sampler: SamplerState,
    seat: int,
    tokens: Tensor,
    start: int,
    outputs: StepOutputs | None,
    *,
    adjust: Adjust | None = None,
    following: Tensor | None = None,
    block: int = 0,
    pass_tokens: int = PASS_TOKENS,
    rows: int = 0,
) -> None:
    """Compute `tokens` int64[S], at positions from `start` on of the prompt in `seat`, alone in their passes.

    With `outputs` they end the prompt; without, a draft layer needs `following` int64[1] behind them. Units have at
    most `block` rows, by default as many as the runner takes; `rows` is the size of a group's round.
    """
    runner_of_drafts: Any = runner if runner.geometry.layers > runner.info.layers else None
    for first in range(0, len(tokens), pass_tokens):
        given = tokens[first : first + pass_tokens]
        behind = tokens[first + pass_tokens :][:1] if first + pass_tokens < len(tokens) else following
        ends = outputs is not None and first + pass_tokens >= len(tokens)
        part = PromptPart(seat, start + first, start + first + len(given), 0, ends)
        prompts = runner.begin_pass(streams, state, [part], given)
        launch_layers(runner, streams, state, prompts, block=block, rows=rows)
        last = outputs if ends else None
        if last is not None:
            runner.launch_first_token(streams, sampler, prompts, 0, last, adjust)
        if runner_of_drafts is not None:
            runner_of_drafts.launch_prompt_drafts(streams, state, sampler, prompts, 0, last, None if ends else behind)


def launch_layers(
    runner: Runner, streams: Streams, state: DeviceState, prompts: PromptPass, *, block: int = 0, rows: int = 0
) -> None:
    """All units of a pass."""
    size = block or runner.block_tokens_max
    for layer in range(runner.info.layers):
        for first in range(0, prompts.rows, size):
            stop = min(first + size, prompts.rows)
            runner.launch_unit(streams, state, prompts, layer, first, stop, rows=rows)
