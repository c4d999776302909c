"""Accuracy of kinds of KV: fewer bits cost more, in each measure, and the float32 run agrees with itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import kv_accuracy
from benchmarks.kv_accuracy import KINDS, VALUES, keys_accuracy, needles_accuracy, rows_accuracy, tokens_accuracy
from tests.support.checkpoints import tiny_checkpoint


@pytest.mark.parametrize("values", VALUES)
def test_fewer_bits_cost_more(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_accuracy, "CONTEXT", 4_096)
    monkeypatch.setattr(kv_accuracy, "TOPK", 256)
    rows, keys = ([measure(values, kind) for kind in KINDS] for measure in (rows_accuracy, keys_accuracy))
    for name in ("scores", "outputs"):
        assert [row[name] for row in rows] == sorted(row[name] for row in rows)
    assert rows[-1]["scores"] < 0.12
    for name in ("overlap", "sum_share"):
        assert [row[name] for row in keys] == sorted((row[name] for row in keys), reverse=True)
    assert keys[-1]["overlap"] > 0.8


def test_tokens_and_needles_are_those_of_float32_in_float32_alone(run_dir: Path) -> None:
    path, family = tiny_checkpoint(run_dir, "deepseek-v3.2", index_topk=32), "deepseek-v3.2"
    exact, fp4 = (tokens_accuracy(path, family, kind, 30) for kind in ("float32", "fp4"))
    assert (exact["same"], exact["off_p50"], exact["off_p99"]) == (1.0, 0.0, 0.0)
    assert fp4["off_p50"] > 0
    assert fp4["same"] > 0.3
    needles = needles_accuracy(path, family, "float32", 8)
    assert needles["contexts"] > 0
    assert needles["same"] == 1.0
