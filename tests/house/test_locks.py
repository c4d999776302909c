"""locks/*.txt against pyproject.toml and the constraints: what images install is what tests ran with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

import pytest

from tests import ROOT

PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: Final = PROJECT["optional-dependencies"]
#: What each lock has to hold, of pyproject.toml. torch of the worker comes from an index of its own.
DECLARED: Final = {
    "build": tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"],
    "coordinator": PROJECT["dependencies"],
    "http": [*PROJECT["dependencies"], *EXTRAS["http"]],
    "worker": [*PROJECT["dependencies"], *(it for it in EXTRAS["worker"] if not it.startswith("torch"))],
    "torch-cpu": [it for it in EXTRAS["worker"] if it.startswith("torch")],
    "worker-gpu": [*PROJECT["dependencies"], *EXTRAS["worker"], *EXTRAS["cuda"]],
}


def pinned(path: Path) -> dict[str, str]:
    """Version by package, of a file of NAME==VERSION."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE))


CONSTRAINTS: Final = pinned(ROOT / "constraints.txt")
GPU: Final = pinned(ROOT / "constraints-gpu.txt")


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=~! ]", requirement, maxsplit=1)[0]


def test_each_lock_is_known() -> None:
    assert {path.stem for path in (ROOT / "locks").iterdir()} == DECLARED.keys()


@pytest.mark.parametrize("lock", DECLARED)
def test_lock_holds_what_is_declared(lock: str) -> None:
    assert {name_of(it) for it in DECLARED[lock]} <= pinned(ROOT / "locks" / f"{lock}.txt").keys()


@pytest.mark.parametrize("lock", DECLARED)
def test_versions_are_those_of_the_constraints(lock: str) -> None:
    """constraints.txt alone, but for what constraints-gpu.txt has of the GPU image."""
    known = CONSTRAINTS | GPU if lock == "worker-gpu" else CONSTRAINTS | {"torch": f"{CONSTRAINTS['torch']}+cpu"}
    locked = pinned(ROOT / "locks" / f"{lock}.txt")
    assert {name: version for name, version in locked.items() if known.get(name, version) != version} == {}


@pytest.mark.parametrize("lock", DECLARED)
def test_every_package_has_a_hash(lock: str) -> None:
    blocks = re.split(r"^(?=[\w.-]+==)", (ROOT / "locks" / f"{lock}.txt").read_text(), flags=re.MULTILINE)[1:]
    assert blocks
    for block in blocks:
        assert re.search(r"\n    --hash=sha256:[0-9a-f]{64}", block), block.splitlines()[0]


def test_gpu_constraints_are_only_what_differs() -> None:
    assert GPU
    assert {name for name, version in GPU.items() if CONSTRAINTS.get(name) == version} == set()
