"""Weights on a GPU outlive the process that loaded them; the next one maps them, for reading alone if it can."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.support.keeper_rig import keeping
from tests.worker.keeper.test_kept_weights import same
from worker.keeper.mapping import GpuMapping
from worker.runners.tiny import write_tiny_checkpoint
from worker.runners.transformers_dsa import TransformersRunner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept") / "fp8"
    write_tiny_checkpoint(path, fp8=True, whole_blocks=True)
    return path


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Path]:
    with keeping(tmp_path / "weights.sock") as path:
        yield path


def load(checkpoint: Path, keeper: Path | None) -> TransformersRunner:
    return TransformersRunner.load(checkpoint, device="cuda", dtype="bfloat16", draft_tokens=1, keeper=keeper)


def test_weights_are_mapped_as_they_were_loaded(checkpoint: Path, keeper: Path) -> None:
    plain, first, second = (load(checkpoint, it) for it in (None, keeper, keeper))
    assert [[*it.weights_seconds] for it in (first, second)] == [["checkpoint"], ["keeper"]]
    assert same(first, plain)
    assert same(second, plain)
    assert second.weights_bytes() == plain.weights_bytes()


def test_they_outlive_a_killed_process(checkpoint: Path, keeper: Path) -> None:
    code = (
        "import os, sys, torch; from pathlib import Path; from tests.gpu.test_kept_weights import load;"
        "found = load(Path(sys.argv[1]), Path(sys.argv[2])); one = found._layers.model.lm_head.weight;"
        "[one @ one.t() for _ in range(1000)]; os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(checkpoint), str(keeper)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    found = load(checkpoint, keeper)
    assert [*found.weights_seconds] == ["keeper"]
    assert same(found, load(checkpoint, None))


def test_a_write_ends_the_process_or_is_found(checkpoint: Path, keeper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sum of bytes, where memory cannot be protected: as with a driver that refuses."""

    def refused(mapping: GpuMapping) -> None:
        mapping._allow(0, mapping.bytes, mapping._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)

    monkeypatch.setattr(GpuMapping, "protect", refused)
    written = load(checkpoint, keeper)
    assert [*load(checkpoint, keeper).weights_seconds] == ["keeper"]
    written._layers.model.lm_head.weight.view(torch.uint8)[0, 0] ^= 1
    torch.cuda.synchronize()
    found = load(checkpoint, keeper)
    assert [*found.weights_seconds] == ["checkpoint"]
    assert same(found, load(checkpoint, None))
