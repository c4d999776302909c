"""The runner on a GPU: the model library's tokens, the same bits however rows are held, nothing that waits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernels.state import StepBatch  # noqa: E402
from tests.gpu.syncs import no_syncs  # noqa: E402
from tests.support.checkpoints import LATENT  # noqa: E402
from tests.support.oracle_rig import run_oracle  # noqa: E402
from tests.support.prompts import TEXT, launch_prompt  # noqa: E402
from tests.support.runner_rig import Rig  # noqa: E402
from worker.device.passes import PassUnit  # noqa: E402
from worker.group.exchange import Alike  # noqa: E402
from worker.runners.base import PromptPart, StepOutputs  # noqa: E402
from worker.runners.sampling import sample  # noqa: E402
from worker.runners.synthetic import synthetic_config, synthetic_runner  # noqa: E402
from worker.runners.tiny import write_tiny_checkpoint  # noqa: E402
from worker.runners.transformers_dsa import TransformersRunner  # noqa: E402

ROWS = 4
#: float32: tokens may differ only where generate()'s two best logits are closer (of order 5).
TIE_BOUND = 1e-3


@cache
def checkpoint(family: str, topk: int, place: Path) -> Path:
    path = place / f"{family}-{topk}"
    write_tiny_checkpoint(path, family, index_topk=topk)
    return path


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def runner_of(path: Path, dtype: str, kv_dtype: str = "auto") -> TransformersRunner:
    return TransformersRunner.load(path, device="cuda", dtype=dtype, kv_dtype=kv_dtype)


def library(path: Path, prompt: list[int], tokens: int, dtype: str) -> dict[str, Any]:
    """What generate() says on this card, in a process of its own."""
    prompts = [{"tokens": prompt, "max_new_tokens": tokens}]
    job = {"model": str(path), "prompts": prompts, "dtype": dtype, "device": "cuda", "ignore_eos": True}
    (answer,) = run_oracle(job)
    return answer


def generate(rig: Rig, prompt: list[int], hot_slots: int, tokens: int) -> tuple[list[int], Tensor]:
    """Greedy tokens of one request and their logits [tokens, vocab]."""
    token, logits = rig.open(0, prompt, hot_slots=hot_slots)
    drawn, seen = [token], [logits]
    for _ in range(tokens - 1):
        (token,), logits = rig.decode([0], rows=ROWS)
        drawn.append(token)
        seen.append(logits[0])
    return drawn, torch.stack(seen)


def rig_of(runner: TransformersRunner, tokens: int, *, graphs: bool = True, seed: int = 0, seats: int = 1) -> Rig:
    return Rig(runner, seats=seats, context_tokens=tokens, device="cuda", graphs=graphs, seed=seed)


# ---------------------------------------------------------------- against generate()


@pytest.mark.parametrize("family", LATENT)
def test_float32_tokens_are_those_of_generate(place: Path, family: str) -> None:
    """2,100 tokens of prompt, gathered prefill, a hot buffer of 1/8 of it, graphs; TF32 is off by default in torch."""
    path, prompt, tokens = checkpoint(family, 128, place), list(TEXT[:2_100]), 96
    assert not torch.backends.cuda.matmul.allow_tf32
    rig = rig_of(runner_of(path, "float32"), 2_200)
    ours, _ = generate(rig, prompt, 256, tokens)
    answer = library(path, prompt, tokens, "float32")
    split = next((i for i, (a, b) in enumerate(zip(ours, answer["tokens"], strict=True)) if a != b), tokens)
    assert split == tokens or answer["gaps"][split] < TIE_BOUND
    assert len(set(answer["tokens"])) > 16
    assert 0.2 < rig.hit_rate() < 0.8


@pytest.mark.parametrize("family", LATENT)
def test_bfloat16_logits_are_as_near_float32_as_the_library(place: Path, family: str) -> None:
    """Rounding moves logits by tenths, and by ones where it turns the indexer's selection: so no token is compared."""
    path, text, tokens = checkpoint(family, 128, place), list(TEXT[:1_064]), 64
    rig = rig_of(runner_of(path, "bfloat16"), 1_100)
    logits = [rig.open(0, text[:-tokens], hot_slots=256)[1]]
    logits += [rig.decode([0], rows=ROWS, inputs=[token])[1][0] for token in text[-tokens:-1]]
    truth, theirs = (library_logits(path, text[:-1], dtype)[-tokens:] for dtype in ("float32", "bfloat16"))
    ours_off, theirs_off = ((found - truth).abs().mean() for found in (torch.stack(logits), theirs))
    assert 0 < ours_off < 1.5 * theirs_off


