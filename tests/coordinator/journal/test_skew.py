"""One journal form, written and read by two versions: an upgrade of the coordinator, and its rollback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from coordinator.journal import records
from coordinator.journal.inspection import VERSION
from protocol.skew import PROTOCOL_VERSION_MIN
from tests.support.record_protocol import name_of, structs_in

_RECORDED: Final = Path(__file__).parents[2] / "protocol" / "recorded" / f"protocol-{PROTOCOL_VERSION_MIN}.json"
RECORDED: Final = json.loads(_RECORDED.read_text())
RECORDS: Final[dict[str, str]] = RECORDED["frames"]["journal"]


def test_the_version_before_writes_this_form() -> None:
    assert RECORDED["journal_form"] == VERSION


@pytest.mark.parametrize("name", RECORDS)
def test_records_of_the_version_before_are_read(name: str) -> None:
    row = bytes.fromhex(RECORDS[name])
    record = records.decode(row)
    again = msgspec.msgpack.decode(records.encode(record))
    assert name_of(type(record)) == name
    assert is_beginning(msgspec.msgpack.decode(row), again)


def is_beginning(older: Any, newer: Any) -> bool:
    """Whether arrays of `newer` have those of `older` at their beginnings."""
    if not isinstance(newer, list) or not isinstance(older, list):
        return bool(newer == older)
    return len(newer) >= len(older) and all(map(is_beginning, older, newer))


@pytest.mark.parametrize("name", RECORDS)
def test_a_reader_passes_over_fields_that_a_later_version_adds(name: str) -> None:
    row = msgspec.msgpack.decode(bytes.fromhex(RECORDS[name]))
    assert records.decode(msgspec.msgpack.encode([*row, "added"])) == records.decode(msgspec.msgpack.encode(row))


def test_what_is_written_is_read_by_the_version_before() -> None:
    """It knows each kind of record, and passes over what was added at the end: not in a struct that refuses that."""
    now = structs_in(records.Record)
    older = {name: fields.split() for name, fields in RECORDED["structs"]["journal"].items()}
    assert {name_of(kind) for kind in now} - older.keys() <= {"TraceContext"}  # within an added field of RequestFacts
    for kind, info in now.items():
        names, known = [field.name for field in info.fields], older.get(name_of(kind))
        if known is None or names == known:
            continue
        assert names[: len(known)] == known, f"{name_of(kind)}: raise the form"
        is_open = issubclass(kind, msgspec.Struct) and not kind.__struct_config__.forbid_unknown_fields
        assert is_open, f"{name_of(kind)}: the version before refuses another field of it: raise the form"
