"""The table of benchmarks.place, from its result. Pure."""

from __future__ import annotations

from itertools import groupby
from typing import Any, Final

from benchmarks.decode_report import table

#: What a layout must give over today's, for a pool of so many GiB at least, to be worth the change of the layout.
GAIN: Final = 1.3
LARGE_GIB: Final = 12
COLUMNS: Final = ("pool", "row B", "load", "page: µs", "GB/s", "run: µs", "of page", "layer: µs", "of page")


def section(result: dict[str, Any]) -> str:
    at, setting, rows = result["machine"], result["setting"], result["rows"]
    return (
        f"Command: `{at['command']}`. Machine: {at['gpu']}, driver and PCIe {at['driver_pcie']}, torch {at['torch']}, "
        f"Python {at['python']}. {setting['layers']} layers; the copy engine: {setting['dma_gb_per_s']:.1f} GB/s.\n\n"
        f"{table(COLUMNS, map(_line, _cells(rows)))}\n{verdict(rows)}\n"
    )


def verdict(rows: list[dict[str, Any]]) -> str:
    """How many cells of a large pool gain enough, layer-major."""
    large = [row for row in rows if row["layout"] == "layer" and row["pool_gib"] >= LARGE_GIB]
    gains = sum(row["of_page"] >= GAIN for row in large)
    return f"Pools of {LARGE_GIB} GiB or more: `layer` gives {GAIN} × `page` in {gains} of {len(large)} cells."


def _cells(rows: list[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """The rows of each pool, row size and load, by layout; rows of one follow one another."""
    parts = groupby(rows, key=lambda row: (row["pool_gib"], row["row_bytes"], row["load"]))
    return [{row["layout"]: row for row in of} for _, of in parts]


def _line(cell: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    page = cell["page"]
    others = (text for name in ("run", "layer") for text in (_spread(cell[name]), f"{cell[name]['of_page']:.2f}"))
    about = (f"{page['pool_gib']} GiB", str(page["row_bytes"]), page["load"])
    return (*about, _spread(page), f"{page['gb_per_s']:.1f}", *others)


def _spread(row: dict[str, Any]) -> str:
    return f"{row['us']:.1f} ({row['us_min']:.1f}–{row['us_max']:.1f})"
