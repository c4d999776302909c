"""The runner against the model library: same tokens as generate(), same bits for any hot buffer and any company."""

from __future__ import annotations

import functools
import gc
import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

import worker.oracle
from protocol.errors import ConfigError
from protocol.logprobs import read_rows
from protocol.messages import LOGPROBS_MAX, ModelInfo
from protocol.settings import WorkerSettings
from tests.support.checkpoints import LATENT, tiny_checkpoint
from tests.support.history import in_turn
from tests.support.oracle_rig import run_oracle
from tests.support.prompts import TEXT
from tests.support.runner_rig import Rig
from worker.runners import layers, swapping
from worker.runners.checkpoint import geometry_of
from worker.runners.experts import experts_for
from worker.runners.invariance import not_apart, remedies, rows_apart
from worker.runners.load import load_runner
from worker.runners.logprobs import allocate_rows
from worker.runners.sampling import sample
from worker.runners.tiny import tiny_config
from worker.runners.transformers_dsa import TransformersRunner
from worker.streams import make_streams

#: Greedy tokens may differ only where generate()'s own two best logits are closer (fp32, logits of order 5).
TIE_BOUND = 1e-3
BATCH_ROWS = 5


@pytest.fixture(scope="session")
def checkpoints(run_dir: Path) -> dict[str, Path]:
    """A checkpoint of each family with index_topk 128, and one of each with 32 for small contexts ("<family>/32")."""
    return {
        family + suffix: tiny_checkpoint(run_dir, family, index_topk=topk)
        for family in LATENT
        for topk, suffix in ((128, ""), (32, "/32"))
    }


