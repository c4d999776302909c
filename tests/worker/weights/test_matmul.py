"""Resolution of worker.matmul: by the card, its library, the model's dtype and the checkpoint."""

from __future__ import annotations

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
}
FOUND = Matmul("deep_gemm 1.2", powers=True)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "require", lambda device: "deep_gemm 1.2")


def test_w8a8_names_the_library_that_multiplies() -> None:
    found = resolve_matmul("w8a8", **CASE)
    assert found == FOUND
    assert found.quantizes_rows
    assert found.name == "w8a8 by deep_gemm 1.2"


def test_scales_of_activations_follow_the_checkpoint() -> None:
    assert not resolve_matmul("w8a8", **CASE | {"quantization": Quantization()}).powers


def test_weight_only_asks_for_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "require", None)
    assert resolve_matmul("weight_only", **CASE) == DECODED
    assert DECODED.name == "weight_only"


CAUSES: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.float32}, r"w8a8: quantizes activations in bfloat16, not in float32 .*worker\.dtype = bfloat16"),
    ({"device": torch.device("cpu")}, r"w8a8: no CPU multiplies FP8 \(use a GPU"),
    ({"quantization": None}, r"w8a8: the checkpoint has no weights in FP8 \(use weight_only"),
]


@pytest.mark.parametrize(("change", "said"), CAUSES, ids=["dtype", "device", "checkpoint"])
def test_w8a8_that_cannot_be_is_refused(change: dict[str, Any], said: str) -> None:
    assert resolve_matmul("weight_only", **CASE | change) == DECODED
    with pytest.raises(ConfigError, match=f"worker.matmul={said}"):
        resolve_matmul("w8a8", **CASE | change)


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: torch.device) -> str:
        raise ConfigError("cannot be imported: x", field="deep_gemm", value="torch 2.11", remedy="pip install y")

    monkeypatch.setattr(deep_gemm, "require", missing)
    with pytest.raises(ConfigError, match=r"worker.matmul=w8a8: deep_gemm \(torch 2.11\) cannot be imported: x \(pip"):
        resolve_matmul("w8a8", **CASE)


def test_arithmetic_names_what_rows_depend_on() -> None:
    """Rows of quantized activations are not reused by workers that decode weights, nor by another release's."""
    plain, sure = WorkerSettings(), WorkerSettings(deterministic=True)
    assert arithmetic(plain, DECODED) == ""
    assert arithmetic(plain, FOUND) == "w8a8 by deep_gemm 1.2"
    assert arithmetic(sure, DECODED) == "chunks of 512 tokens, weight_only, cpu"
    assert arithmetic(sure, FOUND) == "chunks of 512 tokens, w8a8 by deep_gemm 1.2, cpu"
