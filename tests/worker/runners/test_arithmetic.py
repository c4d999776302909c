"""ModelInfo.arithmetic: workers whose rows differ in bits have different words."""

from __future__ import annotations

import pytest
import torch

from protocol.settings import WorkerSettings
from worker.runners.base import arithmetic
from worker.weights.matmul import DECODED


def words(*, device: str = "cpu", kv_dtype: str = "auto", deterministic: bool = True) -> str:
    settings = WorkerSettings(model="m", device=device, kv_dtype=kv_dtype, deterministic=deterministic)
    return arithmetic(settings, DECODED)


def test_arithmetic_names_what_selections_of_prompts_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert words(device="cuda", kv_dtype="fp8") != words(device="cuda", kv_dtype="bfloat16")
    assert words(device="cuda", kv_dtype="bfloat16").endswith("NVIDIA H200"), "as before: rows have the same bits"
    assert words(device="cpu", kv_dtype="fp8") == words(device="cpu", kv_dtype="float32"), "queries stay as they are"
    assert words(deterministic=False) == ""
