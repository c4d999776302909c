"""What the JSON decoder refuses, in the words of the API: a JSON path, what was expected, what came, the remedy. Pure.

The decoder's own text goes to no client: it names types of Python, and changes with the library.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import msgspec

from hisparse.http.apis.fields import Rule, Rules, rules_of
from hisparse.http.apis.tolerance import tolerated
from hisparse.http.errors import PLACE_CHARS_MAX, VALUE_CHARS_MAX
from protocol.errors import BadInput

#: What a decoder may raise about bytes that a client chose.
UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

#: Names that are less like each other are not suggested: /v1/completions for /v1/embeddings.
LIKENESS_MIN: Final = 0.75
#: Of values of free form, such as schemas: integers, and objects and lists within each other.
INTEGER_MIN: Final = -(1 << 63)
INTEGER_MAX: Final = (1 << 64) - 1
LEVELS_MAX: Final = 100
#: Of such a value: what it is in, its name or number there, and itself.
_Part: TypeAlias = tuple[Any, str | int, Any]
NO_RULES: Final[Rules] = {}
_LONG_NUMBER: Final = re.compile(rb"\d{19}")
_AT: Final = re.compile(r"at `\$([^`]*)`$")
#: Refusals of which hisparse.http.apis.tolerance may think otherwise.
_TOLERABLE: Final = re.compile(r"Object contains unknown field |Expected `[^`]*\bint\b[^`]*`, got `float`")
_EXPECTED: Final = re.compile(r"^Expected `([^`]*)`, got `([^`]*)`")
_WORDS: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_TYPES: Final = {"float": "a number that is no integer", "bool": "a boolean"}


def decoded(
    data: bytes | bytearray | memoryview | msgspec.Raw, kind: Any, root: str = "", *, is_free: bool = True
) -> Any:
    """JSON as a value of `kind`. Raises BadInput naming the place in `root`, a field; "" is the whole body, and its
    fields of free form are decoded by themselves. `is_free` says that `kind` has room for values of any form."""
    try:
        value = _read(data, kind)
    except msgspec.ValidationError as error:
        inner = re.sub(r"\[\d+\]|\[\.\.\.\]", "", path_of(error))
        raise undecodable(
            error, root, fields_at(kind, inner), choices_at(kind, inner), rules_at(kind, inner)
        ) from error
    except UNDECODABLE as error:
        raise undecodable(error, root) from error
    if root and is_free:
        _check_free_form(bytes(data), value, root)
    return value


def _read(data: bytes | bytearray | memoryview | msgspec.Raw, kind: Any) -> Any:
    """Read strictly, or else tolerate. Raises what the decoder does."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        if not _TOLERABLE.match(str(error)):
            raise
        changed = tolerated(data, kind)
        if changed is None:
            raise
    return msgspec.json.decode(changed, type=kind)


def _check_free_form(data: bytes, value: Any, root: str) -> None:
    """Raises BadInput for what templates, grammars and answers cannot hold: schemas and the like have any form."""
    if data.count(b"[") + data.count(b"{") <= LEVELS_MAX and not _LONG_NUMBER.search(data):
        return
    for number, level in enumerate(_levels(value, root)):
        if number > LEVELS_MAX:
            raise BadInput(f"is nested deeper than {LEVELS_MAX} levels", field=root, remedy="flatten it")
        for part in level:
            if isinstance(part[2], int) and not INTEGER_MIN <= part[2] <= INTEGER_MAX:
                raise BadInput("is an integer of more than 64 bits", field=_place(part), remedy="use a smaller number")


def is_deeper(value: Any, levels: int) -> bool:
    """Return whether objects and lists are within each other in more than `levels`."""
    return any(number > levels for number, _ in enumerate(_levels(value)))


def _levels(value: Any, root: str = "") -> Iterator[list[_Part]]:
    """Yield the value, the parts of it, the parts of those, and so on."""
    parts: list[_Part] = [(None, root, value)]
    while parts:
        yield parts
        parts = [(part, name, inner) for part in parts for name, inner in _members(part[2])]


def _members(part: Any) -> Iterator[tuple[str | int, Any]]:
    """Those of an object or a list, by name or number."""
    if isinstance(part, dict):
        yield from part.items()
    elif isinstance(part, list | tuple):
        yield from enumerate(part)
    elif isinstance(part, msgspec.Struct):
        names = zip(part.__struct_encode_fields__, part.__struct_fields__, strict=True)
        yield from ((told, getattr(part, name)) for told, name in names)


def _place(part: _Part | None) -> str:
    """Made for one part alone: names are as long as a client makes them, and lists as well."""
    names: list[str | int] = []
    while part is not None:
        part, name = part[0], part[1]
        names.append(name)
    at = ""
    for name in reversed(names):
        at = f"{at}[{name}]" if isinstance(name, int) else _join(at, name)
        if len(at) > PLACE_CHARS_MAX:
            return f"{at[:PLACE_CHARS_MAX]}..."
    return at


