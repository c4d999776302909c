"""Requests with grammars on ranks of a group: tokens are those of a plain reference over the model library's logits,
also where masks are late, and no rank waits for the masks of another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.messages import Sampling
from tests.support.checkpoints import tiny_checkpoint
from tests.support.group_rig import HELD, LATE, Ask, Drawn, GroupRig
from tests.support.prompts import TEXT
from tests.support.reference_draws import Judge
from tests.worker.group.test_ranks import SETTINGS

pytestmark = [pytest.mark.group, pytest.mark.process, pytest.mark.timeout(600)]

#: One for each number of a request; "" is none.
GRAMMARS = (
    "start: /([a-m][n-z]){60}/",
    "",
    'start: %json {"type": "array", "items": {"type": "string"}, "minItems": 9}',
)
#: For a rank that is not blocked, on busy cores.
ANSWER_LIMIT_S = 240.0


@pytest.fixture(scope="module")
def model(run_dir: Path) -> Path:
    return tiny_checkpoint(run_dir, "glm-5", index_topk=32, context_max_tokens=1_024, experts=24, layers=2)


@pytest.fixture(scope="module")
def judge(model: Path) -> Judge:
    return Judge(model)


def ask_of(number: int, grammar: str, tokens: int = 14) -> Ask:
    """Prompts of one pass and of several; some are drawn at random."""
    length = (10, 64, 130, 200)[number % 4]
    prompt = list(TEXT[number * 7 : number * 7 + length])
    return Ask(number, prompt, tokens, (0, 64)[number % 2], temperature=0.8 * (number % 2), grammar=grammar)


def wrong(judge: Judge, asks: list[Ask], drawn: list[Drawn]) -> dict[int, int]:
    """The first wrong place of each request that has one."""
    tokens = {int(number): ids for rank in drawn for number, ids in rank.tokens.items()}
    found = {}
    for ask in asks:
        sampling = Sampling(
            ask.tokens, temperature=ask.temperature, seed=ask.number, ignore_eos=True, grammar=ask.grammar
        )
        assert len(tokens[ask.number]) == ask.tokens
        found[ask.number] = judge.wrong_from(ask.prompt, tokens[ask.number], sampling)
    return {number: place for number, place in found.items() if place >= 0}


def test_ranks_draw_what_grammars_allow_while_masks_of_one_are_late(model: Path, judge: Judge, tmp_path: Path) -> None:
    """Prompts, steps, retractions with pages kept and dropped, a buffer that grows; one request goes to the other rank,
    with its pages."""
    asks = [ask_of(number, GRAMMARS[number % 3]) for number in range(8)]
    moves = [[(5, "keep", 64)], [], [(4, "drop", 64)], [(3, "resize", 0)]]
    asks = [replace(ask, moves=list(moves[ask.number % 4])) for ask in asks]
    asks[3] = replace(asks[3], next_ranks=[(7, 0)])
    rig = GroupRig(model, tmp_path, [asks[0::2], asks[1::2]], SETTINGS, masks=[LATE, ""])
    try:
        drawn = rig.drawn()
    finally:
        rig.close()
    assert not wrong(judge, asks, drawn)
    assert drawn[0].late_masks >= 3 * 13


def test_no_rank_waits_for_masks_of_another(model: Path, judge: Judge, tmp_path: Path) -> None:
    """Of two requests of rank 0, one has no mask behind its first token, and one cannot be prefilled to the end, until
    all others have ended: there and on rank 1."""
    held = [ask_of(0, GRAMMARS[0]), ask_of(4, f"{GRAMMARS[0]}\n// {HELD}")]
    others = [ask_of(1, ""), ask_of(2, GRAMMARS[0], 40), ask_of(3, "", 40)]
    rig = GroupRig(model, tmp_path, [[*held, others[0]], others[1:]], SETTINGS, masks=[HELD, ""])
    try:
        other = Drawn(**json.loads(rig.line(1, ANSWER_LIMIT_S)))
        rig.let_masks_go()
        first = Drawn(**json.loads(rig.line(0, ANSWER_LIMIT_S)))
    finally:
        rig.close()
    assert not wrong(judge, [*held, *others], [first, other])
