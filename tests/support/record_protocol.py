"""Records what this version's processes write, for tests of later versions: frames of the wire, records of the journal.

    python -m tests.support.record_protocol > tests/protocol/recorded/protocol-N.json

Run it with PYTHONPATH at the tree of the version to record, whose own code then writes. Each struct that crosses the
wire or lies in a journal is recorded by name with its fields, and each message and record as bytes, in hex, with a
value other than the default in every field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, Final, get_args

import msgspec
from msgspec import inspect

from coordinator.journal import inspection, records
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


def shapes_of(union: Any) -> dict[str, str]:
    """Names of the fields of each struct and named tuple, in order."""
    return {name_of(cls): " ".join(field.name for field in it.fields) for cls, it in structs_in(union).items()}


def recorded() -> dict[str, object]:
    frames = {
        role: {name_of(cls): messages.encode(sample_of(inspect.type_info(cls))).hex() for cls in get_args(union)}
        for role, union in UNIONS.items()
    }
    return {
        "protocol": messages.PROTOCOL_VERSION,
        "journal_form": inspection.VERSION,
        "structs": {role: dict(sorted(shapes_of(union).items())) for role, union in UNIONS.items()},
        "frames": frames,
    }


if __name__ == "__main__":
    print(json.dumps(recorded(), indent=1))
