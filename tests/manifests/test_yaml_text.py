"""YAML as another reader understands it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.manifests.yaml_text import Verbatim, documents

TEXTS = st.text() | st.sampled_from(
    ["yes", "No", "null", "~", "1.0", "0x1f", "2026-01-01", "a: b", "- a", "x\n", "a\n\n", " b\nc"]
)
NODES = st.recursive(
    TEXTS | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(TEXTS, NODES, min_size=1, max_size=3), min_size=1, max_size=2))
@settings(max_examples=200)
def test_all_documents_are_read_as_they_were(found: list[dict[str, Any]]) -> None:
    assert list(yaml.safe_load_all(documents(found))) == found


@pytest.mark.parametrize("value", ["", "one\ntwo\n", {"a": [1]}, [{"b": "c"}], []])
@pytest.mark.parametrize("length", [1_022, 1_023, 5_000])
def test_long_keys_are_read_as_they_were(length: int, value: Any) -> None:
    """1,024 characters with quotes are the most of a key on one line."""
    found = {"first": 1, " " * length: value, "last": {"\u0339" * length: value, "z": [{" " * length: value, "y": 1}]}}
    assert list(yaml.safe_load_all(documents([found]))) == [found]


def test_script_is_a_block_that_people_can_read() -> None:
    assert documents([{"command": ["sh", "one\ntwo\n"]}]) == "---\ncommand:\n  - sh\n  - |\n    one\n    two\n"


@pytest.mark.parametrize("text", ["a:\n  - b\n", "# about\na: {b: c}\n\nd: |\n  e\n\n  f\n"])
def test_verbatim_lines_keep_their_meaning(text: str) -> None:
    assert yaml.safe_load(documents([{"spec": Verbatim(text)}])) == {"spec": yaml.safe_load(text)}
