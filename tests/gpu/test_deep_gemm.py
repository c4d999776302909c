"""w8a8 on a GPU: our launches bit for bit, DeepGEMM's products near the CPU's, and graphs that give the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip(
    "deep_gemm", reason="needs sgl-deep-gemm: pip install 'hisparse[deepgemm-torch211]'", exc_type=Exception
)

from kernels.block_fp8 import (  # noqa: E402
    block_experts_w8a8,
    block_gated_w8a8,
    block_linear_w8a8,
    prepare_w8a8,
    quantize_rows,
)
from kernels.block_weight import E4M3  # noqa: E402
from kernels.cuda import deep_gemm, quantize  # noqa: E402
from kernels.cuda.deep_gemm_cache import ProductForm, fill  # noqa: E402
from kernels.routing import pack_rows, unpack_rows  # noqa: E402
from tests.gpu.syncs import no_syncs  # noqa: E402
from tests.gpu.test_block_fp8 import activations, off, on_gpu  # noqa: E402
from tests.gpu.test_fp8_model import FORCED, TEXT, forced_logits, rig_of  # noqa: E402
from tests.kernels.test_block_fp8 import draw  # noqa: E402
from tests.support.checkpoints import LATENT  # noqa: E402
from tests.support.oracle_rig import run_oracle  # noqa: E402
from worker.runners import transformers_dsa  # noqa: E402
from worker.runners.tiny import write_tiny_checkpoint  # noqa: E402
from worker.runners.transformers_dsa import TransformersRunner  # noqa: E402

SHAPES = [(2240, 7168), (576, 1024), (72, 128)]
TOKENS = [1, 16, 17, 40, 130, 600]
EXPERT_TOKENS = [1, 50, 700, 2100]
#: A token may differ from the oracle's where its two best logits are closer: bfloat16, and e4m3 activations.
TIE_BOUND = 0.5


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """By several processes: one after another takes minutes."""
    forms = [ProductForm(n, k, deep_gemm.padded(tokens)) for n, k in SHAPES for tokens in TOKENS]
    forms += [ProductForm(512, 384, tokens, 4, 3, 6) for tokens in EXPERT_TOKENS]
    print(f"{len(forms)} forms compiled in {fill(forms, torch.device('cuda')):.1f} s")


def test_the_library_is_found_and_multiplies() -> None:
    assert deep_gemm.require(torch.device("cuda")) == f"deep_gemm {deep_gemm.library().__version__}"


@pytest.mark.parametrize("powers", [False, True])
def test_quantized_rows_are_the_cpus(powers: bool) -> None:
    for shape in ((1, 128), (37, 384), (16, 7168)):
        hidden = activations(*shape) * torch.exp2(4 * torch.randn(shape, device="cuda")).bfloat16()
        hidden[:1] = 0
        values, scales = quantize_rows(hidden, powers=powers)
        plain, plain_scales = quantize_rows(hidden.cpu(), powers=powers)
        assert torch.equal(scales.cpu(), plain_scales)
        assert torch.equal(values.view(torch.uint8).cpu(), plain.view(torch.uint8))


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_is_that_of_quantized_rows(shape: tuple[int, int], powers: bool) -> None:
    weight = draw(*shape)
    for tokens in TOKENS:
        hidden = activations(tokens, shape[1])
        wanted = block_linear_w8a8(hidden.cpu(), weight, powers=powers)
        got = block_linear_w8a8(hidden, on_gpu(weight), powers=powers)
        assert got.shape == wanted.shape
        assert off(got.cpu(), wanted) < 5e-3


def test_gated_product_is_the_cpus() -> None:
    weight, both = draw(512, 384), activations(40, 768)
    gate, up = both[:, :384], both[:, 384:]
    wanted = block_gated_w8a8(gate.cpu(), up.cpu(), weight, powers=True)
    assert off(block_gated_w8a8(gate, up, on_gpu(weight), powers=True).cpu(), wanted) < 1e-2


@pytest.mark.parametrize("tokens", EXPERT_TOKENS)
def test_experts_are_the_cpus(tokens: int) -> None:
    gate_up, down = draw(4, 512, 384), draw(4, 384, 256, seed=2)
    hidden, shares = activations(tokens, 384), torch.rand(tokens, 3)
    chosen = torch.rand(tokens, 6).argsort(1)[:, :3].contiguous() - 1
    wanted = block_experts_w8a8(hidden.cpu(), chosen, shares, gate_up, down, powers=True)
    on_card = hidden, chosen.int().cuda(), shares.cuda(), on_gpu(gate_up), on_gpu(down)
    got = deep_gemm.experts(*on_card, 0, 6, powers=True)
    assert off(got.cpu(), wanted) < 1e-2
    assert torch.equal(got, deep_gemm.experts(*on_card, 0, 6, powers=True)), "rows fall elsewhere"


def test_rows_that_come_quantized_give_the_same_sums() -> None:
    """Quantized rows lie apart where ranks exchange them, with their scales behind them."""
    tokens, width, choices = 700, 384, 3
    gate_up, down = on_gpu(draw(4, 512, 384)), on_gpu(draw(4, 384, 256, seed=2))
    hidden, shares = activations(tokens, width), torch.rand(tokens, choices, device="cuda")
    chosen = (torch.rand(tokens, 6, device="cuda").argsort(1)[:, :choices] - 1).int().contiguous()
    packed = torch.full((tokens, 432), 7, dtype=torch.uint8, device="cuda")
    pack_rows(quantize.Codes(*quantize_rows(hidden, powers=True), True), chosen, shares, packed)
    given = unpack_rows(packed, width, E4M3, choices)
    codes = quantize.Codes(given.hidden, given.scales, True)
    got = deep_gemm.experts(codes, given.chosen, given.weights, gate_up, down, 0, 6, powers=True)
    assert torch.equal(got, deep_gemm.experts(hidden, chosen, shares, gate_up, down, 0, 6, powers=True))


def test_bits_of_a_row_do_not_depend_on_its_neighbours() -> None:
    weight, hidden = on_gpu(draw(2240, 7168)), activations(600, 7168)
    whole = block_linear_w8a8(hidden, weight, powers=True)
    for count in (1, 16, 40, 130):
        assert torch.equal(block_linear_w8a8(hidden[:count].clone(), weight, powers=True), whole[:count])


def test_products_can_be_captured_once_prepared() -> None:
    """Routing may change between replays: nothing of it is baked into the graph. Nothing waits for the device."""
    dense, gate_up, down = (on_gpu(draw(*shape)) for shape in ((576, 1024), (6, 512, 512), (6, 512, 256)))
    assert prepare_w8a8([dense], [(gate_up, down)], rows_max=24, choices=2, experts_total=8) > 2
    wide, hidden = activations(24, 1024), activations(24, 512)
    chosen = torch.zeros(24, 2, dtype=torch.int32, device="cuda")
    shares = torch.rand(24, 2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = block_linear_w8a8(wide, dense, powers=True)
        mixed = block_experts_w8a8(hidden, chosen, shares, gate_up, down, 1, 8, powers=True)
    for seed in range(3):
        wide.copy_(activations(24, 1024))
        chosen.copy_(torch.rand(24, 9, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :2] - 1)
        graph.replay()
        assert torch.equal(product, block_linear_w8a8(wide, dense, powers=True))
        assert torch.equal(mixed, block_experts_w8a8(hidden, chosen, shares, gate_up, down, 1, 8, powers=True))
    with no_syncs():
        block_linear_w8a8(wide, dense, powers=True)
        block_experts_w8a8(hidden, chosen, shares, gate_up, down, 1, 8, powers=True)


@pytest.mark.parametrize("tokens", [100, 2000])
def test_all_rows_of_experts_lie_in_their_places(tokens: int) -> None:
    """One block places few assignments, several many."""
    chosen = torch.rand(tokens, 64, device="cuda").argsort(1)[:, :8].int().contiguous()
    placed = quantize.place(chosen, 8, 32, multiple=64)
    own = chosen.flatten() - 8
    begin = 0
    for expert in range(32):
        rows = placed.rows[own == expert].sort().values
        assert rows.tolist() == list(range(begin, begin + len(rows)))
        assert int(placed.ends[expert]) == begin + len(rows)
        begin = -(-(begin + len(rows)) // 64) * 64
    assert begin <= placed.total
    assert placed.rows[(own < 0) | (own >= 32)].eq(-1).all()


@pytest.fixture
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of prompts that hold TEXT[:600]: products of longer ones take minutes to compile."""
    monkeypatch.setattr(transformers_dsa, "form_block_tokens", lambda **_: 640)


