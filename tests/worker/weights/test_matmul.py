"""Resolution of worker.matmul: by the card, its library, the model's dtype, the checkpoint, deterministic mode."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from kernels.cuda import deep_gemm
from protocol.errors import ConfigError
from protocol.settings import WorkerSettings
from worker.runners.base import arithmetic
from worker.weights.matmul import DECODED, Matmul, resolve_matmul
from worker.weights.quantization import Quantization

FP8 = Quantization(powers_of_two=True)
CASE: dict[str, Any] = {
    "device": torch.device("cuda"),
    "dtype": torch.bfloat16,
    "quantization": FP8,
    "deterministic": False,
}
FOUND = Matmul("deep_gemm 1.2", powers=True)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "require", lambda device: "deep_gemm 1.2")


@pytest.mark.parametrize("asked", ["auto", "w8a8"])
def test_fp8_checkpoint_on_a_card_with_the_library_is_w8a8(asked: str) -> None:
    found = resolve_matmul(asked, **CASE)
    assert found == FOUND
    assert found.quantizes_rows
    assert found.name == "w8a8 by deep_gemm 1.2"


def test_scales_of_activations_follow_the_checkpoint() -> None:
    assert not resolve_matmul("auto", **CASE | {"quantization": Quantization()}).powers


def test_weight_only_asks_for_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "require", None)
    assert resolve_matmul("weight_only", **CASE) == DECODED
    assert DECODED.name == "weight_only"


def test_auto_is_weight_only_in_deterministic_mode() -> None:
    assert resolve_matmul("auto", **CASE | {"deterministic": True}) == DECODED
    assert resolve_matmul("w8a8", **CASE | {"deterministic": True}) == FOUND


CAUSES: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.float32}, r"w8a8: quantizes activations in bfloat16, not in float32 .*worker\.dtype = bfloat16"),
    ({"device": torch.device("cpu")}, r"w8a8: no CPU multiplies FP8 \(use a GPU"),
    ({"quantization": None}, r"w8a8: the checkpoint has no weights in FP8 \(use weight_only or auto"),
]


@pytest.mark.parametrize(("change", "said"), CAUSES, ids=["dtype", "device", "checkpoint"])
def test_w8a8_that_cannot_be_is_refused_and_auto_is_not(change: dict[str, Any], said: str) -> None:
    assert resolve_matmul("auto", **CASE | change) == DECODED
    with pytest.raises(ConfigError, match=f"worker.matmul={said}"):
        resolve_matmul("w8a8", **CASE | change)


def test_missing_library_is_named_and_auto_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(device: torch.device) -> str:
        raise ConfigError("cannot be imported: x", field="deep_gemm", value="torch 2.11", remedy="pip install y")

    monkeypatch.setattr(deep_gemm, "require", missing)
    with caplog.at_level(logging.WARNING):
        assert resolve_matmul("auto", **CASE) == DECODED
    (record,) = [it for it in caplog.records if "weight_only" in it.getMessage()]
    assert "pip install y" in str(vars(record))
    with pytest.raises(ConfigError, match=r"worker.matmul=w8a8: deep_gemm \(torch 2.11\) cannot be imported: x \(pip"):
        resolve_matmul("w8a8", **CASE)


def test_arithmetic_names_what_rows_depend_on() -> None:
    """Rows of quantized activations are not reused by workers that decode weights, nor by another release's."""
    plain, sure = WorkerSettings(), WorkerSettings(deterministic=True)
    assert arithmetic(plain, DECODED) == ""
    assert arithmetic(plain, FOUND) == "w8a8 by deep_gemm 1.2"
    assert arithmetic(sure, DECODED) == "chunks of 512 tokens, weight_only, cpu"
    assert arithmetic(sure, FOUND) == "chunks of 512 tokens, w8a8 by deep_gemm 1.2, cpu"
