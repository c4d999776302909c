"""Chooses the code that runs a kernel: CUDA for a state on a GPU, the reference in torch and numpy for one on the CPU.

The public functions of kernels/*.py are the list of kernels. Each checks its arguments, then calls the function of its
own name in the module of its own name: kernels.cuda.swap_in.swap_in, kernels.reference.swap_in.swap_in.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Final

from kernels.state import DeviceState
from protocol.errors import BadInput

#: Contracts without a kernel in CUDA so far.
ON_CPU_ALONE: Final = frozenset({"block_attention", "block_topk"})


def prepare(state: DeviceState) -> None:
    """Compile and load what `state` needs, before its first kernel; on the CPU, nothing.

    Raises BadInput when its host pool is not registered with CUDA, ConfigError when CUDA's Python bindings are missing.
    """
    if runs_on_cuda(state):
        importlib.import_module("kernels.cuda.launch").prepare(state)


def backend(state: DeviceState, contract: str) -> ModuleType:
    """The module that runs the functions of module `contract` on `state`. Raises BadInput for ON_CPU_ALONE on a GPU."""
    name, on_cuda = contract.rpartition(".")[2], runs_on_cuda(state)
    if on_cuda and name in ON_CPU_ALONE:
        remedy = "allocate the state on a CPU"
        raise BadInput("has no kernels on a GPU", field=name, value=state.rows.device, remedy=remedy)
    return _module("cuda" if on_cuda else "reference", name)


@cache
def _module(package: str, name: str) -> ModuleType:
    return importlib.import_module(f"kernels.{package}.{name}")


def runs_on_cuda(state: DeviceState) -> bool:
    return state.rows.is_cuda
