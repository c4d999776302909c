"""docs/glossary.md names each term once, where it lives exists, and retired words are no identifiers."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from hisparse.cli import main
from metrics.names import BY_NAME
from protocol.config import SECTIONS
from tests import ROOT
from tests.support.once import made_once

PRODUCT = ("protocol", "basics", "metrics", "kernels", "coordinator", "worker", "hisparse")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "glossary.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| term |")
]
PLACES = [(row[0], place) for row in ROWS for place in row[2].split("; ")]

#: Words that the glossary replaced: no part of any identifier, in singular or plural.
RETIRED = ("roster", "lobby", "rung", "ladder", "intake", "reception", "visit", "meter", "verb", "outdone", "surely")
RETIRED += ("story", "suspicion", "mail", "knock", "door", "garbage", "gate", "book", "stay", "ticket")
#: Whole identifiers, whose parts are words of other things.
RETIRED_NAMES = ("last_topk", "next_slots", "Known", "Book", "Heard", "Remedy", "Fleet", "Roster", "slot_index")
RETIRED_NAMES += ("kept_admissions", "NOBODY")

#: What a name is not part of (strings, comments, numbers), or a name as the group.
TOKEN: Final = re.compile(
    r"""(?:[rbfu]{1,2}(?=["']))?"""
    r'''(?:"""(?:[^\\]|\\.)*?"""|"(?:[^"\\\n]|\\.)*"|'''
    r"""'''(?:[^\\]|\\.)*?'''|'(?:[^'\\\n]|\\.)*')"""
    r"""|\#[^\n]*|\d[\w.]*|([^\W\d]\w*)""",
    re.DOTALL | re.IGNORECASE,
)

#: Files that still have a retired word, by word, with the reason.
LEFT: dict[str, tuple[set[str], str]] = {
    "gate": (
        {"kernels/cuda/pointwise.py", "kernels/cuda/pointwise_triton.py"}
        | {"worker/runners/experts.py", "worker/runners/layers.py", "worker/runners/tiny_weights.py"}
        | {"benchmarks/block_fp8.py"}
        | {"tests/gpu/test_pointwise.py", "tests/gpu/test_block_fp8.py", "tests/kernels/test_block_fp8.py"}
        | {"kernels/block_fp8.py", "kernels/cuda/block_fp8.py", "kernels/cuda/block_fp8_triton.py"}
        | {"kernels/cuda/deep_gemm.py", "kernels/cuda/deep_gemm_cache.py", "kernels/cuda/quantize.py"}
        | {"worker/oracle.py", "tests/gpu/test_deep_gemm.py", "tests/kernels/test_quantize.py"}
        | {"tests/kernels/test_deep_gemm.py", "tests/worker/weights/test_modules.py"}
        | {"worker/weights/layout.py", "worker/weights/model.py", "worker/weights/modules.py"}
        | {"worker/families/axk2.py", "worker/families/latent.py", "worker/runners/attention.py"}
        | {"worker/families/hy_v4.py", "tests/worker/families/test_hy_v4.py"}
        | {"tests/worker/families/test_axk2.py", "tests/worker/families/test_toy_family.py"},
        "gate projections of MLPs and experts, and gates of norms and attention, as the model library spells them",
    ),
}


def python_files() -> list[Path]:
    return [path for name in (*PRODUCT, "tests", "tools") for path in sorted((ROOT / name).rglob("*.py"))]


@cache
def definitions(path: str) -> frozenset[str]:
    """Classes and module-level names of a file."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return frozenset(names)


def read_identifiers() -> dict[str, list[str]]:
    """Of the Python code of product and tests, by file, without names of tests, which are sentences."""
    found = {}
    for path in python_files():
        names, file = names_in(path.read_text()), str(path.relative_to(ROOT))
        found[file] = sorted(it for it in names if not (file.startswith("tests/") and it.startswith("test_")))
    return found


def names_in(source: str) -> set[str]:
    """Names and keywords in `source`, as module tokenize finds them, in a fifth of its time."""
    return {name for name in TOKEN.findall(source) if name}


def test_names_are_those_that_python_finds() -> None:
    rare = "x = rb'a' + 0x1f + 1e5 + 1.5j + .5e3; y = f'{a}' 'it\\'s'; été = '#' # z"
    source = f"{Path(__file__).read_text()}{rare}\n"
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    assert names_in(source) == {token.string for token in tokens if token.type == tokenize.NAME}


@pytest.fixture(scope="module")
def identifiers(run_dir: Path) -> dict[str, set[tuple[str, str]]]:
    """(file, identifier) by the identifier, and by each word in it."""
    read: dict[str, list[str]] = made_once(run_dir, "identifiers", read_identifiers)
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for file, names in read.items():
        for name in names:
            for part in {name, *words(name)}:
                found[part].add((file, name))
    return found


@cache
def words(identifier: str) -> set[str]:
    """`LastSeen_at` is last, seen, at."""
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


def test_glossary_has_three_columns_and_each_term_once_in_order() -> None:
    assert len(ROWS) > 70
    assert {len(row) for row in ROWS} == {3}
    terms = [row[0].lower() for row in ROWS]
    assert terms == sorted(set(terms))


@pytest.mark.parametrize(("term", "place"), PLACES)
def test_each_place_exists(term: str, place: str) -> None:
    """A file (and a class in it), a setting, a metric, or a command."""
    match = re.fullmatch(r"`([^`]+)`(?:: `(\w+)`)?", place)
    assert match, f"{term}: {place}"
    named, definition = match.groups()
    if "/" in named:
        assert (ROOT / named).exists(), f"{term}: {named}"
        assert definition is None or definition in definitions(named), f"{term}: {named} has no {definition}"
    elif named.startswith("hisparse "):
        assert named.split()[1] in main.commands, f"{term}: {named}"
    elif "." in named:
        section, _, field = named.partition(".")
        assert field in SECTIONS[section].__struct_fields__, f"{term}: {named}"
    else:
        assert named in BY_NAME, f"{term}: {named}"


@pytest.mark.parametrize("retired", [*RETIRED, *RETIRED_NAMES])
def test_retired_words_are_no_identifiers(retired: str, identifiers: dict[str, set[tuple[str, str]]]) -> None:
    forms = (retired, retired + "s") if retired in RETIRED else (retired,)
    used = {each for form in forms for each in identifiers.get(form, ())}
    files, _ = LEFT.get(retired, (set(), ""))
    assert sorted((file, name) for file, name in used if file not in files) == [], "use the term of docs/glossary.md"
    assert not files or used, f"{retired} is gone: take it off LEFT"
