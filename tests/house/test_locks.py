"""locks/*.txt and bounds of pyproject.toml against the constraints: what is installed is what tests ran with."""

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
OLDEST: Final = pinned(ROOT / "constraints-oldest.txt")
#: Requirements that refuse releases from some minor on.
BOUNDED: Final = [it for them in (PROJECT["dependencies"], *EXTRAS.values()) for it in them if "<" in it]


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


def minor_of(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def untested(requirement: str, newest: str, oldest: str) -> str:
    """The fault of `requirement`, of the form NAME>=A.B,<A.C, beside these two pins; empty where there is none.

    Each minor may change a library's behaviour. So each one admitted is a pin: of the newest, with which `make test`
    runs, or of the oldest, with which `make oldest-test` does.
    """
    bounds = re.fullmatch(r"[\w-]+>=(\d+\.\d+),<(\d+\.\d+)", requirement)
    if bounds is None:
        return f"{requirement} is not of the form NAME>=A.B,<A.C"
    (major, first), (major_above, above) = map(minor_of, bounds.groups())
    if major != major_above:
        return f"{requirement} admits minors without end"
    admitted = {(major, minor) for minor in range(first, above)}
    tested = {minor_of(newest), minor_of(oldest)}
    if admitted != tested:
        return f"{requirement} admits {sorted(admitted)}, and tests run with {sorted(tested)}"
    return "" if minor_of(newest) == max(admitted) else f"{newest} is not the newest minor of {requirement}"


def test_bounds_admit_the_releases_that_tests_run_with() -> None:
    assert {name_of(it) for it in BOUNDED} == OLDEST.keys()
    for requirement in BOUNDED:
        name = name_of(requirement)
        assert untested(requirement, CONSTRAINTS[name], OLDEST[name]) == ""


@pytest.mark.parametrize(
    ("requirement", "newest", "oldest"),
    [
        ("library>=5.23,<5.25", "5.25.0", "5.23.0"),  # the pin moved past the bound
        ("library>=5.23,<5.26", "5.24.0", "5.23.0"),  # the bound admits a minor that nothing ran with
        ("library>=5.22,<5.25", "5.24.0", "5.23.0"),
        ("library>=5.23,<5.25", "5.23.1", "5.24.0"),
        ("library>=5.23,<6.0", "5.24.0", "5.23.0"),
        ("library<5.25", "5.24.0", "5.23.0"),
    ],
)
def test_a_release_without_a_test_is_found(requirement: str, newest: str, oldest: str) -> None:
    assert untested(requirement, newest, oldest)
    assert untested("library>=5.23,<5.25", "5.24.1", "5.23.0") == ""
