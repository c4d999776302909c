"""A plain reference of adjusted and held draws, over the logits of the model library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from protocol.grammars import Matcher, Vocabulary
from protocol.messages import Sampling
from protocol.text import ByteTokenizer
from tests.worker.runners.test_adjust import expected
from worker.runners.sampling import sample

#: A token may differ from the reference's where their adjusted logits are closer than this.
TIE_BOUND = 1e-3


class Judge:
    """Of a checkpoint whose tokens are bytes."""

    def __init__(self, model: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.eos = int(self._model.generation_config.eos_token_id)

    def logits(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """float32[tokens of `output`, vocab]: what each was drawn from, before all adjustments."""
        with torch.inference_mode():
            found: torch.Tensor = self._model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        return found.float()

    def wrong_from(self, prompt: list[int], output: list[int], sampling: Sampling) -> int:
        """The first place of `output` that the reference does not give, up to ties; -1: none."""
        return wrong_from(self.logits(prompt, output), prompt, output, sampling, self.eos)


def wrong_from(logits: torch.Tensor, prompt: list[int], output: list[int], sampling: Sampling, eos: int) -> int:
    """The same, from float32[tokens of `output`, vocab]."""
    masks = _allowed_after(output, sampling.grammar, logits.shape[1], eos)
    wanted = [
        expected(row.tolist(), prompt, output[:place], sampling, (eos,), mask)
        for place, (row, mask) in enumerate(zip(logits, masks, strict=True))
    ]
    rows, count = torch.tensor(wanted).float(), len(output)
    drawn = sample(
        rows,
        torch.full((count,), sampling.temperature),
        torch.full((count,), sampling.top_p),
        torch.full((count,), sampling.seed),
        torch.arange(len(prompt), len(prompt) + count),
    )
    for place, (ours, its) in enumerate(zip(output, drawn.tolist(), strict=True)):
        if ours != its and (rows[place, ours] - rows[place, its]).abs() > TIE_BOUND:
            return place
    return -1


def _allowed_after(output: list[int], grammar: str, vocab: int, eos: int) -> Iterator[set[int] | None]:
    """What `grammar` allows before each token of `output`; None: it has none."""
    matcher = Matcher(Vocabulary(ByteTokenizer(), vocab, (eos,)), grammar) if grammar else None
    for token in output:
        if matcher is None:
            yield None
            continue
        yield set(np.flatnonzero(np.unpackbits(matcher.mask(), bitorder="little")).tolist())
        if token != eos:
            matcher.push((token,))
