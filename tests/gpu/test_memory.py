"""Memory of torch on a GPU, as a worker asks for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

#: Holds 1 GiB in pieces that are freed, and then asks for it in one piece.
PROGRAM = """
import sys, torch
from worker.device.gpu_memory import let_segments_grow
let_segments_grow()
pieces = [torch.empty(2**26, dtype=torch.uint8, device="cuda") for _ in range(16)]
del pieces
whole = torch.empty(2**30, dtype=torch.uint8, device="cuda")
print(torch.cuda.memory_reserved() >> 20)
"""


def reserved_mib(**environ: str) -> int:
    environ = {name: text for name, text in os.environ.items() if "ALLOC_CONF" not in name} | environ
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True)
    return int(ran.stdout)


def test_freed_pieces_make_room_for_one_that_is_larger() -> None:
    assert reserved_mib() < 1_200


def test_environment_overrides_growing_segments() -> None:
    assert reserved_mib(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False") >= 2_048
