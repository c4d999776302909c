"""How pages are cut into layer groups, and when their parts may go (layer_groups.py, handover.py)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.layout import Geometry
from protocol.units import PAGE_TOKENS, pages_for
from worker.transfer.handover import Outgoing
from worker.transfer.interface import PARTS_MAX
from worker.transfer.layer_groups import LayerGroups

#: DeepSeek-V3.2 in bfloat16, and in fp8.
BF16 = Geometry(61, 1_152, tuple(range(61)), 256, 2_048)
FP8 = Geometry(61, 656, tuple(range(61)), 132, 2_048)

GEOMETRIES = st.builds(
    lambda layers, row_bytes, index_row_bytes: Geometry(layers, row_bytes, tuple(range(layers)), index_row_bytes, 64),
    layers=st.integers(1, 100),
    row_bytes=st.integers(1, 1_152),
    index_row_bytes=st.integers(0, 256),
)


@given(geometry=GEOMETRIES, group_bytes=st.integers(0, 1 << 21))
def test_groups_are_a_range_each_and_cover_the_page(geometry: Geometry, group_bytes: int) -> None:
    """Rows of a group's layers lie within its range, index keys in the last one's; I8: a bounded number."""
    groups = LayerGroups.of(geometry, group_bytes)
    assert 1 <= groups.count <= min(PARTS_MAX, geometry.layers)
    assert groups.ends[-1] == geometry.layers
    begins = (0, *groups.byte_ends)
    assert begins[-1] == geometry.page_bytes
    assert all(first < second for first, second in pairwise(begins))
    for group in range(groups.count):
        for layer in groups.layers(group):
            first = layer * PAGE_TOKENS * geometry.row_bytes
            assert begins[group] <= first
            assert first + PAGE_TOKENS * geometry.row_bytes <= begins[group + 1]
    assert begins[-2] <= geometry.index_offset(0)
    written = [groups.ending_with(layer) for layer in range(geometry.layers)]
    assert [group for group in written if group is not None] == list(range(groups.count))


@pytest.mark.parametrize(("geometry", "count", "share"), [(BF16, 5, 0.21), (FP8, 2, 0.51)])
def test_groups_of_a_mebibyte_leave_an_equal_last_share(geometry: Geometry, count: int, share: float) -> None:
    groups = LayerGroups.of(geometry, 1 << 20)
    assert groups.count == count
    assert max(stop - start for start, stop in pairwise((0, *groups.byte_ends))) <= share * geometry.page_bytes


@pytest.mark.parametrize("group_bytes", [0, BF16.page_bytes, 1 << 40])
def test_small_pages_travel_whole(group_bytes: int) -> None:
    groups = LayerGroups.of(BF16, group_bytes)
    assert (groups.ends, groups.byte_ends) == ((61,), (BF16.page_bytes,))


@given(
    tokens=st.integers(1, 5 * PAGE_TOKENS),
    chunk=st.integers(1, 2 * PAGE_TOKENS),
    parts=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
)
def test_each_part_is_sent_once_after_its_rows(tokens: int, chunk: int, parts: int, order: object) -> None:
    """A part waits for its rows alone, whichever part is staged first."""
    out = Outgoing(1, tokens, parts)
    staged = [0] * parts
    sent: list[tuple[int, int]] = []
    while min(staged) < tokens:
        part = order.choice([part for part in range(parts) if staged[part] < tokens])  # type: ignore[attr-defined]
        staged[part] = min(staged[part] + chunk, tokens)
        for index in out.take_ready(staged[part], part):
            assert staged[part] >= min((index + 1) * PAGE_TOKENS, tokens)
            sent.append((index, part))
    assert sorted(sent) == [(index, part) for index in range(pages_for(tokens)) for part in range(parts)]
