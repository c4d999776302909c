"""Drafts on a GPU: the tokens of plain decoding, from graphs and without, and no turn that waits for the device."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from protocol.errors import ConfigError  # noqa: E402
from tests.gpu.syncs import no_syncs  # noqa: E402
from tests.support.checkpoints import DRAFTING  # noqa: E402
from tests.support.drafting_rig import DraftRig, drafting_settings  # noqa: E402
from tests.worker.loop import test_drafting as cpu  # noqa: E402
from tests.worker.loop import test_model as model  # noqa: E402
from worker.runners import swapping  # noqa: E402
from worker.runners.transformers_dsa import TransformersRunner  # noqa: E402
from worker.streams import Streams, make_streams  # noqa: E402

GRAPHS = pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
DRAFT_TOKENS = pytest.mark.parametrize("draft_tokens", [1, 2, 4])


def cuda() -> Streams:
    return make_streams("cuda")


@GRAPHS
@DRAFT_TOKENS
def test_moves_change_no_token(draft_tokens: int, graphs: bool) -> None:
    """Resident and managed buffers, resizes every way, keep and drop: byte for byte, since tokens are hashes."""
    cpu.a_day(DraftRig(cuda(), drafting_settings(draft_tokens, graphs=graphs), 60))


@DRAFT_TOKENS
def test_right_drafts_are_all_accepted(draft_tokens: int) -> None:
    """So the device compares and advances as it should: fewer accepted ones would change no token."""
    settings = drafting_settings(draft_tokens, lookahead_steps=1, device_mem="1MiB")
    rig = DraftRig(cuda(), settings, 100)
    life = rig.coordinator.create(0, 65, 61)
    assert rig.coordinator.admit(life, 0)
    rig.run()
    assert not rig.wrong()
    assert rig.executor.counters.steps <= 60 / (1 + draft_tokens) + 3
    rig.check_end()


def test_swap_ins_beside_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """On `swap`, which every launch of the draft layer forks to and joins again within the graph."""
    monkeypatch.setattr(swapping, "BESIDE_ROWS", 1)
    cpu.a_day(DraftRig(cuda(), drafting_settings(3), 60))


@GRAPHS
def test_no_turn_waits_for_the_device(graphs: bool) -> None:
    rig = DraftRig(cuda(), drafting_settings(2, graphs=graphs), 60)
    lives = [rig.coordinator.create(number, 70, 30, seed=number) for number in range(3)]
    with no_syncs():
        for life, hot_slots in zip(lives, (0, 64, 128), strict=True):
            assert rig.coordinator.admit(life, hot_slots)
        rig.run_until(lambda: all(len(life.tokens) > 4 for life in lives))
        assert rig.coordinator.resize(lives[2], 64)
        rig.run()
    assert not rig.wrong()
    rig.check_end()


# ---------------------------------------------------------------- the real model classes


@pytest.fixture(scope="module", params=DRAFTING)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cpu.write_predictable(tmp_path_factory.mktemp("model"), request.param)


@cache
def plain(path: Path) -> DraftRig:
    return cpu.moved_about(path, 0, cuda())


@GRAPHS
@DRAFT_TOKENS
def test_model_gives_the_tokens_of_plain_decoding(checkpoint: Path, draft_tokens: int, graphs: bool) -> None:
    """Products of more rows add in another order: where the two best logits are closer than that, either is right."""
    rig = cpu.moved_about(checkpoint, draft_tokens, cuda(), graphs=graphs)
    assert cpu.tokens_in_common(plain(checkpoint), rig) > 2 * model.NEW_TOKENS
    assert rig.executor.counters.accepted_tokens > 0


def test_draws_launched_apart_give_the_tokens_of_plain_decoding(checkpoint: Path) -> None:
    """With log-probabilities a step replays two graphs, with the draws between them: the second has the draft layer."""
    rig = cpu.moved_about(checkpoint, 2, cuda(), logprobs=1)
    assert cpu.tokens_in_common(plain(checkpoint), rig) > 2 * model.NEW_TOKENS
    assert rig.executor.counters.accepted_tokens > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_bits_are_those_of_a_request_alone(checkpoint: Path, dtype: str) -> None:
    """Unless the check at start refuses this card's products."""
    sizes = {"deterministic_seats": cpu.DETERMINISTIC.seats, "draft_tokens": 2}
    try:
        runner = TransformersRunner.load(checkpoint, device="cuda", dtype=dtype, **sizes)
    except ConfigError as refused:
        pytest.skip(f"refused: {refused}")
    cpu.bits_are_those_of_a_request_alone(runner, cuda, cuda())


def test_no_turn_of_the_model_waits_for_the_device(checkpoint: Path) -> None:
    rig = cpu.model_rig(checkpoint, 2, cuda(), graphs=False)
    with no_syncs():
        for life in model.create(rig):
            assert rig.coordinator.admit(life, 64)
        rig.run()
    rig.check_end()
    assert rig.executor.counters.accepted_tokens > 0
