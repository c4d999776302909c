"""Steps in halves on a GPU: in graphs and without, tokens and bits of resident requests in the same halves."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.gpu.scenarios import DRAFT_SIZES, MIXED_SIZES, goes_draft_steps, goes_mixed_steps  # noqa: E402
from tests.gpu.twin import Twin  # noqa: E402
from tests.support.drafting_rig import DraftRig, drafting_settings  # noqa: E402
from tests.support.fakes.hash_runner import SEPARATE, SHARED, FakeRunner  # noqa: E402
from tests.support.runner_rig import Rig  # noqa: E402
from tests.worker.loop import test_drafting as drafting  # noqa: E402
from tests.worker.loop import test_fences as scenarios  # noqa: E402
from tests.worker.loop import test_halves as cpu  # noqa: E402
from tests.worker.loop import test_model as model  # noqa: E402
from worker.runners.synthetic import synthetic_config, synthetic_runner  # noqa: E402
from worker.runners.tiny import FAMILIES, write_tiny_checkpoint  # noqa: E402
from worker.streams import Streams, make_streams  # noqa: E402

#: Halves of 5 and 4. attend_rows.cuh takes 8 blocks of heads or more, and each request has two.
ROWS, REQUESTS = 9, 7


def cuda() -> Streams:
    return make_streams("cuda")


@pytest.mark.parametrize(("ranks", "cut"), [(None, 2), (1, 1), (4, 3)])
def test_parts_of_a_step_give_what_the_whole_gives(ranks: int | None, cut: int) -> None:
    goes_mixed_steps(Twin(31, ranks=ranks, cut=cut, **MIXED_SIZES), steps=20)
    goes_draft_steps(Twin(32, ranks=ranks, cut=cut, **DRAFT_SIZES), steps=20)


@pytest.mark.parametrize("groups", [SHARED, SEPARATE], ids=["shared", "separate"])
def test_moves_change_no_token(groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """In graphs, of hashes: byte for byte."""
    monkeypatch.setattr(FakeRunner, "halves_from", 2)
    rig = scenarios.a_day(cuda, groups)  # type: ignore[arg-type]
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_drafts_change_no_token(draft_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRunner, "halves_from", 2)
    drafting.a_day(DraftRig(cuda(), drafting_settings(draft_tokens), 60))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_hot_buffers_change_no_bit(
    tmp_path: Path, family: str, dtype: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halves of one size in deterministic mode, of two in batches of three."""
    write_tiny_checkpoint(tmp_path, family, index_topk=model.TOPK, context_max_tokens=2_048)
    monkeypatch.setattr(model.runner_of(tmp_path, "cuda", dtype), "halves_from", 2)
    for settings in (model.SETTINGS, cpu.ODD):
        chosen = msgspec.structs.replace(settings, graphs=graphs)
        (tokens, logits, misses), (resident, expected, _) = (
            model.run(tmp_path, sizes, cuda(), chosen, dtype) for sizes in ((64, 128, 64), (0, 0, 0))
        )
        assert misses > 0
        assert tokens == resident
        assert all(torch.equal(values, expected[step]) for step, values in logits.items())


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_hot_buffers_change_no_bit_at_real_dimensions(kv_dtype: str) -> None:
    """Requests of 2,500 tokens in both halves, by Hopper's kernel of attention."""
    runner = synthetic_runner(synthetic_config(FAMILIES[0], 2), kv_dtype=kv_dtype)
    runner.halves_from = 2
    prompts = [[(37 * token + start) % 9_973 for token in range(2_490)] for start in range(REQUESTS)]
    logits = []
    for hot_slots in (0, 2_048):
        rig = Rig(runner, seats=REQUESTS, context_tokens=2_560, device="cuda", graphs=not hot_slots, seed=hot_slots)
        for seat, prompt in enumerate(prompts):
            rig.open(seat, prompt, hot_slots=hot_slots)
        logits.append(torch.stack([rig.decode(range(REQUESTS), rows=ROWS)[1] for _ in range(6)]))
    assert 0 < rig.hit_rate() < 1
    assert logits[0].isfinite().all()
    assert torch.equal(*logits)