def fields_at(kind: Any, path: str) -> list[str]:
    """The fields of the objects that `kind` has at `path`, which is without indices."""
    return list(dict.fromkeys(name for it in _objects_at(kind, path) for name in it.__struct_fields__))


def rules_at(kind: Any, path: str) -> dict[str, Rule]:
    """The rules that refuse fields of the objects at `path`."""
    return {name: rule for it in _objects_at(kind, path) for name, rule in rules_of(it).items()}


def choices_at(kind: Any, path: str) -> list[str]:
    """The texts that `kind` accepts at `path`; "" is itself."""
    if not path:
        return _texts(kind)
    outer, _, name = path.rpartition(".")
    found: list[str] = []
    for it in _objects_at(kind, outer):
        if it.__struct_config__.tag_field == name:
            found.append(str(it.__struct_config__.tag))
        found += _texts(_hints(it).get(name))
    return list(dict.fromkeys(found))


def _texts(kind: Any) -> list[str]:
    return [str(text) for option in _options(kind) if get_origin(option) is Literal for text in get_args(option)]


def _objects_at(kind: Any, path: str) -> list[type[msgspec.Struct]]:
    found = [kind]
    for name in path.split(".") if path else []:
        found = [_hints(it)[name] for it in _structs(found) if name in it.__struct_fields__]
    return list(_structs(found))


@cache
def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Of a body or a part of one. Evaluated once: it takes a millisecond, for each refused body otherwise."""
    return get_type_hints(kind)


def _structs(kinds: Iterable[Any]) -> Iterator[type[msgspec.Struct]]:
    for kind in kinds:
        for option in _options(kind):
            if isinstance(option, type) and issubclass(option, msgspec.Struct):
                yield option


def _options(kind: Any) -> Iterator[Any]:
    """The types in a union, and those of an array's elements."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType, list, tuple):
        for part in get_args(kind):
            yield from _options(part)
    elif origin is Annotated:
        yield from _options(get_args(kind)[0])
    else:
        yield kind


def undecodable(
    error: Exception, root: str = "", known: Iterable[str] = (), choices: Iterable[str] = (), rules: Rules = NO_RULES
) -> BadInput:
    """A decoder's refusal of `root`, a field; "" is the whole body. `known` are fields, `choices` values, that would
    have been accepted where the decoder stopped, `rules` those of fields that are refused there."""
    if not isinstance(error, msgspec.ValidationError):
        return BadInput(_malformed(error), field=root or "body", remedy="send one JSON object in UTF-8")
    text = str(error)
    at = path_of(error, root)
    if named := re.match(r"Object contains unknown field `(.*?)`(?: - at|$)", text, re.DOTALL):
        return _unknown(named[1], _join(at, named[1]), known, rules)
    if named := re.match(r"Object missing required field `(.*?)`", text):
        return BadInput("is missing", field=_join(at, named[1]), remedy="add it")
    field = at or "body"
    if named := re.match(r"Invalid (?:enum )?value '(.*)'", text, re.DOTALL):
        told = ", ".join(choices)
        remedy = f"use one of {told}" if told else "change it"
        return BadInput("is none of the accepted values", field=field, value=named[1][:VALUE_CHARS_MAX], remedy=remedy)
    if types := _EXPECTED.match(text):
        wanted = [_WORDS.get(it, it) for it in types[1].split(" | ") if it != "null"]
        came = _TYPES.get(types[2]) or _WORDS.get(types[2], types[2])
        return BadInput(f"expected {' or '.join(wanted) or 'null'}, not {came}", field=field, remedy="change its type")
    return BadInput("is a number that is too large to be read", field=field, remedy="use a smaller number")


def _unknown(name: str, field: str, known: Iterable[str], rules: Rules) -> BadInput:
    if rule := rules.get(name):
        return BadInput(f"is not supported: {rule.why}", field=field, remedy=rule.remedy)
    remedy = nearest(name, known, "leave it out; GET /v1/parameters lists what is accepted")
    return BadInput("is no known parameter", field=field, remedy=remedy)


def path_of(error: Exception, root: str = "") -> str:
    """Where the decoder stopped, as `messages[0].content`."""
    at = _AT.search(str(error))
    inner = at[1] if at else ""
    return root + inner if root else inner.removeprefix(".")


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """The remedy for an unknown name; `otherwise` where no known one is like it."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=LIKENESS_MIN)
    return f"did you mean {close[0]}?" if close else otherwise


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _malformed(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "is not UTF-8"
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    at = re.search(r"\(byte (\d+)\)", str(error))
    return f"is not JSON from byte {at[1]} on" if at else "is not JSON, or ends too early"
