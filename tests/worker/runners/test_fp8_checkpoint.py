"""Checkpoints in block-FP8: tokens are those of the library on the decoded weights, whether FP8 is kept or decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import LATENT, tiny_checkpoint
from tests.support.history import in_turn
from tests.support.oracle_rig import run_oracle
from tests.support.prompts import TEXT
from tests.support.runner_rig import Rig
from worker.runners import transformers_dsa
from worker.runners.tiny import write_tiny_checkpoint
from worker.runners.transformers_dsa import TransformersRunner
from worker.weights.matmul import Matmul

#: Greedy tokens may differ only where the library's own two best logits are closer (fp32, logits of order 5).
TIE_BOUND = 1e-3
#: Likewise where activations are rounded to e4m3: sums in another order put a few of them on the other side of a step.
W8A8_TIE_BOUND = 3e-2
ROWS = 4


@pytest.fixture(scope="session")
def checkpoints(run_dir: Path) -> dict[str, Path]:
    """One of each family, with ragged blocks in every kind of weight; glm-5's scales are powers of two."""
    about = {"index_topk": 64, "fp8": True, "layers": 2}
    return {family: tiny_checkpoint(run_dir, family, **about, powers_of_two=family == "glm-5") for family in LATENT}


def generate(path: Path, prompt: list[int], tokens: int, dtype: str) -> dict[str, Any]:
    job = {"model": str(path), "prompts": [{"tokens": prompt, "max_new_tokens": tokens}], "dtype": dtype}
    (answer,) = run_oracle(job)
    return answer


def greedy(runner: TransformersRunner, prompt: list[int], hot_slots: int, tokens: int) -> tuple[list[int], Tensor]:
    """Greedy tokens of one request, and their logits [tokens, vocab]."""
    rig = Rig(runner, seats=1, context_tokens=len(prompt) + tokens)
    token, logits = rig.open(0, prompt, hot_slots=hot_slots)
    drawn, seen = [token], [logits]
    for _ in range(tokens - 1):
        (token,), logits = rig.decode([0], rows=ROWS)
        drawn.append(token)
        seen.append(logits[0])
    return drawn, torch.stack(seen)


@pytest.mark.process
@pytest.mark.parametrize("family", [in_turn(LATENT)])
def test_tokens_are_those_of_the_library_on_decoded_weights(checkpoints: dict[str, Path], family: str) -> None:
    prompt, tokens = list(TEXT[:600]), 32
    theirs = generate(checkpoints[family], prompt, tokens, "float32")
    for keeps_fp8 in (False, True):
        ours, _ = greedy(TransformersRunner.load(checkpoints[family], keeps_fp8=keeps_fp8), prompt, 128, tokens)
        pairs = zip(ours, theirs["tokens"], strict=True)
        split = next((i for i, (a, b) in enumerate(pairs) if a != b), tokens)
        assert split == tokens or theirs["gaps"][split] < TIE_BOUND
    assert len(set(theirs["tokens"])) > 10  # the comparison says something


@pytest.mark.process
@pytest.mark.parametrize("family", [in_turn(LATENT)])
def test_tokens_of_w8a8_are_those_of_the_oracle(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, prompt, tokens = tmp_path / family, list(TEXT[:400]), 32
    powers = family == "deepseek-v3.2"
    write_tiny_checkpoint(path, family, index_topk=64, fp8=True, powers_of_two=powers, whole_blocks=True, layers=2)
    monkeypatch.setattr(transformers_dsa, "resolve_matmul", lambda *_, **__: Matmul("fake 0.0", powers=powers))
    job = {"model": str(path), "prompts": [{"tokens": prompt, "max_new_tokens": tokens}], "matmul": "w8a8"}
    (theirs,) = run_oracle(job)
    (exact,) = run_oracle(job | {"matmul": "weight_only"})
    ours, _ = greedy(TransformersRunner.load(path, keeps_fp8=True), prompt, 128, tokens)
    split = next((i for i, (a, b) in enumerate(zip(ours, theirs["tokens"], strict=True)) if a != b), tokens)
    assert split == tokens or theirs["gaps"][split] < W8A8_TIE_BOUND
    assert exact["tokens"] != theirs["tokens"], "the comparison says something"


@pytest.mark.parametrize("family", LATENT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_hot_size(checkpoints: dict[str, Path], family: str, dtype: str) -> None:
    runner = TransformersRunner.load(checkpoints[family], dtype=dtype)
    results = [greedy(runner, list(TEXT[:300]), hot_slots, 12) for hot_slots in (0, 64, 128, 256)]
    assert all(torch.equal(logits, results[0][1]) for _, logits in results)


@pytest.mark.parametrize("family", LATENT)
def test_kept_fp8_gives_the_logits_of_decoded_weights(checkpoints: dict[str, Path], family: str) -> None:
    decoded, kept = (
        greedy(TransformersRunner.load(checkpoints[family], keeps_fp8=keeps), list(TEXT[:200]), 64, 4)[1]
        for keeps in (False, True)
    )
    torch.testing.assert_close(kept, decoded, rtol=1e-4, atol=1e-4)


@pytest.mark.process
def test_decoding_in_bfloat16_rounds_once(checkpoints: dict[str, Path]) -> None:
    """The decoded weights are the oracle's, bit for bit."""
    from worker import oracle

    path = checkpoints["deepseek-v3.2"]
    runner = TransformersRunner.load(path, dtype="bfloat16")
    model = runner._layers.model
    from transformers import AutoModelForCausalLM

    with oracle.decoded(path, torch.bfloat16) as readable:
        theirs = AutoModelForCausalLM.from_pretrained(readable, dtype=torch.bfloat16)
    ours = dict(model.state_dict())
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours[name], weight), name
