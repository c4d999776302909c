"""Units of a pass cover each layer's rows once, in order, in whatever sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InternalError
from worker.loop.passes import PassPlace, PassUnit


@given(st.integers(1, 60), st.integers(1, 5), st.data())
def test_units_cover_every_row_of_every_layer_once(rows: int, layers: int, data: st.DataObject) -> None:
    place, seen, left = PassPlace(1, rows, layers), list[tuple[int, int]](), float(rows)
    while not place.is_over:
        unit = place.unit(data.draw(st.integers(1, rows + 3)))
        place.launched(unit)
        seen += [(unit.layer, row) for row in range(unit.first, unit.stop)]
        assert place.rows_left < left
        left = place.rows_left
    assert seen == [(layer, row) for layer in range(layers) for row in range(rows)]
    assert place.rows_left == pytest.approx(0)


def test_unit_out_of_turn_is_refused() -> None:
    place = PassPlace(7, rows=10, layers=1)
    with pytest.raises(InternalError, match="layer 0 goes on at row 0"):
        place.launched(PassUnit(0, 4, 8))
    with pytest.raises(InternalError, match="goes on at row 0"):
        place.launched(PassUnit(0, 0, 11))
    place.launched(place.unit(10))
    with pytest.raises(InternalError, match="the pass is over"):
        place.unit(1)
