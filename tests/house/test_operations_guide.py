"""docs/operations.md names errors as they are spelt. What it shares with other documents: test_docs.py."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests import ROOT

GUIDE = (ROOT / "docs" / "operations.md").read_text()
LINES = [line for line in GUIDE.split("## Troubleshooting")[1].splitlines() if line.startswith("| ")]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in LINES]
ERRORS = [text for symptom, *_ in ROWS[1:] for text in re.findall(r"`([^`]+)`", symptom)]


@cache
def texts() -> str:
    """All text that our modules say, docstrings aside, each piece of an f-string on a line of its own."""
    pieces = []
    for room in ("protocol", "basics", "coordinator", "worker", "kernels", "hisparse"):
        for file in (ROOT / room).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(file.read_text())))
            silent = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            said = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in silent)
            pieces += [node.value for node in said if isinstance(node.value, str)]
    return "\n".join(pieces)


def test_the_table_has_four_columns() -> None:
    assert len(ROWS) > 25
    assert {len(row) for row in ROWS} == {4}
    assert len(ERRORS) > 25


@pytest.mark.parametrize("error", ERRORS)
def test_each_listed_error_is_raised(error: str) -> None:
    for piece in error.split("..."):
        assert piece.strip(" :,()") in texts()
