"""JSON that the strict decoder refuses, and that means the same as JSON that it takes. Pure.

    a field that is not known    taken where it is empty: null, [], {} or ""
    8.0                          8, where an integer is meant

Routers and packages send back what they were answered, with empty fields that are theirs. A body without such parts
never comes here, so it costs nothing. One with them is taken apart as JSON of members, object by object, down to where
its types end: nothing of free form is decoded, and at no time more than one object.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import msgspec

_EMPTY: Final = re.compile(rb'\s*(?:null|""|\[\s*\]|\{\s*\})\s*')
_WHOLE: Final = re.compile(rb"\s*(-?\d+)\.0+\s*")
_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_text: Final = msgspec.json.Decoder(str).decode


@dataclass(frozen=True)
class Form:
    """The forms of a type: objects by their tag ("" for the only one), elements of an array, an integer."""

    objects: Mapping[str, type[msgspec.Struct]]
    tag_field: str
    elements: Form | None
    has_integer: bool

    @property
    def is_plain(self) -> bool:
        return not (self.objects or self.elements or self.has_integer)


def tolerated(data: bytes | bytearray | memoryview | msgspec.Raw, kind: Any) -> bytes | None:
    """JSON of the same value that `kind` can be read from, as far as the two rules go; None: they change nothing.
    Raises what the decoder does for malformed JSON."""
    return _changed(memoryview(bytes(data).strip()), _form(kind))


def _changed(data: memoryview, form: Form) -> bytes | None:
    first = bytes(data[:1])
    if first == b"{" and form.objects:
        return _changed_object(data, form)
    if first == b"[" and form.elements is not None:
        return _changed_array(data, form.elements)
    if form.has_integer and (whole := _WHOLE.fullmatch(data)):
        return whole[1]
    return None


def _changed_object(data: memoryview, form: Form) -> bytes | None:
    members = _members(data)
    kind = form.objects.get("") or form.objects.get(_tag(members.get(form.tag_field)))
    if kind is None:
        return None
    known = _fields(kind)
    said: dict[str, msgspec.Raw] = {}
    is_same = True
    for name, raw in members.items():
        value = memoryview(raw)
        if name in known:
            changed = _changed(value, known[name]) if not known[name].is_plain else None
            is_same &= changed is None
            said[name] = raw if changed is None else msgspec.Raw(changed)
        elif name == form.tag_field or not _EMPTY.fullmatch(value):
            said[name] = raw
        else:
            is_same = False
    return None if is_same else msgspec.json.encode(said)


def _changed_array(data: memoryview, form: Form) -> bytes | None:
    came = _elements(data)
    changed = [_changed(memoryview(raw), form) for raw in came]
    if all(part is None for part in changed):
        return None
    parts = (raw if part is None else msgspec.Raw(part) for raw, part in zip(came, changed, strict=True))
    return msgspec.json.encode(list(parts))


def _tag(raw: msgspec.Raw | None) -> str:
    try:
        return "" if raw is None else _text(raw)
    except msgspec.ValidationError:
        return ""


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, Form]:
    """The forms of the fields, by name in JSON."""
    hints = get_type_hints(kind)
    names = zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True)
    return {told: _form(hints[name]) for told, name in names}


@cache
def _form(kind: Any) -> Form:
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    structs = [part for part in options if isinstance(part, type) and issubclass(part, msgspec.Struct)]
    arrays = [get_args(part)[0] for part in options if get_origin(part) is list]
    elements = _form(arrays[0]) if arrays else None
    only = len(structs) == 1
    return Form(
        objects={"" if only else str(part.__struct_config__.tag): part for part in structs},
        tag_field=str(structs[0].__struct_config__.tag_field or "") if structs else "",
        elements=None if elements is None or elements.is_plain else elements,
        has_integer=int in options,
    )
