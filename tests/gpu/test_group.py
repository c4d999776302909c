"""Rounds of a group on GPUs: NCCL's collectives inside captured graphs. One GPU has room for one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.group_rig import GroupRig, settings_of
from tests.support.worker_rig import Rig
from tests.worker.group.test_ranks import SETTINGS as RANKS
from tests.worker.group.test_ranks import asks_of, spread, wrong
from tests.worker.loop.test_model import NEW_TOKENS, PROMPTS, SETTINGS
from worker.group.group import Group
from worker.runners.tiny import FAMILIES, write_tiny_checkpoint
from worker.runners.transformers_dsa import load_runner
from worker.streams import make_streams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(path, request.param, index_topk=32, context_max_tokens=2_048)
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    tmp_path.chmod(0o700)
    yield tmp_path
    torch.cuda.synchronize()


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_over_nccl_draws_the_tokens_of_a_worker(
    dtype: str, graphs: bool, checkpoint: Path, directory: Path
) -> None:
    settings = msgspec.structs.replace(
        SETTINGS, device="cuda", stream_backend="cuda", dtype=dtype, graphs=graphs, deterministic=False
    )
    alone = tokens_of(settings_of(checkpoint, directory, 1, 0, settings).worker, None)
    config = settings_of(checkpoint, directory, 1, 0, settings)
    group = Group.join(config, "one model")
    try:
        assert tokens_of(config.worker, group) == alone
        assert group.control.progress.launched > NEW_TOKENS
    finally:
        group.leave()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL takes no second rank on one")
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_two_ranks_over_nccl_draw_the_tokens_of_generate(graphs: bool, checkpoint: Path, directory: Path) -> None:
    """With resizes, and retractions with pages kept and dropped."""
    settings = msgspec.structs.replace(RANKS, device="cuda", stream_backend="cuda", graphs=graphs)
    asks = spread(asks_of(16, seed=7), 2)
    environs = [{"CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(2)]
    rig = GroupRig(checkpoint, directory, asks, settings, environs=environs)
    try:
        assert not wrong(checkpoint, asks, rig.drawn())
    finally:
        rig.close()


def tokens_of(settings: object, group: Group | None) -> list[list[int]]:
    runner = load_runner(settings, group.collectives if group else None)  # type: ignore[arg-type]
    rig = Rig(make_streams("cuda"), settings, runner=runner, group=group)  # type: ignore[arg-type]
    lives = []
    for number, prompt in enumerate(PROMPTS):
        life = rig.coordinator.create(number, 1, NEW_TOKENS, seed=number)
        life.prompt = tuple(prompt)
        assert rig.coordinator.admit(life, 64)
        lives.append(life)
    rig.run()
    rig.check_end()
    rig.executor._streams.close()
    return [life.tokens for life in lives]