def library_logits(path: Path, tokens: list[int], dtype: str) -> Tensor:
    """float32[tokens, vocab] of the model library's forward over all tokens at once."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).cuda().eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens], device="cuda")).logits[0].float()
    return logits


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("family", LATENT)
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "fp8"), ("bfloat16", "auto"), ("bfloat16", "fp8")])
def test_tokens_ignore_hot_sizes_and_graphs(place: Path, family: str, dtype: str, kv_dtype: str) -> None:
    runner, prompt, tokens = runner_of(checkpoint(family, 32, place), dtype, kv_dtype), list(TEXT[:500]), 24
    _, expected = generate(rig_of(runner, 600), prompt, 0, tokens)
    for hot_slots, graphs in ((32, True), (96, False), (0, False)):
        rig = rig_of(runner, 600, graphs=graphs, seed=hot_slots)
        assert torch.equal(generate(rig, prompt, hot_slots, tokens)[1], expected)
        assert rig.hit_rate() < 0.9 or not hot_slots


@pytest.mark.parametrize("family", LATENT)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_tokens_ignore_hot_sizes_and_graphs_at_real_dimensions(family: str, kv_dtype: str) -> None:
    """Random weights, 2,500 tokens of context: some hundred more than the top-k, so that tokens are chosen."""
    runner = synthetic_runner(synthetic_config(family, 2), kv_dtype=kv_dtype)
    prompt = [(37 * token + 11) % 9_973 for token in range(2_490)]
    _, expected = generate(rig_of(runner, 2_560), prompt, 0, 6)
    assert expected.isfinite().all()
    rig = rig_of(runner, 2_560, graphs=False, seed=1)
    assert torch.equal(generate(rig, prompt, 2_048, 6)[1], expected)
    assert 0 < rig.hit_rate() < 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_independent_or_deterministic_mode_is_refused(place: Path, dtype: str) -> None:
    """Where it is not refused: alone, and in the company of others at other places of the batch, the same bits."""
    path = checkpoint("deepseek-v3.2", 32, place)
    runner = TransformersRunner.load(path, device="cuda", dtype=dtype, deterministic_seats=ROWS)
    alone, together = (rig_of(runner, 300, seats=ROWS) for _ in range(2))
    for rig in (alone, together):
        for seat in range(ROWS):
            rig.open(seat, list(TEXT[seat * 50 : seat * 50 + 100 + seat * 30]), hot_slots=(0, 64)[seat % 2])
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0, 3, 1]):
        tokens, logits = together.decode(order, rows=ROWS)
        for row, seat in enumerate(order):
            (token,), own = alone.decode([seat], rows=ROWS)
            assert token == tokens[row]
            assert torch.equal(own[0], logits[row])


# ---------------------------------------------------------------- launches


@pytest.mark.parametrize("family", LATENT)
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "auto"), ("bfloat16", "fp8")])
def test_no_launch_waits_for_the_device(place: Path, family: str, dtype: str, kv_dtype: str) -> None:
    runner = runner_of(checkpoint(family, 32, place), dtype, kv_dtype)
    rig = rig_of(runner, 300, graphs=False)
    generate(rig, list(TEXT[:200]), 64, 3)
    tokens = torch.tensor(list(TEXT[:100]), device="cuda")
    step, one = rig._steps[ROWS], StepOutputs.allocate(1, runner.info.vocab_size, keep_logits=True, device="cuda")
    with no_syncs():
        launch_prompt(runner, rig.streams, rig.state, rig.sampler, 0, tokens, 0, one)
        runner.launch_forward(rig.streams, rig.state, rig.sampler, step.batch)
        runner.launch_sample(rig.streams, rig.sampler, step.batch, step.outputs, None)


@pytest.mark.parametrize("owner", [0, 1], ids=["owner", "guest"])
@pytest.mark.parametrize("family", LATENT)
def test_no_launch_of_a_split_unit_waits_for_the_device(place: Path, family: str, owner: int) -> None:
    """Launch a unit of rank 0 behind earlier rows: as the owner of the pass, and as the other rank."""
    path = checkpoint(family, 32, place)
    runner = TransformersRunner.load(path, device="cuda", dtype="float32", collectives=Alike(0, 2), rows_max=128)
    rig = rig_of(runner, 300, graphs=False)
    rig.grant(0, 200)
    state = rig.state if owner == 0 else rig.state.guest(1)
    if owner:
        state.slab_table[0] = torch.arange(state.slab_table.shape[1], device="cuda")
    tokens = torch.tensor(list(TEXT[:100]), device="cuda")

    def launch() -> None:
        prompts = runner.begin_pass(rig.streams, state, [PromptPart(0, 64, 164, 0, True)], tokens)
        for unit in (PassUnit(layer, first, first + 25) for layer in range(runner.info.layers) for first in (0, 25)):
            runner.launch_split(rig.streams, state, prompts, unit, owner)

    launch()
    with no_syncs():
        launch()


def test_generator_replaces_the_indexer_inside_a_graph(place: Path) -> None:
    calls: list[int] = []

    def newest(group: int, batch: StepBatch, topk: Tensor) -> None:
        calls.append(group)
        back = torch.arange(topk.shape[1], 0, -1, device=topk.device)
        topk.copy_(torch.where(batch.lengths.unsqueeze(1) > 0, batch.lengths.unsqueeze(1) - back, -1))

    path = checkpoint("deepseek-v3.2", 32, place)
    runner = TransformersRunner.load(path, device="cuda")
    runner.after_index_topk = newest
    rig = rig_of(runner, 400)
    generate(rig, list(TEXT[:300]), 64, 12)
    assert len(calls) == 2 * runner.geometry.groups  # warm-up and capture
    assert rig.hit_rate() > 0.85  # one new token a step, after 31 cold ones


# ---------------------------------------------------------------- draws


@pytest.mark.parametrize("vocab", [11, 264, 129_280])
def test_draws_are_those_of_the_cpu(vocab: int) -> None:
    draw = torch.Generator().manual_seed(vocab)
    rows = 96
    logits = torch.randn(rows, vocab, generator=draw) * 4
    logits[::3] = logits[::3].round()  # many equal logits
    temperature = torch.tensor([0.0, 0.3, 1.0, 2.0]).repeat(rows // 4)
    top_p = torch.tensor([1.0, 0.95, 0.5, 1e-6, 0.999, 0.2]).repeat(rows // 6)
    seed = torch.randint(-(2**62), 2**62, (rows,), generator=draw)
    position = torch.randint(0, 2**20, (rows,), generator=draw)
    arguments = (logits, temperature, top_p, seed, position)
    on_card: Callable[..., Tensor] = sample
    for first in (0, 1):  # parameters of single seats lie anywhere
        found = on_card(*(argument.cuda()[first:] for argument in arguments))
        assert torch.equal(found.cpu(), sample(*(argument[first:] for argument in arguments)))
