"""Pure modules import no clock, randomness, task, socket or tensor. The word `Pure.` in a module's head declares it."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import Final

import pytest

from tests import ROOT

FORBIDDEN = {"trio", "zmq", "torch", "time", "random", "datetime", "os", "threading", "asyncio", "socket", "logging"}
PACKAGES = ("protocol", "basics", "metrics", "kernels", "coordinator", "worker", "hisparse")

#: Modules without the word in the rooms of pure modules. The lists may only shrink: move what decides into a pure
#: module instead of adding a name.
SHELLS: Final[dict[str, str]] = {
    "basics": "gc_policy process_memory processes",
    "basics/tracing": "readable sender",
    "coordinator/journal": "files inspection journal salvage store",
    "coordinator/memory": "host_pool",
    "coordinator/policy": "",
    "coordinator/scheduler": "api scheduler submission",
    "coordinator/state": "request",
    "coordinator/tokens": "",
    "coordinator/turn": "auditor",
    "hisparse/http": "answering front link outputs service",
    "hisparse/http/apis": "large_bodies",
    "hisparse/http/apis/anthropic": "",
    "hisparse/http/apis/openai": "",
    "hisparse/http/apis/responses": "",
    "hisparse/http/models": "grammar_checks renderers",
    "hisparse/http/models/formats": "",
    "hisparse/http/server": "api_keys body_reader connection control exchange listener threads tls tracing",
    "hisparse/http/server/fairness": "turns",
    "hisparse/manifests": "environments groups processes",
    "hisparse/top": "draw run terminal",
    "protocol": (
        "children config grammar_trials grammars logs rereading settings small_files start_and_end text "
        "tokenizer_files version"
    ),
}
#: A module's docstring. Parsing each file as a whole would take a second of each process that collects tests.
HEAD: Final = re.compile(r'"""(.*?)"""', re.DOTALL)


@cache
def heads() -> dict[str, str]:
    """The docstring of each module of the product, by path without suffix."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {
        str(path.relative_to(ROOT).with_suffix("")): found[1] if (found := HEAD.match(path.read_text())) else ""
        for path in sorted(files)
    }


def is_pure(module: str) -> bool:
    return re.search(r"\bPure\.", heads()[module]) is not None


@cache
def imports_of(module: str) -> set[str]:
    """Modules that a file imports when it runs; what only type checkers read does not count."""
    tree = ast.parse((ROOT / f"{module}.py").read_text())
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def reached(module: str) -> set[str]:
    """Everything that a module imports, through modules of our own too."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        for name in imports_of(todo.pop()):
            path = name.replace(".", "/")
            if name not in seen:
                seen.add(name)
                if (ROOT / f"{path}.py").exists():
                    todo.append(path)
    return seen


def test_every_module_says_what_it_is() -> None:
    assert [module for module, head in heads().items() if not head] == []


@pytest.mark.parametrize("module", [module for module in heads() if is_pure(module)])
def test_pure_modules_import_no_side_effects(module: str) -> None:
    assert {name.split(".")[0] for name in reached(module)} & FORBIDDEN == set()


@pytest.mark.parametrize("room", SHELLS)
def test_rooms_of_pure_modules_have_no_further_shells(room: str) -> None:
    found = {module for module in heads() if module.rpartition("/")[0] == room and not is_pure(module)}
    assert {module.rpartition("/")[2] for module in found} - {"__init__"} == set(SHELLS[room].split())
