"""What a GPU has free, asked of its driver: other processes count, and so does what torch holds without using it."""

from __future__ import annotations

import torch


def free_device_bytes(device: torch.device | str) -> int:
    """Bytes that a new allocation on `device` may take; 0 for the CPU, whose budget is a setting."""
    if torch.device(device).type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)
