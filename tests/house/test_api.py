"""docs/api.md names what programs may import, no more and no less; what is shown in Python compiles."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

import hisparse
from hisparse import kernels
from tests import ROOT

PUBLIC = {"hisparse": hisparse, "hisparse.kernels": kernels}
DOCUMENTS = ("README.md", "docs/api.md")


def blocks(document: str) -> list[str]:
    """Its code in Python."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def names_of(section: str) -> list[str]:
    """What the first column of the section's table names."""
    text = (ROOT / "docs" / "api.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


@pytest.mark.parametrize("section", PUBLIC)
def test_page_names_exactly_the_public_names(section: str) -> None:
    assert sorted(names_of(section)) == sorted(PUBLIC[section].__all__)


def test_every_call_of_a_client_says_what_it_does() -> None:
    """The page sends readers there."""
    calls = {name: it for name, it in vars(hisparse.Client).items() if not name.startswith("_")}
    assert {"submit", "drain", "stop"} <= calls.keys()
    assert [name for name, it in calls.items() if inspect.isroutine(it) and not inspect.getdoc(it)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_shown_python_compiles_with_public_imports(document: str) -> None:
    for block in blocks(document):
        tree = ast.parse(block)
        compile(tree, document, "exec")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "hisparse":
                names = {alias.name for alias in node.names}
                assert names <= {*PUBLIC[str(node.module)].__all__, "kernels"}, names


def test_code_is_shown() -> None:
    assert len(blocks("README.md")) == 1
    assert len(blocks("docs/api.md")) == 3
