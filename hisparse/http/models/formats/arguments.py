"""Arguments of a call, from the texts that a model wrote, as a JSON object. Pure.

A value that is JSON is taken as it stands, digit by digit. One that is none is a string, so that the object can always
be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

#: References to references in a schema.
REFERENCES_MAX: Final = 8
_TYPES: Final = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def object_of(members: Iterable[tuple[str, str]]) -> str:
    """A JSON object, of names and of values that are JSON already."""
    return "{" + ", ".join(f"{quoted(name)}: {value}" for name, value in members) + "}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_or_quoted(text: str) -> str:
    """`text` where it is JSON, else a JSON string of it."""
    return text.strip() if type_of(text) else quoted(text)


def typed(text: str, types: frozenset[str]) -> str:
    """JSON of a value whose JSON schema accepts `types`; without any it may be of each type.

    Where strings are accepted, `text` is one unless it is a value of another accepted type.
    """
    kind = type_of(text)
    if "string" in types and kind not in _accepting(types - {"string"}):
        return quoted(text)
    return text.strip() if kind else quoted(text)


def type_of(text: str) -> str:
    """The type of the JSON value that `text` is; "": it is none."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return ""
    return "null" if value is None else _TYPES[type(value)]


def _accepting(types: frozenset[str]) -> frozenset[str]:
    return types | {"integer"} if "number" in types else types


def types_of(parameters: Mapping[str, Any] | None, name: str) -> frozenset[str]:
    """The types that a JSON schema of an object accepts for its member `name`; none: it does not say."""
    parameters = parameters or {}
    return types_within(member_of(parameters, name, parameters), parameters)


def member_of(schema: Any, name: str, parameters: Mapping[str, Any]) -> Any:
    """The schema of member `name` of an object, or of the `item` of an array, of `schema` within `parameters`; None: it
    does not say."""
    schema = resolved(schema, parameters)
    if not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return schema.get("items") if name == "item" else None


def types_within(schema: Any, parameters: Mapping[str, Any]) -> frozenset[str]:
    """The types that `schema` within `parameters` accepts; none: it does not say."""
    return _types(schema, parameters, 4)


def resolved(schema: Any, parameters: Mapping[str, Any]) -> Any:
    """What `schema` refers to within `parameters`, or itself."""
    for _ in range(REFERENCES_MAX):
        name = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(name, str) or not name.startswith("#/"):
            break
        found: Any = parameters
        for word in name.split("/")[1:]:
            found = found.get(word) if isinstance(found, Mapping) else None
        schema = found
    return schema


def _types(schema: Any, parameters: Mapping[str, Any], depth: int) -> frozenset[str]:
    schema = resolved(schema, parameters)
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    said = schema.get("type")
    if isinstance(said, str):
        return frozenset((said,))
    if isinstance(said, list):
        return frozenset(it for it in said if isinstance(it, str))
    if isinstance(values := schema.get("enum"), list):
        return frozenset("null" if value is None else _TYPES.get(type(value), "") for value in values) - {""}
    branches = [it for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list) for it in schema[word]]
    found = [_types(branch, parameters, depth - 1) for branch in branches]
    return frozenset().union(*found) if all(found) else frozenset()
