"""Layouts that benchmarks.place compares: each has every row of every layer once, within the pool."""

from __future__ import annotations

import pytest
import torch

from benchmarks.place import LAYOUTS, TOGETHER, Cell, figures, pages_of, section_of, sections, with_ratios
from kernels.layout import Geometry
from protocol.units import PAGE_TOKENS

GEOMETRY = Geometry(3, 656, (0, 1, 2), 132, 8)


def begins(layout: str, pages: int, layer: int) -> torch.Tensor:
    """First byte of the rows of `layer` in each page."""
    first, stride = sections(GEOMETRY, layout, layer)
    return first + section_of(GEOMETRY, layout, pages, layer, torch.arange(pages)) * stride


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_has_every_section_once_within_the_pool(layout: str) -> None:
    pool_bytes = GEOMETRY.page_bytes * (2 * TOGETHER + 5)
    pages = pages_of(GEOMETRY, pool_bytes)
    assert pages == 2 * TOGETHER
    ordered = torch.cat([begins(layout, pages, layer) for layer in range(GEOMETRY.layers)]).sort().values
    section = PAGE_TOKENS * GEOMETRY.row_bytes
    assert bool((ordered.diff() >= section).all()), "no two overlap"
    assert ordered[0] >= 0
    assert ordered[-1] + section <= pool_bytes


def test_layouts_differ_in_what_lies_beside_a_section() -> None:
    pages, section = 2 * TOGETHER, PAGE_TOKENS * GEOMETRY.row_bytes
    steps = {layout: begins(layout, pages, 1).diff().tolist() for layout in LAYOUTS}
    assert set(steps["page"]) == {GEOMETRY.page_bytes}
    assert set(steps["layer"]) == {section}
    assert steps["run"].count(section) == pages - 2, "but for one step from run to run"


def test_rates_are_compared_within_pool_rows_and_load() -> None:
    rows = [
        figures(Cell(12, 656, "128k x 20", layout), times)
        for layout, times in (("page", [20.0, 10.0, 40.0]), ("layer", [10.0]))
    ]
    rows += [figures(Cell(1, 656, "128k x 20", "page"), [5.0])]
    assert (rows[0]["us"], rows[0]["us_min"], rows[0]["us_max"]) == (20.0, 10.0, 40.0)
    assert rows[1]["gb_per_s"] == pytest.approx(20 * 20 * 656 / 10.0 / 1000)
    assert [row["of_page"] for row in with_ratios(rows)] == [1.0, 2.0, 1.0]
