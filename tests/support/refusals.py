"""Every place in the code that refuses something to a user, by its syntax, and which of them a block of tests reached.

A *site* is a call of an error's class: `FILE:FUNCTION:CLASS`, with #2, #3, ... behind the second and later ones of a
function. Defects and messages of peers (InternalError, ProtocolError) are no refusals.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click
import pytest

from protocol.errors import HiSparseError, InternalError, NameTaken, ProtocolError
from tests import ROOT

#: What the CLI, the HTTP front and the settings refuse; and what the coordinator refuses to clients and operators.
FILES: Final = (
    *sorted((ROOT / "hisparse").rglob("*.py")),
    *sorted((ROOT / "protocol").glob("*.py")),
    ROOT / "protocol" / "transport" / "keys.py",
    ROOT / "protocol" / "transport" / "private_dir.py",
    *(
        ROOT / "coordinator" / f"{name}.py"
        for name in (
            "gateway/gateway",
            "gateway/connections",
            *(f"scheduling/{it}" for it in ("api", "commands", "submission", "validation", "worker_registry")),
        )
    ),
)
#: Defects, messages of peers, and what a worker's link is told.
NO_REFUSALS: Final = (InternalError, ProtocolError, NameTaken)


def _classes(kind: type[Exception]) -> Iterator[str]:
    if kind not in NO_REFUSALS:
        yield kind.__name__
        for inner in kind.__subclasses__():
            yield from _classes(inner)


for _module in ("hisparse.http.wire", "hisparse.http.errors", "hisparse.client.connection"):
    importlib.import_module(_module)
REFUSALS: Final = frozenset([*_classes(HiSparseError), *_classes(click.ClickException)]) - {"HiSparseError"}


def sites() -> dict[str, tuple[Path, int, int]]:
    """File, first and last line of each site."""
    found: dict[str, tuple[Path, int, int]] = {}
    for path in FILES:
        counts: Counter[str] = Counter()
        for function, call in _calls(ast.parse(path.read_text()), ""):
            name = f"{path.relative_to(ROOT)}:{function}:{_name(call)}"
            counts[name] += 1
            found[name + (f"#{counts[name]}" if counts[name] > 1 else "")] = (path, call.lineno, call.end_lineno or 0)
    return found


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = child.name
        elif isinstance(child, ast.Call) and _name(child) in REFUSALS:
            yield function, child
        yield from _calls(child, inner)


def _name(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.IfExp(body=ast.Name(id=name)):  # (ConfigError if ... else Unavailable)(...)
            return name
    return ""


@contextlib.contextmanager
def reached() -> Iterator[set[str]]:
    """The sites that were reached in the block."""
    known = sites()
    by_line = {
        (str(path), line): name for name, (path, first, last) in known.items() for line in range(first, last + 1)
    }
    names: set[str] = set()

    def note(error: object, frame: FrameType | None) -> None:
        while frame is not None and frame.f_locals.get("self") is error:  # an __init__ of a derived class
            frame = frame.f_back
        if frame is not None and (name := by_line.get((frame.f_code.co_filename, frame.f_lineno))):
            names.add(name)

    with pytest.MonkeyPatch.context() as patched:
        for kind in (HiSparseError, click.ClickException):
            patched.setattr(kind, "__init__", _noting(kind.__init__, note))
        yield names


def _noting(init: Any, note: Any) -> Any:
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        note(self, sys._getframe(1))
        init(self, *args, **kwargs)

    return noted
