"""Rows of an inventory survive packing; other bytes are refused or read as rows."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ProtocolError
from protocol.inventory import NO_RESIZE, InventoryRow, pack_rows, unpack_rows

INT32, INT64 = (st.integers(-(2**bits), 2**bits - 1) for bits in (31, 63))
rows = st.builds(
    InventoryRow,
    **{
        field.name: st.booleans() if field.type == "bool" else INT64 if field.name in ("placement", "digest") else INT32
        for field in fields(InventoryRow)
    },
)


@given(st.lists(rows, max_size=5))
def test_rows_survive_packing(sent: list[InventoryRow]) -> None:
    assert unpack_rows(pack_rows(sent)) == sent


@given(st.binary(max_size=200))
def test_bytes_are_whole_rows_or_refused(data: bytes) -> None:
    if len(data) % len(pack_rows([InventoryRow(1)])):
        with pytest.raises(ProtocolError, match="inventory"):
            unpack_rows(data)
    else:
        unpack_rows(data)


def test_a_resize_under_way_is_slots_and_chunks() -> None:
    assert InventoryRow(1).resizing is None
    assert InventoryRow(1, resize_slots=NO_RESIZE, resize_chunks=3).resizing is None
    assert InventoryRow(1, resize_slots=0, resize_chunks=3).resizing == (0, 3)