#: Shapes that tiny checkpoints do not have: widths no vector divides, unequal head counts, biases, groups of experts.
ODD_SHAPE: dict[str, Any] = {
    "intermediate_size": 72,
    "moe_intermediate_size": 40,
    "n_routed_experts": 6,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "v_head_dim": 24,
    "index_n_heads": 12,  # few heads make exact ties at a score of zero, which the library breaks arbitrarily
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


@functools.cache
def odd_model(family: str, topk: int) -> tuple[Any, TransformersRunner]:
    """A model of unshaped random weights, and its runner. Loaded from no file."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, topk, 1_024)
    for name, value in ODD_SHAPE.items():
        setattr(config, name, value)
    config.mlp_layer_types = ["dense", "sparse", "sparse", "sparse"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5 + (weight.dim() < 2))
    info = ModelInfo("", "odd", 1_024, config.vocab_size, 4, topk, (), "bytes", "")
    return model, TransformersRunner(model, info, geometry_of(config, "float32"), deterministic_seats=BATCH_ROWS)


@functools.cache
def runner_of(path: Path) -> TransformersRunner:
    return TransformersRunner.load(path, deterministic_seats=BATCH_ROWS)


def prompt_of(tokens: int, start: int = 0) -> list[int]:
    return list(TEXT[start : start + tokens])


def greedy(rig: Rig, seat: int, prompt: Sequence[int], hot_slots: int, tokens: int) -> tuple[list[int], Tensor]:
    """`tokens` greedy tokens of one request alone, and their logits [tokens, vocab]."""
    token, logits = rig.open(seat, prompt, hot_slots=hot_slots)
    drawn, seen = [token], [logits]
    for _ in range(tokens - 1):
        (token,), logits = rig.decode([seat], rows=BATCH_ROWS)
        drawn.append(token)
        seen.append(logits[0])
    return drawn, torch.stack(seen)


# ---------------------------------------------------------------- against generate()


@pytest.mark.process
@pytest.mark.parametrize("family", in_turn((LATENT[::2], LATENT[1::2])))
def test_greedy_tokens_are_those_of_generate(checkpoints: dict[str, Path], family: str) -> None:
    """A prompt of some thousand tokens, top-k below 1/16 of it, 64 new tokens, a hot buffer of 1/8."""
    prompt, tokens = prompt_of(2_100, 7_000), 64
    rig = Rig(runner_of(checkpoints[family]), seats=1, context_tokens=len(prompt) + tokens)
    ours, _ = greedy(rig, 0, prompt, 256, tokens)
    job = {"model": str(checkpoints[family]), "prompts": [{"tokens": prompt, "max_new_tokens": tokens}]}
    (answer,) = run_oracle(job)
    split = next((i for i, (a, b) in enumerate(zip(ours, answer["tokens"], strict=True)) if a != b), tokens)
    assert split == tokens or answer["gaps"][split] < TIE_BOUND
    assert len(set(answer["tokens"])) > 24  # the comparison says something
    assert 0.2 < rig.hit_rate() < 0.8


@pytest.mark.process
def test_oracle_with_other_last_bits_is_the_same_for_the_same_number(checkpoints: dict[str, Path]) -> None:
    job = {"model": str(checkpoints["glm-5"]), "prompts": [{"tokens": prompt_of(300), "max_new_tokens": 8}]}
    plain, one, again, other = (run_oracle(job | more)[0] for more in ({}, {"nudge": 0}, {"nudge": 0}, {"nudge": 1}))
    assert one["gaps"] == again["gaps"]
    for nudged in (one, other):
        assert nudged["gaps"] != plain["gaps"]
        assert nudged["gaps"] == pytest.approx(plain["gaps"], abs=1e-2)
    assert one["gaps"] != other["gaps"]


@pytest.mark.process
def test_oracle_imports_no_product_code() -> None:
    probe = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); "
        "print([name for name in sys.modules if name.split('.')[0] in ('coordinator', 'worker', 'kernels', 'metrics')])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", probe, worker.oracle.__file__],
        capture_output=True, text=True, cwd="/", check=True, timeout=250,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("family", LATENT)
def test_prefill_rows_match_the_library(checkpoints: dict[str, Path], family: str) -> None:
    """Chunked prefill into the slab: rows and index keys of the library's cache, but for the last bits."""
    from transformers import DynamicCache

    from kernels.rows import read_index_keys, read_slab_rows

    runner, prompt = runner_of(checkpoints[family]), prompt_of(1_300)
    rig = Rig(runner, seats=1, context_tokens=len(prompt))
    _, logits = rig.open(0, prompt, hot_slots=0)
    model = runner._layers.model
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1).logits[0, 0]
    for number, layer in enumerate(cache.layers):
        rows = read_slab_rows(rig.state, number, 0, len(prompt)).view(torch.float32)
        theirs = torch.cat((layer.keys[0, 0], layer.values[0, 0]), dim=-1)
        near = torch.isclose(rows, theirs, rtol=0, atol=1e-4).all(1)
        assert int((~near).sum()) <= 3  # a near-tie in the top-k may fall the other way
        if layer.indexer_keys is not None:
            group = runner.geometry.group_of_layer[number]
            keys = read_index_keys(rig.state, group, 0, len(prompt)).view(torch.float32)
            torch.testing.assert_close(keys[near], layer.indexer_keys[0][near], rtol=0, atol=1e-4)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("family", LATENT)
def test_decode_logits_match_the_library_for_any_shape(family: str) -> None:
    """Heads, groups, biases and yarn all matter to a random model; all tokens selected, only rounding may differ."""
    model, runner = odd_model(family, 512)
    prompt, rig = prompt_of(200), Rig(runner, seats=1, context_tokens=300)
    drawn, logits = greedy(rig, 0, prompt, 0, 12)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt + drawn[:-1]])).logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("family", LATENT)
def test_random_indexer_selects_as_the_library(family: str) -> None:
    """Decode with a top-k of 32 in 300: a wrong selection in any layer would show in nearly every step."""
    model, runner = odd_model(family, 32)
    prompt, rig = prompt_of(300), Rig(runner, seats=1, context_tokens=400)
    drawn, logits = greedy(rig, 0, prompt, 64, 24)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt + drawn[:-1]])).logits[0, len(prompt) - 1 :]
    near = torch.isclose(logits, expected, rtol=0, atol=1e-3).all(1)
    assert int((~near).sum()) <= 2  # near-ties at the edge of the top-k


