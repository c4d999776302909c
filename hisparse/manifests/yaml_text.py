"""YAML of manifests: block mappings and lists, plain or quoted scalars, literal blocks for files. Pure.

Only what manifests need is written: mappings with text keys, lists, text, whole numbers and booleans. Text that another
reader could take for something else (`yes`, `1.0`, `2026-01-01`) is quoted as in JSON, which YAML 1.2 contains.

Rejected: PyYAML (a dependency of every user for one command); JSON (valid for kubectl, but no person reads a script or
a dashboard in one line of it).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

#: What a document is made of.
Node: TypeAlias = "Mapping[str, Node] | Sequence[Node] | Verbatim | str | int | bool"

#: Text that every YAML reader takes for text. A word of YAML 1.1 that is none (yes, on, null) is in WORDS.
PLAIN: Final = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
WORDS: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
#: Longest key that stands before its colon on one line; a longer one is marked with "? " on a line of its own.
KEY_CHARS_MAX: Final = 1_024
#: Text of a literal block: all other characters need escapes, among them U+2028, which ends a line in YAML.
PRINTABLE: Final = re.compile(r"[\x20-\x7e\n\xa0-\u2027\u2030-\ud7ff\ue000-\ufdff]*")


class Verbatim:
    """Lines of YAML that stand in a document as they are, indented."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()


def documents(found: Iterable[Mapping[str, Node]]) -> str:
    """All of `found` in one stream, each behind a line of three dashes."""
    return "".join("---\n" + "\n".join(_mapping(it)) + "\n" for it in found)


def _mapping(value: Mapping[str, Node]) -> Iterator[str]:
    for key, inner in value.items():
        text = _scalar(key)
        head = f"{text}:"
        if len(text) > KEY_CHARS_MAX:
            yield f"? {text}"
            head = ":"
        if isinstance(inner, Verbatim):
            yield head
            yield from _indented(inner.lines)
        elif isinstance(inner, Mapping | list | tuple) and inner:
            yield head
            yield from _indented(_mapping(inner) if isinstance(inner, Mapping) else _list(inner))
        else:
            yield from _leaf(head, inner)


def _list(value: Sequence[Node]) -> Iterator[str]:
    for inner in value:
        if isinstance(inner, Mapping | list | tuple) and inner:
            lines = _indented(_mapping(inner) if isinstance(inner, Mapping) else _list(inner))
            yield "- " + next(lines)[2:]
            yield from lines
        else:
            yield from _leaf("-", inner)


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" if line else "" for line in lines)


def _leaf(head: str, value: Node) -> Iterator[str]:
    """A scalar behind `head`; text of several lines as a literal block, where it needs no escapes."""
    if isinstance(value, str) and "\n" in value and PRINTABLE.fullmatch(value) and value[0] not in " \n":
        body = value.removesuffix("\n")
        yield f"{head} |" + ("-" if body == value else "+" if body.endswith("\n") else "")
        yield from _indented(body.split("\n"))
    else:
        yield f"{head} {_flat(value)}"


def _flat(value: Node) -> str:
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, list | tuple):
        return "[]"
    assert isinstance(value, str | int), value
    return _scalar(value)


def _scalar(value: str | int) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    plain = PLAIN.fullmatch(value) and value.lower() not in WORDS
    if plain:
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[^\x20-\x7e]", lambda found: f"\\U{ord(found[0]):08x}", quoted)
