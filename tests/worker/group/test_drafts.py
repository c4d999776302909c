"""Ranks that draft, as threads of this process: tokens are those of plain decoding, in deterministic mode the same bits
wherever a request is, and what ranks exchange has shapes of the round alone."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec
import pytest
import torch

from kernels.state import DeviceState, StepBatch
from protocol.settings import WorkerSettings
from tests.support.checkpoints import tiny_checkpoint
from tests.support.drafting_rig import WRONG
from tests.support.group_rig import Ask
from tests.support.history import in_turn
from tests.support.prompts import TEXT
from tests.support.thread_ranks import run_ranks
from tests.support.worker_rig import Rig
from worker.runners import invariance
from worker.runners.base import DraftRows, DraftRunner, SamplerState
from worker.runners.tiny import FAMILIES
from worker.streams import Streams

DRAFTS = 2
SETTINGS = WorkerSettings(
    seats=4,
    hot_size_classes=(64, 128, 256),
    tail_slots=2 * (1 + DRAFTS),
    pass_tokens=64,
    context_max_tokens=512,
    host_mem="32MiB",
    device_mem="32MiB",
    dtype="float32",
    draft_tokens=DRAFTS,
    gap_target_ms=0.0,  # requests decode together
)


@pytest.fixture(scope="module", params=[in_turn(FAMILIES)])
def checkpoint(request: pytest.FixtureRequest, run_dir: Path) -> Path:
    """Take one family each commit, DeepSeek-V3.2 with weights in FP8, which a CPU decodes; drafts are mostly right."""
    about = {"index_topk": 32, "context_max_tokens": 512, "layers": 2, "predictable": True}
    return tiny_checkpoint(run_dir, request.param, **about, fp8=request.param == "deepseek-v3.2")


def ask(
    number: int, tokens: int, hot_slots: int, moves: list[tuple[int, str, int]] | None = None, grammar: str = ""
) -> Ask:
    """Every second one is sampled."""
    prompt = list(TEXT[300 * number : 330 * number + 60])
    return Ask(
        number, prompt, tokens, hot_slots, temperature=0.7 * (number % 2), moves=list(moves or ()), grammar=grammar
    )


def asks() -> list[list[Ask]]:
    """The second rank has none for a while at the end; requests are retracted and resized meanwhile. One has a grammar,
    so that the draft layer follows later on its rank."""
    return [
        [ask(0, 30, 128), ask(1, 24, 0, [(6, "keep", 128), (12, "drop", 64)]), ask(2, 20, 128, [(5, "resize", 0)])],
        [ask(3, 8, 256), ask(4, 10, 128, grammar="start: /([a-m][n-z]){60}/")],
    ]


def test_ranks_give_the_tokens_of_plain_decoding(checkpoint: Path) -> None:
    drafting = run_ranks(checkpoint, asks(), SETTINGS)
    plain = run_ranks(checkpoint, asks(), msgspec.structs.replace(SETTINGS, draft_tokens=0))
    assert drafting.tokens == plain.tokens
    assert drafting.shapes[0] == drafting.shapes[1], "the same exchanges, of the same shapes"
    assert drafting.accepted > 10


def spoil_drafts(rank: int, rig: Rig) -> None:
    """Every third draft is a token that the model does not draw there: rows are taken in other steps."""
    runner = cast(DraftRunner, rig.runner)
    launch = runner.launch_draft

    def launch_draft(
        streams: Streams, state: DeviceState, sampler: SamplerState, batch: StepBatch, draft: DraftRows
    ) -> None:
        launch(streams, state, sampler, batch, draft)
        streams.compute.launch("spoil", lambda: draft.tokens.masked_fill_(batch.lengths % 3 == rank, WRONG))

    runner.launch_draft = launch_draft  # type: ignore[method-assign]


def test_bits_are_those_of_a_request_alone_wherever_it_is(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic: on another rank, in other company, retracted with rows kept and dropped, with other drafts."""
    monkeypatch.setattr(invariance, "TRIALS", 4)  # of the check at start, which others test
    settings = msgspec.structs.replace(SETTINGS, deterministic=True, pass_tokens=64)
    company = [ask(9, 14, 64), ask(8, 12, 0)]
    moved = [(5, "keep", 64), (9, "drop", 128)]
    alone = run_ranks(checkpoint, [[ask(0, 16, 128), ask(1, 16, 0)], []], settings)
    beside = run_ranks(
        checkpoint,
        [[company[0], ask(1, 16, 128, moved)], [ask(0, 16, 64, moved), company[1]]],
        settings,
        on_rig=spoil_drafts,
    )
    assert any(alone.depths[place] != beside.depths[place] for place in alone.depths), "in other rows of their steps"
    assert alone.tokens.items() <= beside.tokens.items()
    assert alone.logits.keys() <= beside.logits.keys()
    assert [place for place, logits in alone.logits.items() if not torch.equal(logits, beside.logits[place])] == []