@pytest.mark.parametrize("family", LATENT)
def test_log_probabilities_match_the_library(family: str) -> None:
    """All tokens selected, only rounding may differ: values, and ids up to ties."""
    model, runner = odd_model(family, 512)
    prompt, rig = prompt_of(200), Rig(runner, seats=1, context_tokens=300)
    drawn, told = [rig.open(0, prompt, hot_slots=0)[0]], []
    rig._step(BATCH_ROWS).outputs.logprobs = rows = allocate_rows(BATCH_ROWS)
    for _ in range(8):
        drawn += rig.decode([0], rows=BATCH_ROWS)[0]
        told += read_rows(rows[:1].numpy())
    with torch.inference_mode():
        expected = model(torch.tensor([prompt + drawn[:-1]])).logits[0, len(prompt) :].log_softmax(-1)
    for right, token, row in zip(expected, drawn[1:], told, strict=True):
        ids, values = zip((token, row.logprob), *row.top, strict=True)
        torch.testing.assert_close(torch.tensor(values), right[torch.tensor(ids)], rtol=0, atol=1e-4)
        torch.testing.assert_close(torch.tensor(values[1:]), right.topk(LOGPROBS_MAX).values, rtol=0, atol=1e-4)
        assert len(set(ids[1:])) == LOGPROBS_MAX


# ---------------------------------------------------------------- hot buffers


@pytest.mark.parametrize("family", in_turn((LATENT[1::2], LATENT[::2])))
def test_logits_do_not_depend_on_the_hot_buffer(checkpoints: dict[str, Path], family: str) -> None:
    """Resident, and managed from the smallest size that can be (top-k) upward: the same bits, step for step."""
    runner, prompt, tokens = runner_of(checkpoints[f"{family}/32"]), prompt_of(600), 24
    results, rates = [], []
    for hot_slots in (0, 32, 64, 96, 256):
        rig = Rig(runner, seats=1, context_tokens=len(prompt) + tokens, seed=hot_slots)
        results.append(greedy(rig, 0, prompt, hot_slots, tokens))
        rates.append(rig.hit_rate())
    assert all(drawn == results[0][0] and torch.equal(logits, results[0][1]) for drawn, logits in results[1:])
    assert rates[0] == 1.0
    assert rates[1] < rates[2] < rates[3] < rates[4] < 1.0


def test_corrupted_host_row_is_seen(checkpoints: dict[str, Path]) -> None:
    """What makes the tests above mean something: decoding reads the host rows that it selects."""
    runner, prompt = runner_of(checkpoints["deepseek-v3.2/32"]), prompt_of(600)
    rig = Rig(runner, seats=1, context_tokens=700)
    _, expected = greedy(rig, 0, prompt, 64, 20)
    damaged = Rig(runner, seats=1, context_tokens=700)
    damaged.open(0, prompt, hot_slots=64)
    damaged.state.host[damaged.state.host_table[0, 3].long()] ^= 0x41
    logits = torch.stack([damaged.decode([0], rows=BATCH_ROWS)[1][0] for _ in range(19)])
    assert not torch.equal(logits, expected[1:])


# ---------------------------------------------------------------- deterministic mode


@pytest.mark.parametrize("family", LATENT)
def test_row_does_not_depend_on_its_batch(checkpoints: dict[str, Path], family: str) -> None:
    """Requests of mixed lengths, modes and temperatures: alone, and in batches of changing company and order."""
    runner, tokens = runner_of(checkpoints[f"{family}/32"]), 14
    requests = [(300, 0, 0.0), (520, 64, 0.7), (130, 32, 1.3), (700, 96, 0.0)]

    def opened() -> Rig:
        rig = Rig(runner, seats=len(requests), context_tokens=800)
        for seat, (length, hot_slots, temperature) in enumerate(requests):
            rig.open(seat, prompt_of(length, start=seat * 311), hot_slots=hot_slots, temperature=temperature, seed=seat)
        return rig

    alone, together, draw = opened(), opened(), random.Random(5)
    expected = [[alone.decode([seat], rows=BATCH_ROWS) for _ in range(tokens)] for seat in range(len(requests))]
    taken = [0] * len(requests)
    while min(taken) < tokens:
        waiting = [seat for seat in range(len(requests)) if taken[seat] < tokens]
        batch = draw.sample(waiting, draw.randint(1, len(waiting)))
        drawn, logits = together.decode(batch, rows=BATCH_ROWS)
        for row, seat in enumerate(batch):
            (token,), own = expected[seat][taken[seat]]
            assert drawn[row] == token
            assert torch.equal(logits[row], own[0])
            taken[seat] += 1


