"""Every place in the code that refuses something to a user, by its syntax, and which of them a block of tests reached.

Most are reached by the tables of tests/hisparse/cli/test_refusals.py and http/test_errors.py. A test that reaches
another one names words of its text, `@pytest.mark.refuses("name 1 to {} requests")`, and tests/conftest.py holds it to
that. Defects and messages of peers (InternalError, ProtocolError) are no refusals.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import click
import pytest

from protocol.errors import HiSparseError, InternalError, NameTaken, ProtocolError
from tests import ROOT
from tests.support.once import made_once

#: What the CLI, the HTTP front and the settings refuse; and what the coordinator refuses to clients and operators.
FILES: Final = (
    *sorted((ROOT / "hisparse").rglob("*.py")),
    *sorted((ROOT / "protocol").glob("*.py")),
    ROOT / "basics" / "request_checks.py",
    ROOT / "protocol" / "transport" / "keys.py",
    ROOT / "protocol" / "transport" / "private_dir.py",
    *(
        ROOT / "coordinator" / f"{name}.py"
        for name in (
            "gateway/gateway",
            "gateway/connections",
            *(f"scheduler/{it}" for it in ("api", "submission", "validation", "worker_registry")),
            "turn/commands",
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


for _module in (
    "hisparse.http.server.wire",
    "hisparse.http.errors",
    "hisparse.client.connection",
    "hisparse.cluster.replacing",
):
    importlib.import_module(_module)
REFUSALS: Final = frozenset([*_classes(HiSparseError), *_classes(click.ClickException)]) - {"HiSparseError"}


class Site(NamedTuple):
    """A call of an error's class. `text` is what a user reads, CLASS FIELD=VALUE: MESSAGE (REMEDY), with {} for values.

    So a site is the same one in another function or file.
    """

    text: str
    path: str
    first_line: int
    last_line: int


@cache
def sites() -> tuple[Site, ...]:
    return tuple(
        Site(_text_of(call), str(path), call.lineno, call.end_lineno or 0)
        for path in FILES
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and _name(call) in REFUSALS
    )


def named(words: str) -> frozenset[Site]:
    """The sites whose text contains `words`."""
    return frozenset(site for site in sites() if words in site.text)


@cache
def declared() -> Mapping[str, str]:
    """The words of every `pytest.mark.refuses` in the tests, and the file of each."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "pytest.mark.refuses(" in text:
            for call in ast.walk(ast.parse(text)):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.refuses":
                    found |= {ast.literal_eval(words): str(path.relative_to(ROOT)) for words in call.args}
    return found


def _text_of(call: ast.Call) -> str:
    said = {keyword.arg: _template(keyword.value) for keyword in call.keywords}
    field = f"{said['field']}={said.get('value', '')}: " if "field" in said else ""
    remedy = f" ({said['remedy']})" if "remedy" in said else ""
    return f"{_name(call)} {field}{_template(call.args[0])}{remedy}"


def _template(text: ast.expr) -> str:
    match text:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=values):
            return "".join(map(_template, values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _template(left) + _template(right)
    return "{}"


def _name(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.IfExp(body=ast.Name(id=name)):  # (ConfigError if ... else Unavailable)(...)
            return name
    return ""


@cache
def _by_line() -> Mapping[tuple[str, int], Site]:
    return {(site.path, line): site for site in sites() for line in range(site.first_line, site.last_line + 1)}


def reached_in(run_dir: Path, table: str, row: str, check: Callable[[], object]) -> frozenset[Site]:
    """Return the sites that `check` of a row of a table reaches; it runs once in a run of the suite, if it passes."""

    def run() -> list[Site]:
        with reached() as found:
            check()
        return sorted(found)

    name = hashlib.sha256(f"{table} {row}".encode()).hexdigest()[:16]
    return frozenset(Site(*site) for site in made_once(run_dir, f"reached-{name}", run))


@contextlib.contextmanager
def reached() -> Iterator[set[Site]]:
    """The sites that were reached in the block."""
    by_line = _by_line()
    found: set[Site] = set()

    def note(error: object, frame: FrameType | None) -> None:
        while frame is not None and frame.f_locals.get("self") is error:  # an __init__ of a derived class
            frame = frame.f_back
        if frame is not None and (site := by_line.get((frame.f_code.co_filename, frame.f_lineno))):
            found.add(site)

    with pytest.MonkeyPatch.context() as patched:
        for kind in (HiSparseError, click.ClickException):
            patched.setattr(kind, "__init__", _noting(kind.__init__, note))
        yield found


def _noting(init: Any, note: Any) -> Any:
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        note(self, sys._getframe(1))
        init(self, *args, **kwargs)

    return noted
