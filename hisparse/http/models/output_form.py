"""The form of an output, whichever API it was asked in. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class OutputForm:
    """The form that an output is held to: JSON by the schema `value`, a text by a regular expression, one of a list of
    texts, or a grammar in Lark's or GBNF's syntax. `field` is where the body says so."""

    kind: Kind
    value: Any
    field: str
