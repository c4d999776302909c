"""Drawn lives of requests on the GPU against the CPU reference (tests/gpu/run_cases.py), by several processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.timeout(600)
def test_random_request_lifecycles(capfd: pytest.CaptureFixture[str]) -> None:
    """In a program of its own, which forks before CUDA is there. More cases: python -m tests.gpu.run_cases --help.

    SGLang #32771, #32483, vLLM #57602."""
    command = [sys.executable, "-m", "tests.gpu.run_cases", "--cases", "990", "--limits", "10"]
    with capfd.disabled():
        done = subprocess.run(command, cwd=ROOT, check=False)
    assert done.returncode == 0
