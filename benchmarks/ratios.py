"""Figures that results of benchmarks.decode and benchmarks.rank give together: ratios, capacity, idle time. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmarks.plots import Row, Series, marks
from benchmarks.tables import Row as Cell
from kernels.layout import SLAB_LAYERS
from protocol.units import PAGE_TOKENS, pages_for

SERIES: Final = (
    Series("everything resident", "#c0392b", "ring"),
    Series("HiSparse", "#1668b8", "dot"),
    Series("copies skipped", "#444444", "tick"),
)
NAMES: Final = {"resident": SERIES[0].name, "hisparse": SERIES[1].name, "uncopied": SERIES[2].name}
PARTS: Final = ("products", "attention", "index", "swap", "backup", "other")
FEW_STEPS: Final = 40  # of a result that does not say how many: its p99 is the largest
PERCENTILE_STEPS_MIN: Final = 100


def find(rows: Sequence[Cell], **wanted: Any) -> Cell | None:
    """The row of most requests with the wanted values."""
    found = [row for row in rows if wanted.items() <= row.items()]
    return max(found, key=lambda row: int(row["concurrency"]), default=None)


def ratios(rows: Sequence[Cell], tokens: str = "tokens_per_s") -> Iterator[Cell]:
    """HiSparse over everything resident, by context and overlap, each with the most requests that fit.

    Overlaps that were not measured with the most requests are left out. While everything is resident the overlap has no
    meaning. `tokens` names the figure that is compared.
    """
    for context in dict.fromkeys(row["context"] for row in rows):
        for overlap in dict.fromkeys(row["overlap"] for row in rows):
            resident, most = (find(rows, context=context, mode=mode) for mode in ("resident", "hisparse"))
            ours = find(rows, context=context, mode="hisparse", overlap=overlap)
            bare = find(rows, context=context, mode="uncopied", overlap=overlap)
            if not (resident and most and ours) or ours["concurrency"] < most["concurrency"]:
                continue
            yield {
                **{"context": context, "overlap": overlap, "resident": resident, "ours": ours},
                "ratio": ours[tokens] / resident[tokens],
                "capacity": ours["concurrency"] / resident["concurrency"],
                "of_uncopied": ours[tokens] / bare[tokens] if bare else None,
            }


def beside_slab(result: Cell) -> Iterator[Cell]:
    """Requests that fit where the budget has a prefill slab too, of two layers of one prompt of each context.
    Computed."""
    setting, rows = result["setting"], result["rows"]
    for context in dict.fromkeys(row["context"] for row in rows):
        resident, ours = (find(rows, context=context, mode=mode) for mode in ("resident", "hisparse"))
        if resident and ours:
            slab_bytes = pages_for(context) * PAGE_TOKENS * setting["row_bytes"] * SLAB_LAYERS
            of_one = [row["kv_bytes"] / row["concurrency"] for row in (resident, ours)]
            fit = [int((setting["kv_budget_bytes"] - slab_bytes) // size) for size in of_one]
            yield {
                **{"context": context, "slab_bytes": slab_bytes, "resident": fit[0], "ours": fit[1]},
                "capacity": fit[1] / fit[0],
            }


def alone(rows: Sequence[Cell]) -> Iterator[Cell]:
    """Tokens a second of one request: the model with a page table, resident mode and a hot buffer."""
    for context in dict.fromkeys(row["context"] for row in rows):
        by_mode = {row["mode"]: row for row in rows if row["context"] == context and row["concurrency"] == 1}
        if {"plain", "resident", "hisparse"} <= by_mode.keys():
            plain, resident, ours = (by_mode[mode]["tokens_per_s"] for mode in ("plain", "resident", "hisparse"))
            yield {
                **{"context": context, "plain": plain, "resident": resident, "ours": ours},
                **{"resident_of": resident / plain, "ours_of": ours / plain},
            }


def steps(rows: Sequence[Cell]) -> Iterator[Cell]:
    """Rows whose kernels were listed, of one request and of the most that fit."""
    for row in rows:
        most = find(rows, context=row["context"], mode="resident" if row["mode"] == "resident" else "hisparse")
        if "parts_ms" in row and row["concurrency"] in (1, most["concurrency"] if most else 0):
            yield {**row, **row["parts_ms"], "idle_ms": idle_ms(row)}


def idle_ms(row: Cell) -> float:
    """Return what is left of a step, timed without profiler, when no kernel or copy runs.

    Results without "busy" have the sum over kinds alone, which counts what overlaps twice: idle is that much or more.
    """
    parts = row["parts_ms"]
    busy = parts["busy"] if "busy" in parts else sum(parts[part] for part in PARTS)
    return max(0.0, float(row["step_ms"] - busy))


def late_steps(row: Cell) -> int | None:
    """Number of steps behind a row's p99, where they are so few that the p99 is the largest."""
    count = int(row.get("steps", FEW_STEPS))
    return count if count < PERCENTILE_STEPS_MIN else None


def plot(rows: Sequence[Cell]) -> str:
    """Tokens per second of every concurrency at the first overlap."""
    first = rows[0]["overlap"]
    cases: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        if row["mode"] in NAMES and row["overlap"] == first:
            cases.setdefault((row["context"], row["concurrency"]), {})[NAMES[row["mode"]]] = row["tokens_per_s"]
    drawn = [Row(f"{context:,} tokens, {n} requests", values) for (context, n), values in sorted(cases.items())]
    return marks(f"Decode within one KV budget, overlap {first:g}", "tokens per second", SERIES, drawn)
