"""KV in another dtype than the model's: the same bits for any hot buffer, and attention over what is really kept."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.row_format import latent_exponent
from kernels.rows import read_slab_rows
from kernels.state import DeviceState
from protocol.errors import ConfigError
from protocol.settings import WorkerSettings
from protocol.units import PAGE_TOKENS
from tests.support.checkpoints import LATENT, tiny_checkpoint
from tests.support.history import dealt, in_turn
from tests.support.prompts import TEXT
from tests.support.runner_rig import Rig
from worker.runners import attention as mla
from worker.runners.checkpoint import geometry_of
from worker.runners.load import load_runner
from worker.runners.prompt import PromptBlock
from worker.runners.tiny import tiny_config
from worker.runners.transformers_dsa import TransformersRunner

TOPK, TOKENS, ROWS = 32, 12, 3
#: Largest error of attended latents of order 1 in float32: of sums over at most TOPK rows.
BOUND = 1e-5


@pytest.fixture(scope="module", params=LATENT)
def checkpoint(request: pytest.FixtureRequest, run_dir: Path) -> Path:
    return tiny_checkpoint(run_dir, request.param, index_topk=TOPK)


@cache
def runner_of(path: Path, kv_dtype: str) -> TransformersRunner:
    settings = WorkerSettings(model=str(path), kv_dtype=kv_dtype, seats=ROWS, deterministic=True)
    return load_runner(settings)


def run(runner: TransformersRunner, hot_slots: int) -> tuple[Rig, Tensor]:
    """Logits [TOKENS, vocab] of one request."""
    rig = Rig(runner, seats=1, context_tokens=400, seed=hot_slots)
    logits = [rig.open(0, TEXT[:300], hot_slots=hot_slots)[1]]
    logits += [rig.decode([0], rows=ROWS)[1][0] for _ in range(TOKENS - 1)]
    return rig, torch.stack(logits)


@pytest.mark.parametrize(
    ("checkpoint", "kv_dtype"),
    dealt(in_turn((LATENT[::2], LATENT[1::2])), ("bfloat16", "fp8", "fp4")),
    indirect=["checkpoint"],
)
def test_hot_sizes_change_no_bit(checkpoint: Path, kv_dtype: str) -> None:
    runner = runner_of(checkpoint, kv_dtype)
    _, expected = run(runner, 0)
    for hot_slots in (32, 96):
        rig, logits = run(runner, hot_slots)
        assert torch.equal(logits, expected)
        assert rig.hit_rate() < 0.9
    _, full = run(runner_of(checkpoint, "float32"), 0)
    assert not torch.equal(expected, full)
    allowed = 1.5 if kv_dtype == "fp4" else 0.1  # of order 5; sharp attention magnifies rounding
    assert float((expected - full).abs().median()) < allowed


def test_attention_is_over_the_bytes_in_host_memory(checkpoint: Path) -> None:
    """The last layer's latents, from host rows that are read here by hand: e4m3 by its definition, not by a library."""
    runner = runner_of(checkpoint, "fp8")
    rig, _ = run(runner, 64)
    scratch, layer = runner._scratch[ROWS], runner.geometry.layers - 1
    latents, length = scratch.latents[0], rig.lengths[0]
    rows = torch.stack([host_row(rig, layer, position) for position in range(length)])
    chosen = rows[scratch.topk[0][scratch.topk[0] >= 0].long()]
    scores = scratch.queries[0].double() @ chosen.T * runner._layers[layer].attention.scaling
    expected = scores.softmax(-1) @ chosen[:, :64]
    assert float((latents.double() - expected).abs().max()) < BOUND


