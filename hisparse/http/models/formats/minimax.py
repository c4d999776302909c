"""Calls as MiniMax-M3 writes them (engines' parsers of its published template). Pure.

    N<tool_call>
    N<invoke name="NAME">N<KEY>VALUEN</KEY> ... N</invoke>
    N</tool_call>

N stands for NAMESPACE, which comes before each tag. A value is a text, whose type the schema of the tool says, or holds
tags itself: of an object one for each member, of an array `item` for each of its values. One that may be a string is a
text up to its end.

Reasoning stands between <mm:think> and </mm:think>. Replies without any may begin with the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hisparse.http.models.formats.arguments import member_of, object_of, typed, types_within
from hisparse.http.models.formats.call_grammars import any_of, expressions, members_of, optional
from hisparse.http.models.formats.conversation import Tool
from hisparse.http.models.formats.lark import Rules
from hisparse.http.models.formats.replies import CallSyntax, Schemas
from hisparse.http.models.formats.scanning import Reading, Scan, UnreadableOutput

NAMESPACE: Final = "]<]minimax[>["
THINKING: Final = ("<mm:think>", "</mm:think>")
START: Final = f"{NAMESPACE}<tool_call>"
END: Final = f"{NAMESPACE}</tool_call>"
_INVOKE: Final = f'{NAMESPACE}<invoke name="'
_INVOKE_END: Final = f"{NAMESPACE}</invoke>"
_TAG: Final = f"{NAMESPACE}<"
_ITEM: Final = "item"
#: Of values within values.
DEPTH_MAX: Final = 64


def _read_call(scan: Scan, schemas: Schemas) -> Reading[tuple[str, str]]:
    """The call whose opening, up to its name, has been read. Raises UnreadableOutput."""
    name = yield from scan.name()
    yield from scan.expect('">')
    parameters = schemas.get(name) or {}
    yield from scan.expect(_TAG)
    members = yield from _members(scan, "invoke", parameters, parameters, DEPTH_MAX)
    if len(dict(members)) < len(members):
        raise UnreadableOutput
    return name, object_of(members)


SYNTAX: Final = CallSyntax(START, _read_call, next_call=_INVOKE, block_end=END)


def _members(
    scan: Scan, within: str, schema: Any, root: Mapping[str, Any], depth: int
) -> Reading[list[tuple[str, str]]]:
    """The names and values, as JSON, up to the end of the tag `within`; the `_TAG` of the first has been read. Raises
    UnreadableOutput."""
    found: list[tuple[str, str]] = []
    while (tag := (yield from scan.until(">"))) != f"/{within}":
        if not tag or tag.startswith("/") or not depth:
            raise UnreadableOutput
        found.append((tag, (yield from _value(scan, tag, member_of(schema, tag, root), root, depth - 1))))
        if (yield from scan.until(_TAG)).strip():
            raise UnreadableOutput
    return found


def _value(scan: Scan, name: str, schema: Any, root: Mapping[str, Any], depth: int) -> Reading[str]:
    """The value, as JSON, up to the end of the tag `name`, which is read too. Raises UnreadableOutput."""
    types = types_within(schema, root)
    if "string" in types:
        return typed((yield from scan.until(f"{_TAG}/{name}>")), types)
    text = yield from scan.until(_TAG)
    begin = scan.at
    if (yield from scan.until(">")) == f"/{name}":
        empty = {"array": "[]", "object": "{}"}
        alone = next(iter(types)) if len(types) == 1 else ""
        return empty[alone] if not text.strip() and alone in empty else typed(text, types)
    if text.strip():
        raise UnreadableOutput
    scan.at = begin
    members = yield from _members(scan, name, schema, root, depth)
    if "object" not in types and all(key == _ITEM for key, _ in members):
        return f"[{', '.join(value for _, value in members)}]"
    if len(dict(members)) < len(members):
        raise UnreadableOutput
    return object_of(members)


def call_grammar(rules: Rules, tools: Sequence[tuple[Tool, str]], many: bool) -> str:
    """The grammar of a block with one call of `tools`, each with the field of its parameters, or with several. Objects
    and arrays are held to JSON, which is read too. Raises BadInput."""
    call = rules.rule(any_of([_written(rules, tool, field) for tool, field in tools]))
    return f'{rules.literal(START)} "\\n" ({call} "\\n"){"+" if many else ""} {rules.literal(END)}'


def _written(rules: Rules, tool: Tool, field: str) -> str:
    parts = [rules.literal(f'{_INVOKE}{tool.name}">')]
    for member in members_of(tool, field):
        texts, schemas = expressions(rules, member.values, f"{NAMESPACE}</{member.name}>")
        # A value has no type: with a string among others, text that is JSON of another one is read as that.
        value = any_of(texts if member.values.patterns else [*texts, *schemas])
        parts.append(optional(member, f"{rules.literal(f'{_TAG}{member.name}>')} {value}"))
    return " ".join((*parts, rules.literal(_INVOKE_END)))
