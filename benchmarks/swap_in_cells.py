"""The cells of benchmarks.swap_in: which there are, what each is compared with, and what comes of that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from benchmarks.plots import Row, Series, marks

MISSES: Final = (0, 20, 102, 410)

# (row bytes, hot slots, batch): per MISSES, us on one H200: SGLang 0.5.23, and a throw-away prototype without slot
# indirection, size classes or duplicates.
PEERS: Final = {
    (656, 4096, 1): ((9.8, 2.7), (16.6, 4.7), (27.6, 5.3), (58.1, 9.6)),
    (656, 4096, 4): ((10, 2.8), (17.6, 5.7), (29.9, 10.9), (66, 26.2)),
    (656, 4096, 16): ((10.1, 3.1), (19.9, 8.4), (40.4, 26.2), (112, 93.2)),
    (656, 4096, 64): ((10.3, 2.9), (33.2, 28.8), (111, 107.6), (390, 374)),
    (656, 4096, 128): ((11.6, 3.8), (52.2, 39.6), (202, 186), (759, 732)),
    (656, 8192, 1): ((15.2, 3.0), (23.3, 5.8), (34.6, 6.3), (65.6, 9.6)),
    (656, 8192, 16): ((15.6, 3.5), (26.1, 8.8), (47.5, 26.6), (120, 93.6)),
    (656, 8192, 128): ((16.8, 4.7), (58.5, 39.7), (209, 186), (772, 732)),
    (1152, 4096, 1): ((10, 2.7), (16.9, 4.7), (27.9, 6.2), (59.6, 14.5)),
    (1152, 4096, 16): ((10.2, 3.0), (22.1, 11.3), (54.3, 41), (169, 153)),
    (1152, 4096, 128): ((11.4, 3.8), (73.1, 62.7), (322, 304), (1214, 1190)),
}
EXTRA: Final = (
    (656, 4096, 8),
    (656, 4096, 12),
    (656, 4096, 24),
    (656, 4096, 32),
    (640, 4096, 16),
    (584, 4096, 16),
    (656, 16384, 16),
    (656, 32768, 16),
    (656, 32768, 1),
    (656, 4096, 256),
    # A.X-K2-Light in fp8, the same padded to words of 16 bytes, and in bfloat16
    *((row_bytes, 4096, batch) for row_bytes in (196, 208, 320) for batch in (1, 16, 128)),
    *((352, 4096, batch) for batch in (1, 4, 16, 64, 128)),  # fp4
)
OVERLAPPED: Final = "overlapped_"  # begins the names of a cell's figures of launches that overlap
#: Key of a cell's figure by the series that shows it.
SERIES: Final = {
    Series("swap_in", "#1668b8", "dot"): "us",
    Series("overlapped", "#e08a00", "ring"): f"{OVERLAPPED}us",
    Series("SGLang", "#c0392b", "ring"): "sglang_us",
    Series("target", "#444444", "tick"): "target_us",
    Series("floor", "#2e8b57", "cross"): "floor_us",
}


def peers(row_bytes: int, hot: int, batch: int, misses: int) -> dict[str, float]:
    known = PEERS.get((row_bytes, hot, batch))
    if known is None or misses not in MISSES:
        return {}
    sglang, prototype = known[MISSES.index(misses)]
    return {"sglang_us": sglang, "prototype_us": prototype, "target_us": prototype + max(0.1 * prototype, 1.0)}


def verdict(cell: Mapping[str, Any], way: str = "") -> str:
    """met, over (the target), or slower (than SGLang); empty without figures to compare, or to compare with.

    `way`: launches that do not overlap, or OVERLAPPED ones.
    """
    us = cell.get(f"{way}us")
    if us is None or "target_us" not in cell:
        return ""
    if us > cell["sglang_us"]:
        return "slower"
    return "met" if us <= cell["target_us"] else "over"


def verdicts(cell: Mapping[str, Any]) -> str:
    """The verdict on launches that do not overlap; a star marks one that holds for overlapped launches alone.

    met* stands by itself: what the others miss is seen from there being a star.
    """
    alone, overlapped = verdict(cell), verdict(cell, OVERLAPPED)
    if overlapped in ("", alone):
        return alone
    return "met*" if overlapped == "met" else f"{alone}, {overlapped}*"


def summary(result: Mapping[str, Any]) -> str:
    """How many cells that have figures to compare with meet them, without overlap and with it."""
    cells = result["rows"]
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


def plot(cells: list[dict[str, Any]]) -> str:
    rows = [
        Row(
            f"{cell['row_bytes']} B, H {cell['hot_slots']}, batch {cell['batch']}, m {cell['misses']}",
            {series.name: cell[key] for series, key in SERIES.items() if key in cell},
        )
        for cell in cells
    ]
    drawn = [series for series in SERIES if any(series.name in row.values for row in rows)]
    return marks("swap_in: one launch", "µs", drawn, rows)
