"""Units written in Triton, imported when first needed: torch's CUDA wheels bring it along, its CPU wheels do not."""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

import torch

from kernels.cuda.jit import cache_dir
from protocol.errors import ConfigError

#: Major compute capability from which blocks of a kernel may begin before the kernel ahead has ended.
EARLY_SINCE: Final = 9


def power_of_two(size: int) -> int:
    """The least that is not below `size`, 1 or more: what tl.arange takes."""
    return 1 << (size - 1).bit_length()


@lru_cache(maxsize=8)
def triton_unit(name: str) -> ModuleType:
    """kernels.cuda.`name`, whose kernels are kept beside the others. Raises ConfigError where Triton is missing."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_dir() / "triton"))
    try:
        return importlib.import_module(f"kernels.cuda.{name}")
    except ImportError as problem:
        raise ConfigError(
            f"cannot be imported: {problem}", field="triton", value=name, remedy="install a CUDA wheel of torch"
        ) from problem


def launch_options(device: torch.device) -> dict[str, Any]:
    """Options of launches whose kernels call early_triton.begin: where the card can, they begin early."""
    early = _begins_early(device)
    return {"EARLY": early, "launch_pdl": early}


@lru_cache(maxsize=8)
def _begins_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= EARLY_SINCE
