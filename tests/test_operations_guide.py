"""docs/operations.md names errors, commands and settings that exist, as they are spelt."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import click
import pytest

from coordinator.cli import main
from coordinator.config import SECTIONS

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "operations.md").read_text()
LINES = [line for line in GUIDE.split("## Troubleshooting")[1].splitlines() if line.startswith("| ")]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in LINES]
ERRORS = [text for symptom, *_ in ROWS[1:] for text in re.findall(r"`([^`]+)`", symptom)]
COMMANDS = sorted(set(re.findall(r"`(hisparse [a-z][^`]*)`|^    (hisparse [a-z].*)$", GUIDE, re.MULTILINE)))


@cache
def texts() -> str:
    """All text that our modules say, docstrings aside, each piece of an f-string on a line of its own."""
    pieces = []
    for room in ("coordinator", "worker", "kernels"):
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
def test_each_error_is_one_that_is_raised(error: str) -> None:
    for piece in error.split("..."):
        assert piece.strip(" :,()") in texts()


@pytest.mark.parametrize("command", [first or second for first, second in COMMANDS])
def test_each_command_and_option_exists(command: str) -> None:
    verb, *words = command.partition("&&")[0].split()[1:]
    options = {name for parameter in main.commands[verb].params for name in parameter.opts}
    if isinstance(main.commands[verb], click.Group):
        return
    for word in words:
        if word.startswith("-"):
            assert word.rstrip("`,") in options, word


def test_each_setting_exists() -> None:
    for section, field in re.findall(r"`(worker|coordinator|cluster)\.([a-z_]+)`", GUIDE):
        assert field in SECTIONS[section].__struct_fields__, f"{section}.{field}"
