"""Both backends have each kernel under the name, and with the parameters, that its contract calls."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import kernels
from kernels.backend import ON_CPU_ALONE, backend
from kernels.state import DeviceState
from protocol.errors import BadInput

CALLS = [
    (path.stem, call.func.attr, len(call.args))
    for path in sorted(Path(kernels.__path__[0]).glob("*.py"))
    for call in ast.walk(ast.parse(path.read_text()))
    if isinstance(call, ast.Call)
    and isinstance(call.func, ast.Attribute)
    and ast.unparse(call.func.value) == "backend(state, __name__)"
]


def test_calls_of_contracts_are_found() -> None:
    assert {contract for contract, *_ in CALLS} == {
        *("attention", "begin_step", "copy_rows", "index_topk", "prompt_topk", "rows", "seat", "swap_in"),
        *ON_CPU_ALONE,
    }


@pytest.mark.parametrize("package", ["cuda", "reference"])
@pytest.mark.parametrize(("contract", "name", "count"), CALLS, ids=[name for _, name, _ in CALLS])
def test_backend_has_kernel(package: str, contract: str, name: str, count: int) -> None:
    if package == "cuda" and contract in ON_CPU_ALONE:
        on_gpu = cast(DeviceState, SimpleNamespace(rows=SimpleNamespace(is_cuda=True, device="cuda:0")))
        with pytest.raises(BadInput, match=f"{contract}=cuda:0: has no kernels on a GPU"):
            backend(on_gpu, f"kernels.{contract}")
        return
    kernel = getattr(import_module(f"kernels.{package}.{contract}"), name)
    inspect.signature(kernel).bind(*range(count))
