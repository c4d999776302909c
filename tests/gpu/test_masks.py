"""Masks of grammars on a GPU: uploads beside the forward pass, which is a graph, and draws behind both."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.gpu.syncs import no_syncs  # noqa: E402
from tests.support.checkpoints import DRAFTING, LATENT  # noqa: E402
from tests.worker.loop import test_drafting  # noqa: E402
from tests.worker.loop import test_held_model as cpu  # noqa: E402
from worker.loop import executor  # noqa: E402
from worker.runners import swapping  # noqa: E402
from worker.streams import make_streams  # noqa: E402


@pytest.fixture(scope="module", params=LATENT)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return test_drafting.write_predictable(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("checkpoint", "draft_tokens"), [*product(LATENT, (0,)), *product(DRAFTING, (2,))], indirect=["checkpoint"]
)
def test_tokens_are_those_of_the_reference(
    checkpoint: Path, draft_tokens: int, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu.check_draws(checkpoint, draft_tokens, make_streams("cuda"), is_late=is_late, monkeypatch=monkeypatch)


def test_swap_ins_beside_change_no_token(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps that are launched again, on `swap`, within the graph."""
    monkeypatch.setattr(swapping, "BESIDE_ROWS", 1)
    cpu.check_draws(checkpoint, 0, make_streams("cuda"), is_late=True, monkeypatch=monkeypatch)


def test_no_turn_with_masks_waits_for_the_device(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the step before, whose tokens masks follow: by its fence."""
    monkeypatch.setattr(executor, "mask_wait_s", lambda _: 60.0)
    rig = cpu.held_rig(checkpoint, 0, make_streams("cuda"))
    with no_syncs():
        cpu.decode(rig)
    cpu.assert_right(rig, checkpoint)
