"""Routers stored in float32 choose as the model library's class with the stored weight, in every form of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.routing import router_logits
from tests.support.checkpoints import LATENT
from tests.support.thread_ranks import ThreadCollectives
from tests.worker.group.test_exchange import on_threads
from worker.group.exchange import Exchange
from worker.runners import experts
from worker.runners.experts import BATCHED, Over, hold_share, routed
from worker.runners.tiny import write_tiny_checkpoint
from worker.weights.layout import ExpertShare, weights_bytes
from worker.weights.matmul import DECODED, Matmul
from worker.weights.model import held_bytes, load_model
from worker.weights.quantization import read_quantization

LAYER, ROWS = 2, 96
ROUTER = f"model.layers.{LAYER}.mlp.gate.weight"
#: How experts are held and multiplied: decoded, in FP8, and in FP8 with quantized rows.
FORMS = {"decoded": (False, DECODED), "weight_only": (True, DECODED), "w8a8": (True, Matmul("fake 0.0"))}


@pytest.fixture(scope="module", params=LATENT)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP8 weights, whose routers alone are float32."""
    path = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(path, request.param, fp8=True, whole_blocks=True)
    for file in path.glob("*.safetensors"):
        stored = load_file(file)
        generator = torch.Generator().manual_seed(1)
        for name, tensor in stored.items():
            if name.endswith("mlp.gate.weight"):
                stored[name] = torch.randn(tensor.shape, generator=generator) / tensor.shape[1] ** 0.5
            elif any(kept in name for kept in ("lm_head", "k_norm", "weights_proj")):
                stored[name] = tensor.bfloat16()  # what the library of one family would keep in float32
        save_file(stored, file, {"format": "pt"})
    configure(path, moe_router_dtype="float32", dtype="bfloat16")
    return path


def configure(path: Path, **changed: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changed))


def load(path: Path, form: str, share: ExpertShare | None = None) -> Any:
    keeps, matmul = FORMS[form]
    quantization = read_quantization(json.loads((path / "config.json").read_text()), path)
    about: dict[str, Any] = {"keeps_fp8": keeps, "matmul": matmul, "experts": share}
    return load_model(path, quantization, dtype=torch.bfloat16, **about)


def stored_router(path: Path) -> Tensor:
    return next(found[ROUTER] for file in path.glob("*.safetensors") if ROUTER in (found := load_file(file)))


def library_router(model: Any, weight: Tensor) -> Any:
    """The library's own router with `weight`, apart from the model."""
    held = model.get_submodule(ROUTER.removesuffix(".weight"))
    router = type(held)(model.config)
    router.weight = torch.nn.Parameter(weight, requires_grad=False)
    router.e_score_correction_bias = held.e_score_correction_bias
    return router


def rows_of(model: Any) -> Tensor:
    drawn = torch.randn(1, ROWS, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    return drawn.to(torch.bfloat16)


def chosen_by(model: Any, rows: Tensor, monkeypatch: pytest.MonkeyPatch, over: Over | None = None) -> Any:
    """Weights and choices with which `routed` goes to the experts, and what they make of the rows."""
    seen: list[tuple[Tensor, Tensor]] = []
    choose = experts._choose

    def see(*given: Any) -> tuple[Tensor, Tensor]:
        seen.append(choose(*given))
        return seen[-1]

    with monkeypatch.context() as patched:
        patched.setattr(experts, "_choose", see)
        parts = routed(model.model.layers[LAYER].mlp, rows, BATCHED, over)
    ((weights, chosen),) = seen
    return weights, chosen, parts


@pytest.mark.parametrize("form", ["decoded", "weight_only"])
def test_a_row_chooses_by_the_stored_weight(checkpoint: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, weight = load(checkpoint, form), stored_router(checkpoint)
    rows = rows_of(model)
    weights, chosen, _ = chosen_by(model, rows, monkeypatch)
    _, wanted, ids = library_router(model, weight)(rows[0])
    assert torch.equal(chosen.long(), ids.long())
    assert torch.equal(weights, wanted)
    _, narrowed, _ = library_router(model, weight.bfloat16())(rows[0])
    assert not torch.equal(narrowed, wanted)  # these rows tell the two apart


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", [None, ExpertShare(8, 8)], ids=["whole", "rank"])
def test_a_router_is_float32_in_every_form(checkpoint: Path, form: str, share: ExpertShare | None) -> None:
    model = load(checkpoint, form, share)
    assert torch.equal(model.state_dict()[ROUTER], stored_router(checkpoint))
    keeps, _ = FORMS[form]
    computed = weights_bytes(model.config, "bfloat16", (128, 128), on_gpu=keeps, experts=share)
    assert computed["float32"] == held_bytes(model)["float32"]


def test_ranks_of_a_group_choose_by_the_stored_weight(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two ranks holds half of the experts; the sum of their parts is that of one process."""
    whole = load(checkpoint, "decoded")
    rows, size, total = rows_of(whole), 2, whole.config.n_routed_experts
    weights, chosen, parts = chosen_by(whole, rows, monkeypatch)
    collectives = ThreadCollectives.of(size)
    found: list[Any] = [None] * size
    shares = [ExpertShare.of(rank, size, total) for rank in range(size)]
    models = [load(checkpoint, "decoded", share) for share in shares]
    seen: list[tuple[Tensor, Tensor]] = []
    choose = experts._choose
    monkeypatch.setattr(experts, "_choose", lambda *given: seen.append(choose(*given)) or seen[-1])

    def run(rank: int) -> None:
        hold_share(models[rank], shares[rank])
        about = {"hidden": rows.shape[2], "choices": chosen.shape[1], "rows_max": ROWS, "dtype": torch.bfloat16}
        exchange = Exchange(collectives[rank], **about, device="cpu", deterministic=True)
        found[rank] = routed(models[rank].model.layers[LAYER].mlp, rows, BATCHED, Over(exchange, shares[rank], ROWS))

    on_threads(run, size)
    assert len(seen) == size
    assert all(torch.equal(pair[0], weights) and torch.equal(pair[1], chosen) for pair in seen)
    for own in found:
        torch.testing.assert_close(own.float().sum(0), parts.float().sum(0), rtol=3e-2, atol=3e-2)


def test_a_router_published_in_bfloat16_is_widened_where_the_config_says_float32(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Values are the stored ones, so that a repository decides by its field alone what a rank holds."""
    for file in checkpoint.iterdir():
        if file.suffix == ".safetensors":
            stored = load_file(file)
            save_file({name: it.bfloat16() if name.endswith("mlp.gate.weight") else it for name, it in stored.items()},
                      tmp_path / file.name, {"format": "pt"})  # fmt: skip
        else:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    held = load(tmp_path, "weight_only").state_dict()[ROUTER]
    assert held.dtype == torch.float32
    assert torch.equal(held, stored_router(checkpoint).bfloat16().float())
    configure(tmp_path, moe_router_dtype=None)
    assert load(tmp_path, "weight_only").state_dict()[ROUTER].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_states_are_cast_to_a_float32_router(dtype: torch.dtype) -> None:
    """Hidden states are cast, as on a GPU: torch multiplies no bfloat16 by float32."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 256, generator=generator).to(dtype), torch.randn(16, 256, generator=generator)
    found = router_logits(hidden, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), hidden.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
