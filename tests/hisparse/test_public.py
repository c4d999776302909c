"""`hisparse` and `hisparse.kernels`: what programs may import, and what importing it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest

import hisparse
from hisparse import kernels
from protocol import errors
from tests import ROOT

MODULES = {"hisparse": (hisparse, "hisparse/__init__.py"), "hisparse.kernels": (kernels, "hisparse/kernels.py")}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(params=sorted(MODULES))
def module(request: pytest.FixtureRequest) -> ModuleType:
    return MODULES[request.param][0]


def test_every_public_name_exists(module: ModuleType) -> None:
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        module.nonsense  # noqa: B018


@pytest.mark.parametrize("name", sorted(MODULES))
def test_type_checkers_see_the_runtime_names(name: str) -> None:
    """Names imported for type checkers, from the same modules as at run time; no more and no less than `__all__`."""
    module, path = MODULES[name]
    tree = ast.parse((ROOT / path).read_text())
    (block,) = (it for it in tree.body if isinstance(it, ast.If) and isinstance(it.test, ast.Name))
    typed = {alias.asname: it.module for it in block.body if isinstance(it, ast.ImportFrom) for alias in it.names}
    assert set(module.__all__) - {"__version__"} == set(typed)
    for exported, home in typed.items():
        assert getattr(module, exported) is getattr(import_module(str(home)), str(exported))


def test_every_public_name_has_a_docstring(module: ModuleType) -> None:
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value):
            assert value.__doc__, name
            assert not value.__doc__.startswith(f"{name}("), f"{name}: made by a dataclass"


def test_each_error_is_public() -> None:
    assert {kind.__name__ for kind in errors.BY_CODE.values()} < set(hisparse.__all__)


def test_import_loads_no_heavy_module() -> None:
    heavy = ["torch", "rich", "zmq", "trio", "numpy", "msgspec", "transformers", "importlib.metadata"]
    for code in ("import hisparse", "import hisparse.kernels"):
        assert run(f"{code}; import sys; print([it for it in {heavy} if it in sys.modules])") == "[]"


def test_the_client_needs_no_torch() -> None:
    code = "from hisparse import *; import sys; print('torch' in sys.modules, open_client.__name__, __version__ != '')"
    assert run(code) == "False open_client True"


def test_kernels_without_torch_name_the_package_to_install() -> None:
    code = """
import sys
sys.modules["torch"] = None
import hisparse.kernels
print(hisparse.kernels.Geometry.__name__)
try:
    hisparse.kernels.swap_in
except hisparse.ConfigError as error:
    print(error)
"""
    said = run(code).splitlines()
    assert said[0] == "Geometry"
    assert said[1] == "kernels=swap_in: hisparse.kernels needs the package torch (pip install 'hisparse[worker]')"
