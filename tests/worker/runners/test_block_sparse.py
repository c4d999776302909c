"""BlockSparseRunner against the model library: MiniMax-M3's heads select blocks for themselves, and bits follow from no
hot buffer."""

from __future__ import annotations

import pytest
import torch

from tests.support.block_model import library, prompt, runner
from tests.support.runner_rig import Rig

PROMPT = 700  # of more blocks than heads select


@pytest.mark.parametrize("hot_tokens", [0, 384, 512])
@pytest.mark.parametrize("length", [PROMPT, 60])
def test_tokens_and_logits_are_the_librarys(hot_tokens: int, length: int) -> None:
    steps = 70
    wanted, logits = library(length, steps)
    rig = Rig(runner(), seats=1, context_tokens=1024)
    token, first = rig.open(0, prompt(length), hot_slots=hot_tokens)
    tokens, found = [token], [first]
    for _ in range(steps - 1):
        (token,), got = rig.decode([0])
        tokens.append(token)
        found.append(got[0])
    torch.testing.assert_close(torch.stack(found), logits, rtol=1e-3, atol=1e-3)
    assert tokens == wanted
    if hot_tokens and length > hot_tokens:
        assert rig.state.misses.sum() > 0
