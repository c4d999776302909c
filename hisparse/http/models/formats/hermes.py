"""Calls as JSON objects between markers, as A.X-K2 writes them (engines call the form hermes). Pure.

<tool_call>
{"name": "NAME", "arguments": {"KEY": VALUE}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from hisparse.http.models.formats.arguments import object_of, quoted
from hisparse.http.models.formats.call_grammars import OF_THE_WHOLE, any_of
from hisparse.http.models.formats.conversation import Tool
from hisparse.http.models.formats.lark import Rules, schema_of
from hisparse.http.models.formats.scanning import NAME, Reading, Scan, UnreadableOutput

START: Final = "<tool_call>"
END: Final = "</tool_call>"
#: What a chat template that shows the form names, beside START.
ARGUMENTS: Final = '"arguments"'


_TRUNCATED: Final = "Input data was truncated"


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, msgspec.Raw]  # values digit by digit


def read_call(scan: Scan, _: Mapping[str, Mapping[str, Any] | None]) -> Reading[tuple[str, str]]:
    """The name and the arguments of the call whose START has been read. Raises UnreadableOutput."""
    text = yield from scan.until(END)
    while (call := _call_of(text)) is None:
        text += END + (yield from scan.until(END))  # a string may hold an END
    if not call.name or NAME.fullmatch(call.name) is None:
        raise UnreadableOutput
    return call.name, object_of((name, bytes(value).decode()) for name, value in call.arguments.items())


def _call_of(text: str) -> _Call | None:
    """Return the call that `text` is; None: it lacks its end. Raises UnreadableOutput."""
    try:
        return msgspec.json.decode(text, type=_Call)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        if str(error) == _TRUNCATED and text.strip():
            return None
        raise UnreadableOutput from error


def call_grammar(rules: Rules, tools: Sequence[tuple[Tool, str]], many: bool) -> str:
    """Return an expression of one call of `tools`, or of several. Arguments are held to the whole schema of a tool, and
    to the members that it names where it combines no others."""
    call = rules.rule(any_of([_call(rules, tool) for tool, _ in tools]))
    return f'{call} ("\\n"? {call})*' if many else call


def _call(rules: Rules, tool: Tool) -> str:
    schema = {"type": "object", **(tool.parameters or {})}
    if not any(word in schema for word in OF_THE_WHOLE):
        schema = {"additionalProperties": False, **schema}
    arguments = rules.rule(schema_of(schema))
    opening = f'\n{{"name": {quoted(tool.name)}, {ARGUMENTS}: '
    return " ".join((rules.literal(START + opening), arguments, rules.literal("}\n" + END)))
