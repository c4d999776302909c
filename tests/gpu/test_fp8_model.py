"""Models in block-FP8 on a GPU: the CPU's tokens, logits as near as those of decoded weights, bits that hold."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.gpu.syncs import no_syncs  # noqa: E402
from tests.support.checkpoints import LATENT  # noqa: E402
from tests.support.prompts import TEXT, launch_prompt  # noqa: E402
from tests.support.router_bytes import with_exact_routers  # noqa: E402
from tests.support.runner_rig import Rig  # noqa: E402
from tests.worker.weights.test_modules import WHOLE  # noqa: E402
from worker.runners.base import StepOutputs  # noqa: E402
from worker.runners.synthetic import synthetic_runner  # noqa: E402
from worker.runners.tiny import write_tiny_checkpoint  # noqa: E402
from worker.runners.transformers_dsa import TransformersRunner  # noqa: E402
from worker.weights import modules  # noqa: E402
from worker.weights.layout import weights_bytes  # noqa: E402
from worker.weights.modules import BlockLinear  # noqa: E402
from worker.weights.synth import published_config  # noqa: E402

ROWS = 4
#: float32: tokens may differ only where the CPU's two best logits are closer (of order 5).
TIE_BOUND = 1e-3
#: Tokens that are fed to each model, whatever it would say.
FORCED = 48


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {family: tmp_path_factory.mktemp("fp8") / family for family in LATENT}
    for family, path in paths.items():
        write_tiny_checkpoint(path, family, index_topk=64, fp8=True, powers_of_two=family == "glm-5")
    return paths


@cache
def runner_of(path: Path, device: str, dtype: str, keeps_fp8: bool) -> TransformersRunner:
    return TransformersRunner.load(path, device=device, dtype=dtype, keeps_fp8=keeps_fp8)


def rig_of(runner: TransformersRunner, device: str, graphs: bool = False) -> Rig:
    return Rig(runner, seats=1, context_tokens=1_000, device=device, graphs=graphs)


def forced_logits(runner: TransformersRunner, device: str, hot_slots: int = 128, graphs: bool = False) -> Tensor:
    """float32[FORCED, vocab] after each of FORCED given tokens behind a prompt."""
    rig = rig_of(runner, device, graphs)
    logits = [rig.open(0, TEXT[:600], hot_slots=hot_slots)[1]]
    logits += [rig.decode([0], rows=ROWS, inputs=[token])[1][0] for token in TEXT[600 : 600 + FORCED - 1]]
    return torch.stack([it.cpu() for it in logits])


@pytest.mark.parametrize("family", LATENT)
def test_float32_tokens_are_those_of_the_cpu(checkpoints: dict[str, Path], family: str) -> None:
    ours, theirs = (
        forced_logits(runner_of(checkpoints[family], device, "float32", device == "cuda"), device)
        for device in ("cuda", "cpu")
    )
    best = theirs.topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > TIE_BOUND
    assert clear.sum() > FORCED * 0.9
    assert torch.equal(ours.argmax(1)[clear], best.indices[:, 0][clear])


@pytest.mark.parametrize("family", LATENT)
def test_bfloat16_logits_are_as_near_float32_as_decoded_weights(checkpoints: dict[str, Path], family: str) -> None:
    path = checkpoints[family]
    truth = forced_logits(runner_of(path, "cpu", "float32", False), "cpu")
    kept, decoded = (
        (forced_logits(runner_of(path, "cuda", "bfloat16", keeps), "cuda") - truth).abs().mean()
        for keeps in (True, False)
    )
    print(f"{family}: mean distance from float32: FP8 kept {kept:.4f}, decoded {decoded:.4f}")
    assert 0 < kept < 1.5 * decoded


@pytest.mark.parametrize("family", LATENT)
def test_bits_do_not_depend_on_hot_sizes_or_graphs(checkpoints: dict[str, Path], family: str) -> None:
    runner = runner_of(checkpoints[family], "cuda", "bfloat16", True)
    wanted = forced_logits(runner, "cuda", hot_slots=0)
    for hot_slots, graphs in ((64, True), (128, False), (0, True)):
        assert torch.equal(forced_logits(runner, "cuda", hot_slots, graphs), wanted)


def test_held_bytes_are_those_computed(checkpoints: dict[str, Path]) -> None:
    runner = runner_of(checkpoints["deepseek-v3.2"], "cuda", "bfloat16", True)
    model = runner._layers.model
    computed = weights_bytes(model.config, "bfloat16", (128, 128), on_gpu=True)
    assert runner.weights_bytes() == with_exact_routers(computed, model)


def test_no_launch_waits_for_the_device(checkpoints: dict[str, Path]) -> None:
    runner = runner_of(checkpoints["glm-5"], "cuda", "bfloat16", True)
    rig = rig_of(runner, "cuda")
    rig.open(0, TEXT[:600], hot_slots=128)
    rig.decode([0], rows=ROWS)
    tokens = torch.tensor(list(TEXT[:64]), device="cuda")
    step, one = rig._steps[ROWS], StepOutputs.allocate(1, runner.info.vocab_size, keep_logits=True, device="cuda")
    with no_syncs():
        launch_prompt(runner, rig.streams, rig.state, rig.sampler, 0, tokens, 0, one)
        runner.launch_forward(rig.streams, rig.state, rig.sampler, step.batch)
        runner.launch_sample(rig.streams, rig.sampler, step.batch, step.outputs, None)


@pytest.mark.parametrize("family", LATENT)
def test_joined_products_give_the_model_of_those_apart(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = type(published_config(family))(**WHOLE)
    found = []
    for most in (0, modules.JOINED_VALUES_MAX):
        monkeypatch.setattr(modules, "JOINED_VALUES_MAX", most)
        runner = synthetic_runner(config, device="cuda", fp8=True)
        assert any(isinstance(one, BlockLinear) and one.joined for one in runner._layers.model.modules()) == bool(most)
        rig = Rig(runner, seats=1, context_tokens=400, device="cuda", graphs=True)
        logits = [rig.open(0, list(range(90)) * 3, hot_slots=32)[1]]
        logits += [rig.decode([0], rows=ROWS, inputs=[token])[1][0] for token in range(20)]
        found.append(torch.stack([one.cpu() for one in logits]))
    apart, joined = found
    assert float((apart - joined).norm() / apart.norm()) < 0.05
