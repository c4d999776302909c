"""A value of each message of the wire and each record of the journal, other than the default in every field."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, Final

import msgspec
from msgspec import inspect

from coordinator.journal import records
from protocol import messages

#: Unions, by who writes them.
UNIONS: Final = MappingProxyType(
    {
        "admin": messages.AdminMessage,  # a client's among them
        "gateway": messages.GatewayMessage,
        "worker": messages.WorkerMessage,
        "coordinator": messages.CoordinatorMessage,
        "journal": records.Record,
    }
)
#: A value of each plain type, other than any default.
PLAIN: Final[MappingProxyType[type, object]] = MappingProxyType(
    {
        inspect.IntType: 3,
        inspect.FloatType: 0.5,
        inspect.StrType: "word",
        inspect.BoolType: True,
        inspect.NoneType: None,
    }
)
BYTES: Final = bytes(range(1, 9))


def structs_in(of: Any) -> dict[type, inspect.StructType | inspect.NamedTupleType]:
    """All structs and named tuples that a value of this type may contain."""
    found: dict[type, inspect.StructType | inspect.NamedTupleType] = {}
    pending: list[object] = [inspect.type_info(of)]
    while pending:
        match pending.pop():
            case (inspect.StructType() | inspect.NamedTupleType()) as it if it.cls not in found:
                found[it.cls] = it
                pending += [field.type for field in it.fields]
            case inspect.UnionType(types=types):
                pending += types
            case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
                pending.append(item)
            case inspect.TupleType(item_types=items):
                pending += items
    return found


def samples_of(kind: inspect.Type) -> Iterable[Any]:
    """Values of this type: one, or one for each struct of a union."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields) | inspect.NamedTupleType(cls=cls, fields=fields):
            yield cls(**{field.name: sample_of(field.type) for field in fields})
        case inspect.UnionType(types=types):
            kinds = sorted(types, key=lambda it: isinstance(it, inspect.NoneType | inspect.IntType))
            yield from (sample_of(it) for it in kinds)
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            yield tuple(samples_of(item))
        case inspect.TupleType(item_types=items):
            yield tuple(map(sample_of, items))
        case inspect.BytesType(min_length=least):
            yield (BYTES * 2)[: least or len(BYTES)]
        case _:
            yield PLAIN[type(kind)]


def sample_of(kind: inspect.Type) -> Any:
    return next(iter(samples_of(kind)))


def name_of(kind: type) -> str:
    """The tag of a message or record; the class of a part that has none."""
    return str((issubclass(kind, msgspec.Struct) and kind.__struct_config__.tag) or kind.__name__)
