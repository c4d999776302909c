"""Tokens behind a restored prefix beside those of the whole prefill, on a CPU: what the benchmark of a GPU compares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest
import torch
from torch import Tensor

from benchmarks.prefix_gpu import OUTPUT_TOKENS, Answer, Comparison, PromptWorker, compare_tokens
from protocol.logprobs import TokenLogprobs
from protocol.units import pages_for
from worker.runners.synthetic import synthetic_config, synthetic_runner

DIMENSIONS: Final = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"q_lora_rank": 64, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32},
    **{
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 64,
        "vocab_size": 1_024,
        "max_position_embeddings": 1_024,
    },
}
TOKENS: Final = 300
CHUNK: Final = 128


def worker_of(dtype: str, kv_dtype: str) -> PromptWorker:
    runner = synthetic_runner(
        synthetic_config("deepseek-v3.2", 2, **DIMENSIONS), device="cpu", dtype=dtype, kv_dtype=kv_dtype
    )
    pool = torch.zeros(2 * pages_for(TOKENS + OUTPUT_TOKENS + 1), runner.geometry.page_bytes, dtype=torch.uint8)
    return PromptWorker(runner, pool, TOKENS, pass_tokens=CHUNK, hot_slots=128, device="cpu")


@pytest.fixture(scope="module")
def worker() -> Iterator[PromptWorker]:
    made = worker_of("float32", "auto")
    yield made
    made.close()


def test_restored_prefix_changes_no_token(worker: PromptWorker) -> None:
    found = compare_tokens(worker, 192, 2, CHUNK)
    assert found["logprob_change_max"] < 1e-4
    assert (found["mismatched_tokens"], found["tied_tokens"], found["same_passes_mismatched_tokens"]) == (0, 0, 0)
    assert found["compared_tokens"] == found["same_passes_compared_tokens"] == 2 * OUTPUT_TOKENS
    assert found["same_passes_prefix_tokens"] == CHUNK


def sum_in_parts(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product whose sums have an order that depends on the number of rows, as those of GPUs do."""
    parts = 1 + inputs.shape[:-1].numel() // 64 % 4
    columns = zip(inputs.float().chunk(parts, -1), weight.float().chunk(parts, -1), strict=True)
    total = sum(mine @ theirs.T for mine, theirs in columns)
    assert isinstance(total, Tensor)
    return (total if bias is None else total + bias.float()).to(inputs.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_in_another_order_give_ties_in_bfloat16_alone(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", sum_in_parts)
    worker = worker_of(dtype, "auto")
    found = compare_tokens(worker, 192, 4, CHUNK)
    assert (found["mismatched_tokens"], found["same_passes_mismatched_tokens"]) == (0, 0)
    if dtype == "float32":
        assert 0 < found["logprob_change_max"] < 1e-3
        assert found["tied_tokens"] == 0
    else:
        assert found["logprob_change_max"] > 1e-2
    worker.close()


def test_fault_in_a_restored_page_is_seen(worker: PromptWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page of the prefix has the rows of another."""
    answer = worker.answer

    def faulty(seed: int, prefix_tokens: int = 0, *, logprobs: int) -> Answer:
        if prefix_tokens:
            worker.executor.state.host[1] = worker.executor.state.host[0]
        return answer(seed, prefix_tokens, logprobs=logprobs)

    monkeypatch.setattr(worker, "answer", faulty)
    found = compare_tokens(worker, 192, 2, CHUNK)
    assert found["same_passes_mismatched_tokens"] > 0
    assert found["logprob_change_max"] > 0.01


def test_prefix_below_a_pass_is_compared_under_the_tie_rule_alone(worker: PromptWorker) -> None:
    found = compare_tokens(worker, 64, 1, CHUNK)
    assert (found["compared_tokens"], found["same_passes_compared_tokens"]) == (OUTPUT_TOKENS, 0)


def answer_of(*rows: tuple[int, dict[int, float]]) -> Answer:
    """Tokens, each with the log-probabilities of the likeliest."""
    told = (TokenLogprobs(top[token], tuple(top.items())) for token, top in rows)
    return Answer(0.0, tuple(token for token, _ in rows), tuple(told))


WHOLE: Final = answer_of((1, {1: -1.0, 2: -3.0}), (1, {1: -1.0, 2: -1.1, 3: -1.15}), (4, {4: -1.0, 5: -2.0}))


def compared(restored: Answer, tie_bound: float = 0.2) -> Comparison:
    found = Comparison()
    found.add(WHOLE, restored, tie_bound)
    return found


def test_tokens_behind_a_tie_are_tied() -> None:
    found = compared(answer_of((1, {1: -1.0, 2: -3.0}), (3, {3: -1.0, 1: -1.1}), (9, {9: -1.0, 5: -2.0})))
    assert (found.verified, found.tied, found.mismatched) == (1, 2, 0)
    assert found.gaps == pytest.approx((0.15,))
    assert found.change_max == pytest.approx(0.15), "not of the third token, whose context is another"


@pytest.mark.parametrize("token", [2, 7], ids=["far behind", "none of the likeliest"])
def test_tokens_behind_another_difference_are_mismatched(token: int) -> None:
    found = compared(answer_of((token, {token: -1.0, 1: -1.2}), (1, {1: -1.0}), (4, {4: -1.0})))
    assert (found.verified, found.tied, found.mismatched) == (2, 0, 1)
    assert found.gaps[0] >= 2.0


def test_same_passes_excuse_no_changed_bit() -> None:
    moved = answer_of((1, {1: -1.0, 2: -3.0}), (1, {1: -1.0, 2: -1.1}), (4, {4: -1.0000001, 5: -2.0}))
    assert compared(moved).mismatched == 0
    assert compared(moved, 0.0).mismatched == 1
    assert compared(WHOLE, 0.0).mismatched == 0