def test_forced_tokens_give_the_logits_of_drawn_ones(checkpoints: dict[str, Path]) -> None:
    """Replay after a resume: feeding known ids through decode steps is the same computation."""
    runner, prompt = runner_of(checkpoints["glm-5/32"]), prompt_of(260)
    rig = Rig(runner, seats=1, context_tokens=400)
    drawn, logits = greedy(rig, 0, prompt, 64, 30)
    replay = Rig(runner, seats=1, context_tokens=400)
    replay.open(0, prompt, hot_slots=64)
    again = [replay.decode([0], rows=BATCH_ROWS, inputs=[token])[1][0] for token in drawn[:-1]]
    assert torch.equal(torch.stack(again), logits[1:])


def test_sampled_tokens_are_those_of_seed_and_position(checkpoints: dict[str, Path]) -> None:
    """The token at position p of a context, prompt included, is draw p of the request's seed."""
    runner, prompt, one = runner_of(checkpoints["glm-5/32"]), prompt_of(200), torch.ones(1)
    for seed in (1, -7):
        rig = Rig(runner, seats=2, context_tokens=300)
        token, logits = rig.open(1, prompt, hot_slots=0, temperature=1.0, seed=seed)
        for position in range(200, 220):
            assert token == sample(logits[None], one, one, torch.tensor([seed]), torch.tensor([position])).item()
            (token,), (logits,) = rig.decode([1], rows=BATCH_ROWS)


def test_dependent_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths that leave rows in the scalar tail of a vector loop: without surplus rows, a row's place shows."""
    model, runner = odd_model("glm-5", 32)
    assert layers.row_multiple(model.config) == 16
    monkeypatch.setattr(layers, "row_multiple", lambda config: 1)
    with pytest.raises(ConfigError, match=r"worker\.deterministic") as refused:
        TransformersRunner(model, runner.info, runner.geometry, deterministic_seats=BATCH_ROWS)
    seats = re.search(r"worker\.seats = (\d+)", refused.value.remedy)
    if seats:
        TransformersRunner(model, runner.info, runner.geometry, deterministic_seats=int(seats[1]))


@pytest.mark.parametrize(("threads", "helps"), [(1, "none"), (2, "threads"), (2, "seats"), (2, "none")])
def test_remedy_of_dependent_rows_works(threads: int, helps: str) -> None:
    """One thread is no remedy where there is one already, nor where it was tried in vain."""

    def apart(seats: int) -> bool:
        return (helps == "threads" and torch.get_num_threads() == 1) or (helps == "seats" and seats == 16)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = remedies(apart, 5, uses_threads=True)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    expected = {"threads": ["set worker.threads = 1"], "seats": ["set worker.seats = 16"], "none": []}
    assert found == expected[helps]
    assert not_apart(found).remedy == ", or ".join([*found, "run without it"])


def test_row_independence_check_compares_with_and_without() -> None:
    rows = functools.partial(torch.randn, 3, 8)
    assert rows_apart(torch.square, rows)
    assert not rows_apart(lambda batch: batch + batch.sum(0) * 1e-6, rows)
    assert not rows_apart(lambda batch: batch + torch.arange(3.0).unsqueeze(1), rows)


# ---------------------------------------------------------------- streams


@pytest.mark.sim
def test_logits_do_not_depend_on_fence_order(checkpoints: dict[str, Path]) -> None:
    expected, *others = (shared_layer_logits(checkpoints, seed) for seed in (-1, 0, 1, 2))
    assert all(torch.equal(logits, expected) for logits in others)


#: Logits with the inline backend, by the number of rows up to which selections go beside others.
UNDISTURBED: dict[int, Tensor] = {}


@pytest.mark.sim
@pytest.mark.mutation
@pytest.mark.parametrize(
    ("fence", "beside"),
    [
        ("selected", 1),
        ("compressed", 99),
        ("normed", 99),
        ("shared", 99),
        *((name, rows) for name in ("swapped_in", "prefetched") for rows in (1, 99)),
    ],
)
def test_a_missing_fence_gives_wrong_logits(
    checkpoints: dict[str, Path], fence: str, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swapping, "BESIDE_ROWS", beside)
    if beside not in UNDISTURBED:
        UNDISTURBED[beside] = shared_layer_logits(checkpoints, -1)
    expected = UNDISTURBED[beside]
    assert torch.equal(shared_layer_logits(checkpoints, 0, order="plain", omit=[fence]), expected)
    assert any(is_wrong(checkpoints, seed, fence, expected) for seed in range(8))


