"""One journal form, written and read by two versions: an upgrade of the coordinator, and its rollback."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from coordinator.journal import records
from coordinator.journal.records import Record
from tests.support.wire_samples import name_of, sample_of, structs_in

KINDS = [pytest.param(kind, id=name_of(kind)) for kind in get_args(Record)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_passes_over_fields_that_a_later_version_adds(kind: Any) -> None:
    record = sample_of(inspect.type_info(kind))
    row = msgspec.msgpack.decode(records.encode(record))
    assert records.decode(msgspec.msgpack.encode([*row, "added"])) == records.decode(msgspec.msgpack.encode(row))


@pytest.mark.parametrize("kind", KINDS)
def test_record_without_fields_that_were_added_since_is_read(kind: Any) -> None:
    """Each of them has a default."""
    row = msgspec.msgpack.decode(records.encode(sample_of(inspect.type_info(kind))))
    for field in reversed(structs_in(kind)[kind].fields):
        if field.required:
            break
        row.pop()
        assert getattr(records.decode(msgspec.msgpack.encode(row)), field.name) == field.default


def test_facts_of_a_request_pass_over_added_fields_too() -> None:
    """They are within records."""
    for kind in (records.RequestFacts, records.BudgetImage, records.HoldingImage):
        row = msgspec.msgpack.decode(records.encode(sample_of(inspect.type_info(kind))))
        msgspec.msgpack.decode(msgspec.msgpack.encode([*row, "added"]), type=kind)
