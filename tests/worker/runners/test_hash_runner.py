"""The hash runner of other tests against its oracle, whatever the units of prompts are."""

from __future__ import annotations

import pytest

from tests.support.fakes.drafting_runner import DraftingFakeRunner, DraftOracle
from tests.support.fakes.hash_runner import SEPARATE, SHARED, VOCAB, FakeRunner, computed, expected_tokens
from tests.support.runner_rig import Rig

PROMPT = [(37 * place + 11) % VOCAB for place in range(150)]


@pytest.mark.parametrize("groups", [SHARED, SEPARATE])
@pytest.mark.parametrize(("block", "pass_tokens"), [(150, 150), (32, 150), (7, 64)])
def test_tokens_are_those_of_the_oracle(groups: tuple[int, ...], block: int, pass_tokens: int) -> None:
    runner = FakeRunner(groups, block_tokens_max=block)
    rig = Rig(runner, seats=1, context_tokens=200, pass_tokens=pass_tokens)
    drawn = [rig.open(0, PROMPT, hot_slots=64)[0]]
    while len(drawn) < 6:
        drawn += rig.decode([0])[0]
    assert drawn == expected_tokens(PROMPT, 6, 0, groups)


def test_draft_layer_has_the_rows_of_the_oracle() -> None:
    runner = DraftingFakeRunner(block_tokens_max=20)
    rig = Rig(runner, seats=1, context_tokens=200, pass_tokens=70)
    drawn = [rig.open(0, PROMPT, hot_slots=0)[0]]
    tokens, states = computed(PROMPT, 2, 0, len(PROMPT))
    (second,), _ = rig.decode([0])
    assert [*drawn, second] == tokens
    draft = rig.draft([0], [second])
    oracle = DraftOracle([*PROMPT, *tokens], states, SHARED)
    assert draft.tokens.tolist() == [oracle.draft(len(PROMPT), ())]


def test_poisoned_prompt_raises_at_its_first_token() -> None:
    runner = FakeRunner(poison=3)
    rig = Rig(runner, seats=2, context_tokens=200)
    rig.open(0, PROMPT, hot_slots=0, seed=2)
    with pytest.raises(ValueError, match="poisoned"):
        rig.open(1, PROMPT, hot_slots=0, seed=3)
