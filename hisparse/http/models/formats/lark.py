"""Grammars in the Lark syntax of llguidance, put together from parts. Pure.

A text that a tokenizer has as one special token is written as that token: models write markers so, and never letter by
letter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

#: Any text.
ANY: Final = r"(.|\n)*"
#: Blanks between the tokens of JSON: enough for a nested object that is written in lines, and never without end.
BLANKS: Final = r"[\x20\x0A\x0D\x09]{0,32}"
#: What llguidance is told with each schema. A client cannot change it.
_OPTIONS: Final = {"x-guidance": {"whitespace_pattern": BLANKS}}
#: What says nothing about a value.
ANNOTATIONS: Final = {
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "x-guidance",
}
#: Words of values, and of schemas by their names: keys in these are no words.
_VALUES: Final = ("enum", "const")
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_UNESCAPED: Final = re.compile(r"\\.|/|\n", re.DOTALL)
_REPLACED: Final = {"/": r"\/", "\n": r"\n"}


class Rules:
    """Expressions are text; rules that they name are kept here. `special` are the special tokens, by their texts."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = {text: token for text, token in special.items() if text}
        self._rules: list[str] = []
        self._markers = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or r"(?!)")

    def literal(self, text: str) -> str:
        """`text` itself."""
        return " ".join(self._parts(text))

    def until(self, end: str, pattern: str = ANY) -> str:
        """A text that `pattern` matches, up to the first `end` and with it."""
        found = self._markers.search(end)
        plain = end if found is None else end[: found.start()]
        rest = "" if found is None else f" {self.literal(end[found.start() :])}"
        name, lazy = f"u{len(self._rules)}", "[lazy]" if plain and not rest else ""
        self._rules.append(f"{name}{lazy}: {regex(f'({pattern})' + re.escape(plain))}")
        return name + rest

    def rule(self, expression: str) -> str:
        """The name of a rule for `expression`."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def grammar(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self._rules)) + "\n"

    def _parts(self, text: str) -> list[str]:
        parts, at = [], 0
        for found in self._markers.finditer(text):
            parts += [quoted(text[at : found.start()]), f"<[{self._special[found[0]]}]>"]
            at = found.end()
        return [part for part in (*parts, quoted(text[at:])) if part != '""']


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """`pattern` between slashes."""
    return f"/{_UNESCAPED.sub(lambda found: _REPLACED.get(found[0], found[0]), pattern)}/"


def schema_of(schema: Mapping[str, Any]) -> str:
    """JSON that is valid under a schema."""
    return f"%json {json.dumps({**lean(schema), **_OPTIONS}, ensure_ascii=False)}"


def lean(schema: Any) -> Any:
    """A schema without what says nothing about values."""
    if isinstance(schema, list):
        return [lean(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {word: value for word, value in schema.items() if word not in ANNOTATIONS}
    return {word: _lean_member(word, value) for word, value in kept.items()}


def _lean_member(word: str, value: Any) -> Any:
    if word in _VALUES:
        return value
    if word in _BY_NAME and isinstance(value, Mapping):
        return {name: lean(part) for name, part in value.items()}
    return lean(value)
