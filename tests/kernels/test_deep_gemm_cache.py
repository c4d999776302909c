"""The cache of DeepGEMM's kernels, filled by several processes: what each gets, and when it is done again."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels.cuda import deep_gemm, deep_gemm_cache
from kernels.cuda.deep_gemm_cache import ProductForm, divided, fill, run
from tests.emulated.device import COMPILER, Device
from tests.support.fake_deep_gemm import FakeDeepGemm

CPU = torch.device("cpu")
FORMS = [ProductForm(256, 128, rows) for rows in (16, 32, 64)] + [ProductForm(256, 128, 5, 2, 1, 4)]
#: Stands in for the module: leaves its job in a file of its own.
WRITES = "import os, pathlib, sys; pathlib.Path(sys.argv[1], str(os.getpid())).write_text(sys.argv[2])"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDeepGemm:
    library = FakeDeepGemm()
    monkeypatch.setattr(deep_gemm, "library", lambda: library)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setenv("HISPARSE_KERNEL_CACHE", str(tmp_path / "cache"))
    return library


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_neighbouring_counts_of_a_weight_go_to_one_process(parts: int) -> None:
    forms = [ProductForm(n, 128, rows) for rows in (16, 32, 64) for n in (256, 512)]
    found = divided([*forms, forms[0]], parts)
    assert len(found) <= parts
    assert sorted(form for part in found for form in part) == sorted(forms)
    assert all(part == sorted(part, key=lambda form: (form.n, form.rows)) for part in found)


def test_each_form_is_run_once(fake: FakeDeepGemm) -> None:
    if COMPILER is None:
        pytest.skip("needs g++")
    with Device().installed():
        run(FORMS, CPU)
    assert fake.calls == ["dense"] * 3 + ["contiguous"] * 2


@pytest.mark.process
def test_processes_get_all_forms_and_are_not_started_again(
    fake: FakeDeepGemm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(deep_gemm_cache, "COMMAND", (sys.executable, "-c", WRITES, str(tmp_path)))
    monkeypatch.setattr(deep_gemm_cache.os, "cpu_count", lambda: 3)
    assert fill(FORMS, CPU) > 0
    jobs = [json.loads(path.read_text()) for path in tmp_path.iterdir() if path.is_file()]
    assert len(jobs) == 2
    assert sorted(ProductForm(*form) for job in jobs for form in job["forms"]) == sorted(FORMS)
    assert {job["device"] for job in jobs} == {"cpu"}
    assert fill(FORMS, CPU) == 0
    assert fill(FORMS[:1], CPU) > 0, "other products"
    fake.__version__ = "1.0"
    assert fill(FORMS, CPU) > 0, "another release"


@pytest.mark.process
def test_ranks_that_start_together_compile_once(
    fake: FakeDeepGemm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(deep_gemm_cache, "COMMAND", (sys.executable, "-c", WRITES, str(tmp_path)))
    monkeypatch.setattr(deep_gemm_cache.os, "cpu_count", lambda: 1)
    with ThreadPoolExecutor(3) as ranks:
        took = list(ranks.map(lambda _: fill(FORMS, CPU), range(3)))
    assert sorted(seconds > 0 for seconds in took) == [False, False, True]
    assert len([path for path in tmp_path.iterdir() if path.is_file()]) == 1


@pytest.mark.process
def test_process_that_fails_is_no_reason_not_to_try_again(fake: FakeDeepGemm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm_cache, "COMMAND", (sys.executable, "-c", "raise SystemExit(1)"))
    assert fill(FORMS, CPU) > 0
    assert fill(FORMS, CPU) > 0


@pytest.mark.process
def test_process_that_does_not_end_is_killed(fake: FakeDeepGemm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm_cache, "COMMAND", (sys.executable, "-c", "import time; time.sleep(1000)"))
    monkeypatch.setattr(deep_gemm_cache, "LIMIT_S", 0.2)
    fill(FORMS, CPU)
    assert not deep_gemm_cache.stamp_of(FORMS, CPU).exists()


def test_nothing_to_compile_starts_nothing() -> None:
    assert fill([], CPU) == 0
