"""`hisparse demo --device cuda`: real processes on one card, every token that of the model library's own generate()."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.process]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.mark.parametrize(
    ("family", "draft_tokens"), [("glm-5", 0), ("deepseek-v3.2", 0), ("deepseek-v3.2", 2), ("a.x-k2", 0), ("hy4", 0)]
)
def test_the_demo_passes_on_a_gpu(family: str, draft_tokens: int, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hisparse.cli",
        "demo",
        "--json",
        "--device",
        "cuda",
        "--work-dir",
        str(tmp_path),
    ]
    options = ["--family", family, "--requests", "4", "--prompt-tokens", "2048:2600"]
    options += ["--draft-tokens", str(draft_tokens)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    report = json.loads(done.stdout)
    assert (done.returncode, report["problems"]) == (0, []), done.stderr
    assert report["device"] == "cuda"
    assert report["mismatched_tokens"] == 0
    assert report["verified_tokens"] > 0
    assert min(report["misses"], report["retracted"], report["handed_over"]) > 0
    assert report["rows_swapped"] >= report["misses"]  # layers that share a selection replay each miss
