"""Selections of prompts change little by fp8 queries, and the program that measures that sees more."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import fp8_queries
from benchmarks.fp8_queries import VALUES, agreement, main


def test_selections_by_fp8_queries_are_nearly_those_by_exact_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--context", "4096"]) == 0
    cells = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [cell["values"] for cell in cells] == list(VALUES)
    assert all(cell["overlap"] < 1 for cell in cells), "queries are quantized"


def test_a_selection_that_is_worse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fp8_queries.prompt_topk

    def shifted(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        found = arguments[-1]
        assert isinstance(found, torch.Tensor)
        found[:, :200] += 1  # neighbours of the best

    monkeypatch.setattr(fp8_queries, "prompt_topk", shifted)
    assert main(["--device", "cpu", "--context", "4096"]) == 1


def test_agreement_counts_positions_and_scores() -> None:
    scores = torch.tensor([4.0, 1.0, 3.0, 2.0])
    assert agreement(scores, torch.tensor([0, 2])) == (1.0, 1.0)
    assert agreement(scores, torch.tensor([0, 3])) == (0.5, 6 / 7)
