"""The table and the plot of swap_in, from results of its benchmark. Pure."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.plots import Row, Series, marks
from benchmarks.swap_in_cells import OVERLAPPED, spread, verdict, verdicts

SERIES: Final = (
    Series("swap_in", "#1668b8", "dot"),
    Series("overlapped", "#e08a00", "ring"),
    Series("SGLang", "#c0392b", "ring"),
    Series("target", "#444444", "tick"),
    Series("floor", "#2e8b57", "cross"),
)
COLUMNS: Final = (
    *("row B, hot", "batch × blocks", "m", "swap_in", "overlapped", "copy", "resolve", "null", "floor", "GB/s", "cold"),
    *("SGLang", "target", ""),
)
LARGE: Final = ("large pool", "its copy")


def head(*, is_large: bool) -> str:
    columns = (*COLUMNS[:-1], *(LARGE if is_large else ()), COLUMNS[-1])
    return f"| {' | '.join(columns[:-1])} | {columns[-1]}|\n|{'---|' * len(columns)}\n"


def line(cell: dict[str, Any], *, is_large: bool = False) -> str:
    """With columns of a large pool, empty where the cell was not measured there."""
    sglang = f"{cell['sglang_us']:g}" if "sglang_us" in cell else ""
    target = f"{cell['target_us']:.1f}" if "target_us" in cell else ""
    names = ("large_us", "large_copy_only_us") if is_large else ()
    large = "".join(f"{cell[name]:.1f} | " if name in cell else "| " for name in names)
    return (
        f"| {cell['row_bytes']}, {cell['hot_slots']} | {cell['batch']} × {cell['blocks']} | {cell['misses']} "
        f"| {spread(cell)} | {spread(cell, OVERLAPPED)} | {cell['copy_only_us']:.1f} "
        f"| {cell['resolve_us']:.1f} | {cell['null_us']:.1f} | {cell['floor_us']:.1f} | {cell['gb_per_s']:.1f} "
        f"| {cell['cold_us']:.1f} | {sglang} | {target} | {large}{verdicts(cell)} |\n"
    )


def summary(cells: list[dict[str, Any]]) -> str:
    """How many cells that have figures to compare with meet them, without overlap and with it."""
    alone, overlapped = ([verdict(cell, way) for cell in cells if verdict(cell, way)] for way in ("", OVERLAPPED))
    if not alone:
        return "No figures to compare these cells with."
    text = (
        f"Of {len(alone)} cells with figures to compare with, {_counts(alone)}: launches that do not overlap. "
        "Both conditions are: within target, not slower than SGLang. "
    )
    if not overlapped:
        return f"{text}Launches that overlap were not measured."
    return (
        f"{text}Of launches that overlap, each let begin while the one before is at work, {_counts(overlapped)}; "
        "a star marks a verdict that holds for them alone."
    )


def _counts(found: list[str]) -> str:
    met, over, slower = (found.count(said) for said in ("met", "over", "slower"))
    return f"{met} meet both conditions, {over} are over the target only, {slower} are slower than SGLang"


def section(result: dict[str, Any]) -> str:
    at, large = result["machine"], result.get("large")
    lines = (line(cell, is_large=large is not None) for cell in result["rows"])
    return (
        f"Command: `{at['command']}`. Machine: {at['gpu']}, driver and PCIe {at['driver_pcie']}, "
        f"torch {at['torch']}, Python {at['python']}; host rows scattered over {result['pool_gib']:g} GiB."
        f"{_large(large)}\n\n"
        f"{summary(result['rows'])}\n\n"
        f"{head(is_large=large is not None)}{''.join(lines)}\n"
    )


def _large(large: dict[str, Any] | None) -> str:
    if large is None:
        return ""
    return f" Large pool: {large['pool_gib']:g} GiB, one pass on {large['machine']['gpu']}."


def plot(cells: list[dict[str, Any]]) -> str:
    names = {
        "swap_in": "us",
        "overlapped": f"{OVERLAPPED}us",
        "SGLang": "sglang_us",
        "target": "target_us",
        "floor": "floor_us",
    }
    rows = [
        Row(
            f"{cell['row_bytes']} B, H {cell['hot_slots']}, batch {cell['batch']}, m {cell['misses']}",
            {name: cell[key] for name, key in names.items() if key in cell},
        )
        for cell in cells
    ]
    drawn = [series for series in SERIES if any(series.name in row.values for row in rows)]
    return marks("swap_in: one launch", "µs", drawn, rows)
