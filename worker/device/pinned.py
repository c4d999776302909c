"""Host memory for what a device reads or writes while the host goes on."""

from __future__ import annotations

import torch
from torch import Tensor


def host_tensor(*shape: int, dtype: torch.dtype, device: torch.device | str, fill: int = 0) -> Tensor:
    """Host memory that operations on `device` read or write: pinned for a GPU, so that copies never block."""
    return torch.full(shape, fill, dtype=dtype, pin_memory=torch.device(device).type == "cuda")
