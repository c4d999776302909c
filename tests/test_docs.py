"""The documents say what the code says: fences, states, files, tests."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from coordinator.scheduling.lifecycle import State
from worker.streams import FENCES

ROOT = Path(__file__).parents[1]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_table_of_fences_is_the_one_in_the_code() -> None:
    rows = re.findall(r"^\| (\w+) \| ([\w, ]+) → ([\w, ]+) \| ", ARCHITECTURE, re.MULTILINE)
    assert rows[0] == ("fence", "producer", "consumer")
    documented = {name: (streams(producers), streams(consumers)) for name, producers, consumers in rows[1:]}
    declared = {name: (set(spec.producers), set(spec.consumers)) for name, spec in FENCES.items()}
    assert documented == declared


def streams(text: str) -> set[str]:
    return set(text.split(", "))


def test_the_life_of_a_request_names_every_state() -> None:
    diagram = ARCHITECTURE.split("## 4.")[1].split("```")[1]
    assert set(re.findall(r"[A-Z]{4,}", diagram)) == {state.value for state in State}


def test_every_file_that_is_named_exists() -> None:
    named = re.findall(r"`((?:coordinator|worker|kernels|metrics)/[\w/.]*)`", ARCHITECTURE)
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_relative_link_leads_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


@cache
def docstrings(path: str) -> dict[str, str]:
    """Of the tests and state machines of a file, by name."""
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, kinds)}


def test_each_known_bug_has_tests_that_exist_and_name_it() -> None:
    text = (ROOT / "docs" / "known-bugs.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*) \| (.*) \|$", text, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 24))
    for number, bug, answer in rows:
        references = re.findall(r"#\d{5}\b", bug) or ["vLLM"]
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", answer)
        assert tests, number
        for path, test in tests:
            said = docstrings(path).get(test)
            assert said is not None, f"row {number}: {path} has no {test}"
            assert any(reference in said for reference in references), f"row {number}: {path}::{test}"
    assert len(re.findall(r"\.py::", text)) == sum(len(re.findall(r"`tests/[\w/]+\.py::\w+`", row[2])) for row in rows)
