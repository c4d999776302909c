"""Units written in Triton, imported when first needed: torch's CUDA wheels bring it along, its CPU wheels do not."""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType

from protocol.errors import ConfigError


def power_of_two(size: int) -> int:
    """The least that is not below `size`, 1 or more: what tl.arange takes."""
    return 1 << (size - 1).bit_length()


@lru_cache(maxsize=8)
def triton_unit(name: str) -> ModuleType:
    """kernels.cuda.`name`. Raises ConfigError where Triton is missing."""
    try:
        return importlib.import_module(f"kernels.cuda.{name}")
    except ImportError as problem:
        raise ConfigError(
            f"cannot be imported: {problem}", field="triton", value=name, remedy="install a CUDA wheel of torch"
        ) from problem