def host_row(rig: Rig, layer: int, position: int) -> Tensor:
    """float64[80]: 64 codes, one scale and 16 rope values of 2 bytes, where kernels/layout.py says that they lie."""
    page = rig.state.host[int(rig.state.host_table[0, position // PAGE_TOKENS])]
    start = layer * PAGE_TOKENS * 100 + position % PAGE_TOKENS * 100
    row = page[start : start + 100]
    codes = [int(code) for code in row[:64]]
    values = [e4m3(code) * float(row[64:68].clone().view(torch.float32)) for code in codes]
    return torch.tensor(values + row[68:].clone().view(torch.bfloat16).double().tolist(), dtype=torch.float64)


def e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if sign else size


@pytest.mark.parametrize(("checkpoint", "kv_dtype"), dealt(LATENT, ("float32", "fp8", "fp4")), indirect=["checkpoint"])
def test_both_forms_of_prefill_agree(checkpoint: Path, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered, as on a GPU, and expanded. In fp8 near-ties of index scores may fall either way. In fp4 a value that
    rounds the other way moves by a third, by which 11 to 40 of 1,200 rows moved in five prompts of A.X-K2. In float32
    three rows of this prompt are near ties; sharp attention magnifies rounding fourfold in each layer, how far is the
    processor's affair, and no row of order 6 moves by a thousandth."""
    expanded = runner_of(checkpoint, kv_dtype)
    gathered = TransformersRunner(expanded._layers.model, expanded.info, expanded.geometry, gathered_prefill=True)
    selected = [record_selections(runner, monkeypatch) for runner in (expanded, gathered)]
    (theirs, _), (ours, _) = run(expanded, 0), run(gathered, 0)
    rows = [slab_rows(rig) for rig in (theirs, ours)]
    moved = (rows[0] - rows[1]).abs().amax(-1)
    far = moved > {"float32": 1e-4, "fp8": 0.5, "fp4": 2.0}[kv_dtype]
    assert int(far.sum()) <= far.numel() // (10 if kv_dtype == "fp4" else 100)
    if kv_dtype == "float32":
        differ = (torch.stack(selected[0]) != torch.stack(selected[1])).any(-1)
        assert differ.shape == (expanded.geometry.groups, 300)
        assert int(differ.sum()) <= 3
        assert float(moved.max()) < 1e-3


def record_selections(runner: TransformersRunner, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The selection bool[300, 300] of each group, once the runner has prefilled a prompt of 300 tokens."""
    masks: list[Tensor] = []
    prompt: Any = runner._prompt
    select = prompt.select

    def record(state: DeviceState, group: int, block: PromptBlock, *rest: Any) -> None:
        select(state, group, block, *rest)
        selection, ((number, piece),) = block.prompts.selection, block.pieces
        positions = torch.arange(300)
        places = state.slab_table[piece.seat][positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        is_mask = isinstance(selection, list)
        masks.append(selection[number].clone() if is_mask else (selection.unsqueeze(-1) == places).any(1))

    monkeypatch.setattr(prompt, "select", record)
    return masks


def slab_rows(rig: Rig) -> Tensor:
    """float32[layers, 300, 80] of the prompt."""
    rows = [read_slab_rows(rig.state, layer, 0, 300) for layer in range(rig.runner.geometry.layers)]
    return rig.runner._layers.rows.decode(torch.stack(rows))  # type: ignore[attr-defined]


def test_unfit_settings_are_refused_at_start() -> None:
    config = tiny_config("glm-5", TOPK, 1_024)
    config.index_head_dim = 48
    with pytest.raises(ConfigError, match=r"worker\.kv_dtype.*index_head_dim 48"):
        geometry_of(config, "fp8")
    assert geometry_of(config, "bfloat16").index_row_bytes == 96


def test_rows_and_index_keys_have_kinds_of_their_own(run_dir: Path) -> None:
    path = tiny_checkpoint(run_dir, "glm-5", index_topk=TOPK)
    settings = WorkerSettings(model=str(path), kv_dtype="fp8", index_dtype="fp4", seats=ROWS)
    mixed = load_runner(settings)
    assert (mixed._layers.rows.kind, mixed._layers.keys.kind) == ("fp8", "fp4")
    rows, keys = (runner_of(path, kind).geometry for kind in ("fp8", "fp4"))
    assert (mixed.geometry.row_bytes, mixed.geometry.index_row_bytes) == (rows.row_bytes, keys.index_row_bytes)
    settings = WorkerSettings(model=str(path), row_dtype="fp4", seats=ROWS)
    assert load_runner(settings)._layers.keys.kind == "float32"


def test_latents_of_four_bits_use_the_range_of_their_scales(checkpoint: Path) -> None:
    """Divided by a power of two that follows from the norm, so that a layer of small latents loses nothing."""
    runner, full = runner_of(checkpoint, "fp4"), runner_of(checkpoint, "float32")
    (rig, _), (exact, _) = run(runner, 0), run(full, 0)
    scale = runner._layers[0].forms.latent_scale
    assert scale == 2.0 ** -latent_exponent(full._layers[0].attention.kv_a_layernorm.weight)
    kept, held = slab_rows(rig)[0], slab_rows(exact)[0]
    assert float((kept[:, :64] / scale - held[:, :64]).norm() / held[:, :64].norm()) < 0.15
    assert bool((kept[:, 64:] - held[:, 64:]).abs().le(held[:, 64:].abs() / 16 + 2.0**-10).all())


def test_products_with_a_latent_scale_take_one_call() -> None:
    """Products go into memory that lies apart, whatever it held, as on a GPU."""
    draw = torch.Generator().manual_seed(1)
    first, second = torch.randn(3, 5, 4, generator=draw), torch.randn(3, 4, 6, generator=draw)
    whole = torch.full((5, 3, 8), torch.nan)
    mla._multiply(first, second, 8.0, whole[..., :6].transpose(0, 1))
    assert torch.equal(whole[..., :6].transpose(0, 1), 8 * torch.bmm(first, second))
    assert whole[..., 6:].isnan().all()
