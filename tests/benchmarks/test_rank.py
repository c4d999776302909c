"""One rank at the size of the model: its floor, and the ranks that are synthesised beside it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rank import SynthesisedRanks
from benchmarks.rank_floor import Links, Part, floor_ms, parts_of
from kernels.cuda.quantize import Codes
from tests.worker.runners.test_synthetic import SMALL
from worker.group.exchange import Exchange
from worker.runners.checkpoint import geometry_of
from worker.weights.layout import ExpertShare, weights_bytes
from worker.weights.matmul import DECODED, Matmul
from worker.weights.synth import published_config


def test_weights_of_a_step_are_those_that_a_rank_holds() -> None:
    config = published_config("deepseek-v3.2")
    parts = parts_of(config, geometry_of(config, "fp8"), rows=256, of=8, context=1)
    held = weights_bytes(config, "bfloat16", (128, 128), on_gpu=True, experts=ExpertShare.of(0, 8, 256))
    read = sum(parts[name].bytes for name in ("projections", "indexer", "dense", "shared", "experts", "head"))
    embedding = config.vocab_size * config.hidden_size * 2
    assert read == pytest.approx(sum(held.values()) - embedding, rel=1e-3)


def test_parts_follow_rows_context_and_share() -> None:
    config = published_config("deepseek-v3.2")
    geometry = geometry_of(config, "fp8")
    one, more = (parts_of(config, geometry, rows=rows, of=8, context=32_768) for rows in (1, 64))
    assert more["index"].bytes == 64 * one["index"].bytes == 64 * 61 * 32_768 * 132
    assert more["attention"].bytes == 64 * 61 * 2048 * 656
    assert more["projections"].bytes == one["projections"].bytes
    assert one["experts"].bytes / more["experts"].bytes == pytest.approx(1 - (31 / 32) ** 8, rel=0.01)
    assert more["experts"].operations == 58 * 64 * 8 * 2 * 3 * 7168 * 2048


def test_floor_takes_the_slower_of_memory_and_products() -> None:
    parts = {"memory": Part(4e6, 1.0), "products": Part(1.0, 8e8)}
    assert floor_ms(parts, 4e3, 8e5) == {"memory": 1.0, "products": 1.0}


def test_links_of_one_rank_take_nothing() -> None:
    config = published_config("deepseek-v3.2")
    assert Links(1).step_ms(config, 64) == 0
    slow, fast = Links(8, latency_us=10, bytes_per_us=1e5), Links(8, latency_us=10, bytes_per_us=1e12)
    assert fast.step_ms(config, 64) == pytest.approx(58 * 20 / 1e3, rel=1e-3)
    quantized = Links(8, latency_us=10, bytes_per_us=1e5, row_value_bytes=1)
    assert slow.step_ms(config, 64) - quantized.step_ms(config, 64) == pytest.approx(
        58 * 7 * 64 * (7_168 - 224) / 1e5 / 1e3, rel=1e-3
    )
    assert slow.step_ms(config, 64) - fast.step_ms(config, 64) == pytest.approx(
        58 * 7 * 64 * (14_336 + 64 + 14_336) / 1e5 / 1e3, rel=1e-3
    )


@pytest.mark.parametrize("quantized", [False, True])
def test_experts_see_the_load_of_all_ranks(quantized: bool) -> None:
    config = published_config("deepseek-v3.2", layers=4, experts=16)
    config.update(SMALL | {"num_experts_per_tok": 4, "hidden_size": 128})
    torch.manual_seed(0)
    ranks = SynthesisedRanks.draw(config, 8, 32, "cpu", quantized=quantized)
    form = {"hidden": 128, "choices": 4, "rows_max": 32, "dtype": torch.bfloat16, "device": "cpu"}
    matmul = Matmul("fake 0.0", powers=True) if quantized else DECODED
    exchange = Exchange(ranks, deterministic=False, matmul=matmul, **form)  # type: ignore[arg-type]
    seen: list[torch.Tensor] = []

    def experts(
        rows: torch.Tensor | Codes, chosen: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        seen.append(chosen)
        states = rows.values.float() * rows.scales if isinstance(rows, Codes) else rows.float()
        assert states.std() == pytest.approx(1, abs=0.05)
        assert torch.allclose(weights[32:], torch.tensor(config.routed_scaling_factor / 4))
        return torch.zeros_like(out)

    hidden = torch.randn(32, 128).bfloat16()
    own = torch.arange(4).expand(32, 4)
    for _ in range(2):
        exchange.parts(hidden, own, torch.ones(32, 4), 32, experts)
    first, second = seen
    assert first.shape == (8 * 32, 4)
    assert (first[:32] == own).all()
    assert not torch.equal(first[32:], second[32:])
    assert all(len(set(row.tolist())) == 4 for row in first)
    loads = torch.bincount(first[32:].flatten(), minlength=16)
    assert loads.min() > 0.6 * loads.float().mean()
