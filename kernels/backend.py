"""Who carries a kernel out: CUDA for a state on a GPU, vectorised torch (the reference) for one on the CPU.

Both are packages with the functions of kernels/{seat,begin_step,swap_in,copy_rows,index_topk,rows}.py under the same
names. The public functions check their arguments once, for either.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from kernels.state import DeviceState


def backend(state: DeviceState) -> ModuleType:
    """The package that runs kernels on `state`. Raises ConfigError when CUDA's Python bindings are missing."""
    return importlib.import_module("kernels.cuda" if state.rows.is_cuda else "kernels.reference")