def is_wrong(checkpoints: dict[str, Path], seed: int, fence: str, expected: Tensor) -> bool:
    try:
        return not torch.equal(shared_layer_logits(checkpoints, seed, omit=[fence]), expected)
    except AssertionError:  # an operation found nothing where another one should have been
        return True


def shared_layer_logits(checkpoints: dict[str, Path], seed: int, **options: Any) -> Tensor:
    """Of a model whose every other layer waits for the swap stream; seed -1 is the inline backend."""
    streams = make_streams("inline") if seed < 0 else make_streams("simulated", seed=seed, **options)
    rig = Rig(runner_of(checkpoints["glm-5/32"]), seats=1, context_tokens=200, streams=streams)
    return greedy(rig, 0, prompt_of(150), 32, 12)[1]


# ---------------------------------------------------------------- refusals and description


def test_a_runner_does_not_keep_the_state_that_it_served(checkpoints: dict[str, Path]) -> None:
    """Benchmarks serve one state after the other; each holds gigabytes."""
    rig = Rig(runner_of(checkpoints["glm-5/32"]), seats=1, context_tokens=200)
    greedy(rig, 0, prompt_of(70), 0, 2)
    state = ref(rig.state)
    del rig
    gc.collect()
    assert state() is None


def test_geometry_and_info_follow_the_config(checkpoints: dict[str, Path]) -> None:
    runner = runner_of(checkpoints["glm-5"])
    assert runner.geometry.group_of_layer == (0, 0, 1, 1)
    assert (runner.geometry.row_bytes, runner.geometry.index_row_bytes) == ((64 + 16) * 4, 32 * 4)
    info = runner.info
    assert (info.layers, info.topk, info.vocab_size, info.eos_token_ids) == (4, 128, 264, (257,))
    assert (info.tokenizer_kind, info.context_max_tokens) == ("bytes", 16_384)
    assert runner_of(checkpoints["deepseek-v3.2"]).geometry.group_of_layer == (0, 1, 2, 3)


def test_experts_are_formed_as_device_and_dtype_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's decode must not read on the host, nor copy every token's experts where it can help it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert experts_for(torch.device("cpu"), torch.bfloat16) == ("batched_mm", "grouped_mm")
    assert experts_for(torch.device("cuda"), torch.bfloat16) == ("grouped_mm", "grouped_mm")
    assert experts_for(torch.device("cuda"), torch.float32) == ("batched_mm", "batched_mm")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert experts_for(torch.device("cuda"), torch.bfloat16) == ("batched_mm", "batched_mm")


def test_bfloat16_runs(checkpoints: dict[str, Path]) -> None:
    runner = load_runner(WorkerSettings(model=str(checkpoints["glm-5/32"]), dtype="bfloat16"))
    results = []
    for hot_slots in (0, 64):
        rig = Rig(runner, seats=1, context_tokens=200)
        results.append(greedy(rig, 0, prompt_of(150), hot_slots, 8))
    assert runner.geometry.row_bytes == (64 + 16) * 2
    assert torch.equal(results[0][1], results[1][1])


def test_unsupported_checkpoint_is_refused(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    def refused(config: dict[str, Any], match: str, weights: bool = True) -> None:
        path = tmp_path / match.replace(" ", "-")
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        if weights:
            (path / "model.safetensors").write_bytes(b"")
        with pytest.raises(ConfigError, match=match):
            TransformersRunner.load(path)

    with pytest.raises(ConfigError, match="no readable checkpoint"):
        TransformersRunner.load(tmp_path / "absent")
    refused({"model_type": "llama"}, "model_type llama is not served")
    refused({"model_type": "deepseek_v32", "quantization_config": {"x": 1}}, "method None is not served")
    refused({"model_type": "deepseek_v32"}, "no safetensors", weights=False)
    with pytest.raises(ConfigError, match=r"worker\.dtype"):
        TransformersRunner.load(checkpoints["glm-5"], dtype="float8")
