"""Calls as GLM-4.5 and later write them (their published chat templates). Pure.

    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value> ... </tool_call>

with blanks between the parts in some versions. A value has no type: the schema of the tool says which it
is meant to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hisparse.http.models.formats.arguments import object_of, typed, types_of
from hisparse.http.models.formats.call_grammars import any_of, expressions, members_of, optional
from hisparse.http.models.formats.conversation import Tool
from hisparse.http.models.formats.lark import Rules
from hisparse.http.models.formats.scanning import Reading, Scan, UnreadableOutput

START: Final = "<tool_call>"
END: Final = "</tool_call>"
KEY: Final = "<arg_key>"
KEY_END: Final = "</arg_key>"
VALUE: Final = "<arg_value>"
VALUE_END: Final = "</arg_value>"
MARKERS: Final = (START, END, KEY, KEY_END, VALUE, VALUE_END)


def read_call(scan: Scan, schemas: Mapping[str, Mapping[str, Any] | None]) -> Reading[tuple[str, str]]:
    """The name and the arguments, as JSON, of the call whose START has been read. Raises UnreadableOutput."""
    name = yield from scan.name()
    values: dict[str, str] = {}
    while (yield from scan.expect(KEY, END)) == KEY:
        key = (yield from scan.until(KEY_END)).strip()
        yield from scan.expect(VALUE)
        value = yield from scan.until(VALUE_END)
        if key in values:
            raise UnreadableOutput
        values[key] = typed(value, types_of(schemas.get(name), key))
    return name, object_of(values.items())


def call_grammar(rules: Rules, tools: Sequence[tuple[Tool, str]], many: bool) -> str:
    """Of one call of `tools`, each with the field of its parameters, or of several. Raises BadInput."""
    call = rules.rule(any_of([_call(rules, tool, field) for tool, field in tools]))
    return f"{call} ({_LINE} {call})*" if many else call


#: Some versions write the parts of a call in lines.
_LINE: Final = '"\\n"?'


def _call(rules: Rules, tool: Tool, field: str) -> str:
    parts = [rules.literal(START + tool.name)]
    for member in members_of(tool, field):
        texts, schemas = expressions(rules, member.values, VALUE_END)
        key = rules.literal(KEY + member.name + KEY_END)
        # A value has no type: with a string among others, text that is JSON of another one is read as that.
        value = any_of(texts if member.values.patterns else [*texts, *schemas])
        parts.append(optional(member, f"{_LINE} {key} {_LINE} {rules.literal(VALUE)} {value}"))
    return " ".join((*parts, _LINE, rules.literal(END)))