@pytest.mark.usefixtures("_short_blocks")
@pytest.mark.parametrize("family", LATENT)
def test_tokens_are_the_oracles(family: str, tmp_path: Path) -> None:
    path = tmp_path / family
    write_tiny_checkpoint(path, family, index_topk=64, fp8=True, powers_of_two=True, whole_blocks=True)
    runner = TransformersRunner.load(path, device="cuda", dtype="bfloat16", matmul="w8a8")
    assert runner.matmul.name.startswith("w8a8 by deep_gemm ")
    rig = rig_of(runner, "cuda", graphs=True)
    prompt = list(TEXT[:600])
    token, _ = rig.open(0, prompt, hot_slots=128)
    ours = [token]
    ours += [rig.decode([0], rows=4)[0][0] for _ in range(FORCED - 1)]
    job = {"model": str(path), "prompts": [{"tokens": prompt, "max_new_tokens": FORCED}], "device": "cuda"}
    (theirs,) = run_oracle(job | {"matmul": "w8a8"})
    pairs = zip(ours, theirs["tokens"], strict=True)
    split = next((place for place, (one, other) in enumerate(pairs) if one != other), FORCED)
    gap = 0.0 if split == FORCED else theirs["gaps"][split]
    print(f"{family}: {split} of {FORCED} tokens alike, then a gap of {gap:.3f}")
    assert split == FORCED or gap < TIE_BOUND


@pytest.mark.usefixtures("_short_blocks")
@pytest.mark.parametrize("family", LATENT)
def test_logits_are_as_far_from_float32_as_fp8_activations_are(family: str, tmp_path: Path) -> None:
    path = tmp_path / family
    write_tiny_checkpoint(path, family, index_topk=64, fp8=True, powers_of_two=True, whole_blocks=True)
    truth = forced_logits(TransformersRunner.load(path, device="cpu", dtype="float32"), "cpu")
    found: list[Tensor] = []
    for matmul in ("weight_only", "w8a8"):
        runner = TransformersRunner.load(path, device="cuda", dtype="bfloat16", matmul=matmul)
        found.append((forced_logits(runner, "cuda") - truth).abs().mean())
    kept, quantized = found
    print(f"{family}: mean distance from float32: weight_only {kept:.4f}, w8a8 {quantized:.4f}")
    assert kept < quantized < truth.std()
