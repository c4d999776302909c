"""Which GPU a name means, and what it has free, asked of its driver: other processes count, and so does what torch
holds without using it."""

from __future__ import annotations

import os

import torch

from protocol.errors import ConfigError


def let_segments_grow() -> None:
    """Let torch's allocator grow its segments in place, unless the environment says otherwise: what a pass holds for
    moments is as large as the device has room for, and would not fit pieces that steps left. Before the first
    allocation; it has no effect behind that."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def free_device_bytes(device: torch.device | str) -> int:
    """Bytes that a new allocation on `device` may take; 0 for the CPU, whose budget is a setting."""
    if torch.device(device).type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def cuda_device(name: str) -> torch.device:
    """`cuda` or `cuda:N` with its index. Raises ConfigError when there is no such device."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "there is no CUDA device here", field="worker.device", value=name, remedy="use worker.device=cpu"
        )
    device = torch.device(name)
    index = torch.cuda.current_device() if device.index is None else device.index
    if device.type != "cuda" or index >= torch.cuda.device_count():
        raise ConfigError(
            "no such CUDA device",
            field="worker.device",
            value=name,
            remedy=f"use cuda:0 to cuda:{torch.cuda.device_count() - 1}",
        )
    return torch.device("cuda", index)


def whole_device_bytes() -> list[int]:
    """Bytes of each CUDA device here, used ones too. Takes no memory on them."""
    return [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
