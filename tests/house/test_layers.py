"""Imports point down: between packages, and between the rooms of a package. No circle between rooms.

The floors below are the design (docs/architecture.md, section 3). A room is a folder, or a module that stands in its
package beside folders. An import counts wherever it stands in a file, inside functions and for type checkers too.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final, TypeAlias

import pytest

from tests import ROOT
from tests.support.once import made_once

#: Importing module and imported module of each import.
Edges: TypeAlias = list[tuple[str, str]]

#: Bottom first. Packages of one floor import nothing of each other.
FLOORS: Final[list[set[str]]] = [
    {"protocol"},
    {"basics"},
    {"metrics", "kernels"},
    {"coordinator", "worker"},
    {"hisparse"},
    {"examples"},
    {"benchmarks", "tools", "tests"},
]

#: Modules that a package may import, where that is fewer than all below it: examples import what users may.
PUBLIC: Final[dict[str, set[str]]] = {"examples": {"hisparse", "hisparse.kernels"}}

#: Modules of hisparse that import the coordinator, because they are the coordinator; the others import basics.
OF_THE_COORDINATOR: Final = {"hisparse.cli.serve", "hisparse.cli.journal"}

#: Rooms of a package, bottom first, likewise.
ROOMS: Final[dict[str, list[set[str]]]] = {
    "coordinator": [
        {"actor", "incarnation", "listener"},
        {"memory", "tokens"},
        {"journal"},
        {"state"},
        {"policy"},
        {"turn"},
        {"scheduler"},
        {"gateway", "workers", "tracing"},
        {"service"},
    ],
    "worker": [
        {"keeper", "families"},
        {"device", "pool", "link", "weights", "oracle"},
        {"streams", "group"},
        {"runners"},
        {"transfer"},
        {"loop"},
        {"standby"},
        {"process"},
    ],
    "hisparse": [
        {"clashes", "lazy"},
        {"client", "kernels"},
        {"console", "manifests"},
        {"http", "top"},
        {"cluster"},
        {"demo", "ray"},
        {"cli"},
    ],
    "hisparse.http": [
        {"errors", "page"},
        {"server"},
        {"models"},
        {"apis"},
        {"link"},
        {"outputs"},
        {"answering"},
        {"front"},
        {"service"},
    ],
}


@cache
def modules() -> dict[str, str]:
    """Path below the repository of every module of ours, by dotted name."""
    packages = set().union(*FLOORS)
    paths = [path.relative_to(ROOT) for package in sorted(packages) for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): str(path) for path in paths}


def known(name: str) -> str:
    """The module of ours that `name` is, or is a name of; empty: none."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Statements in `node` at any depth, and what holds some. Expressions, which hold none, are most of a tree."""
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in held if isinstance(held := getattr(node, part, ()), list) else ():
            yield inner
            yield from statements(inner)


def imports_of(module: str) -> set[str]:
    """Modules of ours that `module` imports."""
    found: set[str] = set()
    for node in statements(ast.parse((ROOT / modules()[module]).read_text())):
        if isinstance(node, ast.Import):
            found |= {known(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: write absolute imports"
            found |= {known(f"{node.module}.{alias.name}") for alias in node.names}
    return found - {""}


@pytest.fixture(scope="module")
def edges(run_dir: Path) -> Edges:
    """(importing module, imported module) of ours, parsed once in a run."""
    found = made_once(run_dir, "imports", lambda: {module: sorted(imports_of(module)) for module in modules()})
    return [(module, target) for module, targets in found.items() for target in targets]


def floor_of(name: str, floors: list[set[str]]) -> int:
    return next(height for height, floor in enumerate(floors) if name in floor)


def points_down(source: str, target: str, floors: list[set[str]]) -> bool:
    """Return whether a `source` may import a `target`. Above the product, the three packages use each other's rigs."""
    return source == target or {source, target} <= FLOORS[-1] or floor_of(source, floors) > floor_of(target, floors)


def test_packages_import_downwards(edges: Edges) -> None:
    up = [
        f"{source} -> {target}"
        for source, target in edges
        if not points_down(source.split(".")[0], target.split(".")[0], FLOORS)
    ]
    assert up == []


def test_wheel_has_the_product_alone() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert {name.removesuffix("*") for name in settings["include"]} == set().union(*FLOORS) - FLOORS[-1] - {"examples"}


def test_rigs_import_no_program(edges: Edges) -> None:
    """Programs of tools/ use the rigs, and tests try the programs."""
    assert [f"{source} -> {target}" for source, target in edges if runs_upwards(source, target)] == []
    assert runs_upwards("tests.support.fakes.gateway", "tools.docs.follow")
    assert not runs_upwards("tests.processes.test_soak", "tools.faults.soak")


def runs_upwards(source: str, target: str) -> bool:
    return source.startswith("tests.support.") and target.startswith("tools.")


@pytest.mark.parametrize("package", PUBLIC)
def test_users_import_only_public_modules(package: str, edges: Edges) -> None:
    imported = {(source, target) for source, target in edges if source.startswith(f"{package}.")}
    assert {target for _, target in imported} >= PUBLIC[package]
    assert [(source, target) for source, target in imported if target not in PUBLIC[package]] == []


def test_only_its_own_programs_import_the_coordinator(edges: Edges) -> None:
    of_hisparse = [(source, target) for source, target in edges if source.split(".")[0] == "hisparse"]
    assert {source for source, target in of_hisparse if target.split(".")[0] == "coordinator"} == OF_THE_COORDINATOR


def within(package: str, edges: Edges) -> Iterator[tuple[str, str]]:
    """Imports inside `package`; its own `__init__` stands above all rooms."""
    for source, target in edges:
        if source.startswith(f"{package}.") and target.startswith(f"{package}."):
            yield source, target


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_downwards(package: str, edges: Edges) -> None:
    floors = ROOMS[package]
    up = [
        f"{source} -> {target}"
        for source, target in within(package, edges)
        if not points_down(room_of(source, package), room_of(target, package), floors)
    ]
    assert up == []


def room_of(module: str, package: str) -> str:
    return module.removeprefix(f"{package}.").split(".")[0]


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_has_a_floor(package: str) -> None:
    rooms = {room_of(name, package) for name in modules() if name.startswith(f"{package}.")}
    assert rooms - {"__init__"} == set().union(*ROOMS[package])


def test_upward_import_is_reported() -> None:
    assert not points_down("protocol", "worker", FLOORS)
    assert not points_down("worker", "coordinator", FLOORS)
    assert points_down("hisparse", "protocol", FLOORS)


@pytest.mark.parametrize("package", sorted(set().union(*FLOORS) - {"benchmarks", "tests"}))
def test_no_modules_import_each_other_in_a_circle(package: str, edges: Edges) -> None:
    """Imports for types alone count too: a reader follows them."""
    graph: dict[str, set[str]] = {}
    for source, target in within(package, edges):
        if source != target and "__init__" not in modules()[target]:
            graph.setdefault(source, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from error


#: Class names of two modules, with the reason: structures of CUDA bear the names of the C++ source.
TWICE: Final = {"State", "BlockLinear"}


def test_class_name_stands_for_one_thing() -> None:
    found = Counter(
        node.name
        for package in ("protocol", "basics", "metrics", "kernels", "coordinator", "worker", "hisparse")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in found.items() if count > 1} == TWICE
