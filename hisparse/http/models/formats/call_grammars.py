"""Calls of tools as grammars: what models write, with arguments by the schema of the tool. Pure.

Both formats write an argument that is a string as it stands, and others as JSON. So the members of the arguments are
held one by one, in the order of the schema: its required ones, and any of the others that it names. What a schema says
of an object as a whole, or of a value by other words than types, values and choices, cannot be held so and is refused.
`format` of a string says nothing, as JSON schema has it by default.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hisparse.http.models.formats.arguments import resolved
from hisparse.http.models.formats.conversation import Tool
from hisparse.http.models.formats.lark import ANNOTATIONS, ANY, Rules, schema_of
from protocol.errors import BadInput

#: Words of an object as a whole, in JSON schema.
OF_THE_WHOLE: Final = (
    *("anyOf", "oneOf", "allOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "const", "enum"),
    *("minProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
)
#: Where schemas are kept that others refer to.
_DEFINITIONS: Final = ("$defs", "definitions")
_CHOICES: Final = ("anyOf", "oneOf")
#: Choices within choices, and references to references.
DEPTH_MAX: Final = 8


@dataclass(frozen=True)
class Values:
    """What an argument may be: strings, as `texts` or by `patterns`; JSON by one of `schemas`."""

    texts: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    schemas: tuple[Mapping[str, Any], ...] = ()

    def or_(self, other: Values) -> Values:
        return Values(self.texts + other.texts, self.patterns + other.patterns, self.schemas + other.schemas)


@dataclass(frozen=True)
class Argument:
    name: str
    is_required: bool
    values: Values


def members_of(tool: Tool, field: str) -> Iterator[Argument]:
    """The arguments of `tool`. `field` is where its parameters are. Raises BadInput."""
    parameters = tool.parameters or {}
    for word in OF_THE_WHOLE:
        if word in parameters:
            raise _refusal("is of the arguments as a whole", f"{field}.{word}")
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise BadInput("is no JSON schema of an object", field=field, remedy="correct it")
    for name in dict.fromkeys((*properties, *(it for it in required if isinstance(it, str)))):
        place = f"{field}.properties.{name}"
        values = _values(properties.get(name, True), parameters, place, DEPTH_MAX)
        if values == Values():
            raise _refusal("allows no value", place)
        yield Argument(name, name in required, values)


def expressions(rules: Rules, values: Values, end: str) -> tuple[list[str], list[str]]:
    """Of a value with `end` behind it: as text, and as JSON."""
    texts = [rules.literal(text + end) for text in values.texts]
    texts += [rules.until(end, pattern) for pattern in values.patterns]
    return texts, [f"{rules.rule(schema_of(schema))} {rules.literal(end)}" for schema in values.schemas]


def optional(member: Argument, expression: str) -> str:
    return expression if member.is_required else f"({expression})?"


# ---------------------------------------------------------------- schemas of arguments


def _values(schema: Any, parameters: Mapping[str, Any], field: str, depth: int) -> Values:
    schema = resolved(schema, parameters)
    said = set(schema) - ANNOTATIONS if isinstance(schema, Mapping) else set()
    if schema is True or (isinstance(schema, Mapping) and not said):
        return Values(patterns=(ANY,), schemas=({},))
    if not isinstance(schema, Mapping) or not depth:
        raise _refusal("allows nothing, or is nested too deeply", field)
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(listed, list):
        others = [value for value in listed if not isinstance(value, str)]
        texts = tuple(value for value in listed if isinstance(value, str))
        return Values(texts, schemas=({"enum": others},) if others else ())
    word = next((it for it in _CHOICES if it in schema), "")
    if word and said == {word} and isinstance(schema[word], list):
        found = Values()
        for number, branch in enumerate(schema[word]):
            found = found.or_(_values(branch, parameters, f"{field}.{word}[{number}]", depth - 1))
        return found
    return _typed(schema, parameters, field)


def _typed(schema: Mapping[str, Any], parameters: Mapping[str, Any], field: str) -> Values:
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list):
        raise _refusal("has no type", field)
    others = [it for it in types if it != "string"]
    whole = dict(schema)
    if '"$ref"' in json.dumps(schema):
        whole |= {word: parameters[word] for word in _DEFINITIONS if word in parameters}
    patterns = (_pattern(schema, field),) if "string" in types else ()
    return Values(patterns=patterns, schemas=({**whole, "type": others},) if others else ())


def _pattern(schema: Mapping[str, Any], field: str) -> str:
    """Of a string. JSON schema searches for `pattern`; both ends are free unless it ties them."""
    pattern, least, most = (schema.get(word) for word in ("pattern", "minLength", "maxLength"))
    if isinstance(pattern, str):
        if least is not None or most is not None:
            raise _refusal("has a pattern and a length", field)
        before = "" if pattern.startswith("^") else ANY
        is_tied = pattern.endswith("$") and not pattern.endswith(r"\$")
        body = pattern.removeprefix("^")
        return f"{before}({body[:-1] if is_tied else body}){'' if is_tied else ANY}"
    if least is None and most is None:
        return ANY
    if not all(isinstance(it, int) for it in (least or 0, most or 0)):
        raise _refusal("has a length that is no integer", field)
    return f"[^<]{{{least or 0},{'' if most is None else most}}}"


def _refusal(why: str, field: str) -> BadInput:
    remedy = "use tool_choice auto, or types, enum, and anyOf of these"
    return BadInput(f"{why}, which no call can be held to", field=field, remedy=remedy)


def any_of(options: Sequence[str]) -> str:
    return f"({' | '.join(options)})"
