"""The tables and the plot of decode, from a result of its benchmark. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from benchmarks.plots import Row, Series, marks
from protocol.units import PAGE_TOKENS, pages_for

SERIES: Final = (
    Series("everything resident", "#c0392b", "ring"),
    Series("HiSparse", "#1668b8", "dot"),
    Series("copies skipped", "#444444", "tick"),
)
NAMES: Final = {"resident": SERIES[0].name, "hisparse": SERIES[1].name, "uncopied": SERIES[2].name}
RATIOS: Final = (
    "context",
    "overlap",
    "resident, most that fit",
    "HiSparse, most that fit",
    "ratio",
    "capacity",
    "hits",
    "of copies skipped",
    "p50, p99 ms (resident)",
    "p50, p99 ms (HiSparse)",
)
BESIDE_SLAB: Final = ("context", "slab, GB", "resident", "HiSparse", "capacity")
ALONE: Final = ("context", "page table alone", "resident", "of page table", "hot buffer", "of page table")
PARTS: Final = ("products", "attention", "index", "swap", "backup", "other")
FEW_STEPS: Final = 40  # of a result that does not say how many: its p99 is the largest


def table(columns: Sequence[str], lines: Iterable[Sequence[str] | None]) -> str:
    """A Markdown table of those lines that there are."""
    rows = [columns, ["---"] * len(columns), *filter(None, lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def find(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """The one of most requests."""
    found = [row for row in rows if wanted.items() <= row.items()]
    return max(found, key=lambda row: int(row["concurrency"]), default=None)


def ratio(rows: list[dict[str, Any]], context: int, overlap: float) -> tuple[str, ...] | None:
    """One context and overlap; None where a figure is missing. While all is resident, overlap means nothing."""
    resident = find(rows, context=context, mode="resident")
    ours = find(rows, context=context, mode="hisparse", overlap=overlap)
    bare = find(rows, context=context, mode="uncopied", overlap=overlap)
    if not (resident and ours and bare):
        return None
    return (
        f"{context:,}",
        f"{overlap:.2f}",
        f"{resident['concurrency']}: {resident['tokens_per_s']:,.0f} tok/s",
        f"{ours['concurrency']}: {ours['tokens_per_s']:,.0f} tok/s",
        f"**{ours['tokens_per_s'] / resident['tokens_per_s']:.2f}**",
        f"{ours['concurrency'] / resident['concurrency']:.2f}",
        f"{ours['hit_rate']:.3f}",
        f"{ours['tokens_per_s'] / bare['tokens_per_s']:.0%}",
        *(between_tokens(row) for row in (resident, ours)),
    )


def beside_slab(result: Mapping[str, Any], context: int) -> tuple[str, ...] | None:
    """Requests that fit where the budget has a prefill slab too, of one prompt of that context. Computed; None where a
    mode was not measured."""
    setting, rows = result["setting"], result["rows"]
    resident, ours = (find(rows, context=context, mode=mode) for mode in ("resident", "hisparse"))
    if not (resident and ours):
        return None
    slab_bytes = pages_for(context) * PAGE_TOKENS * setting["row_bytes"] * setting["layers"]
    of_one = [row["kv_bytes"] / row["concurrency"] for row in (resident, ours)]
    fit = [int((setting["kv_budget_bytes"] - slab_bytes) // size) for size in of_one]
    return f"{context:,}", f"{slab_bytes / 1e9:.2f}", *map(str, fit), f"{fit[1] / fit[0]:.2f}"


def between_tokens(row: dict[str, Any]) -> str:
    """Median and 99th percentile of the time between tokens, or the largest where steps are too few for that."""
    steps = row.get("steps", FEW_STEPS)
    most = f"{row['itl_p99_ms']:.2f}" if steps >= 100 else f"most of {steps} {row['itl_p99_ms']:.2f}"
    return f"{row['itl_p50_ms']:.2f}, {most}"


def idle_ms(row: dict[str, Any]) -> float:
    """What is left of a step, timed without profiler, when no kernel or copy runs.

    Results without "busy" have the sum over kinds alone, which counts what overlaps twice: idle is that much or more.
    """
    parts = row["parts_ms"]
    busy = parts["busy"] if "busy" in parts else sum(parts[part] for part in PARTS)
    return max(0.0, float(row["step_ms"] - busy))


def alone(rows: list[dict[str, Any]], context: int) -> tuple[str, ...] | None:
    """One request: what resident mode and a hot buffer cost against the model with a page table."""
    by_mode = {row["mode"]: row for row in rows if row["context"] == context and row["concurrency"] == 1}
    if not {"plain", "resident", "hisparse"} <= by_mode.keys():
        return None
    plain, resident, ours = (by_mode[mode]["tokens_per_s"] for mode in ("plain", "resident", "hisparse"))
    shares = (f"{plain:.1f}", f"{resident:.1f}", f"{resident / plain:.2f}", f"{ours:.1f}", f"{ours / plain:.2f}")
    return (f"{context:,}", *shares)


def parts(row: dict[str, Any]) -> tuple[str, ...]:
    what = (f"{row['context']:,}", row["mode"], str(row["concurrency"]), f"{row['overlap']:.2f}")
    return (*what, f"{row['step_ms']:.2f}", *(f"{row['parts_ms'][part]:.2f}" for part in PARTS), f"{idle_ms(row):.2f}")


def section(result: dict[str, Any]) -> str:
    rows, at, setting = result["rows"], result["machine"], result["setting"]
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    overlaps = list(dict.fromkeys(row["overlap"] for row in rows))
    most = {(c, mode): find(rows, context=c, mode=mode) for c in contexts for mode in ("resident", "hisparse")}
    told = [row for row in rows if row["concurrency"] in (1, _most(most, row)) and "parts_ms" in row]
    return (
        f"Command: `{at['command']}`. Machine: {at['gpu']}, driver and PCIe {at['driver_pcie']}, torch {at['torch']}, "
        f"Python {at['python']}. {setting['layers']} layers, {setting['kv_dtype']} rows of {setting['row_bytes']} B, "
        f"keys of {setting['index_row_bytes']} B, hot buffers of {setting['hot_slots']} slots, KV budget "
        f"{setting['kv_budget_bytes'] / 1e9:.2f} GB.\n\n"
        f"{table(RATIOS, (ratio(rows, c, o) for c in contexts for o in overlaps))}\n"
        "Requests that fit beside a prefill slab for one prompt of that context, computed: the slab takes the "
        "same share of both.\n\n"
        f"{table(BESIDE_SLAB, (beside_slab(result, c) for c in contexts))}\n"
        "One request, tokens per second:\n\n"
        f"{table(ALONE, (alone(rows, c) for c in contexts))}\n"
        "Where a step goes: ms of kernels by kind (streams overlap: they may exceed the step), and of none.\n\n"
        f"{table(('context', 'mode', 'requests', 'overlap', 'step', *PARTS, 'idle'), map(parts, told))}\n"
    )


def _most(most: dict[tuple[int, str], dict[str, Any] | None], row: dict[str, Any]) -> int:
    best = most[row["context"], "resident" if row["mode"] == "resident" else "hisparse"]
    return int(best["concurrency"]) if best else 0


def plot(rows: list[dict[str, Any]]) -> str:
    """Tokens per second of every concurrency at the first overlap."""
    first = rows[0]["overlap"]
    cases: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        if row["mode"] in NAMES and row["overlap"] == first:
            cases.setdefault((row["context"], row["concurrency"]), {})[NAMES[row["mode"]]] = row["tokens_per_s"]
    drawn = [Row(f"{context:,} tokens, {n} requests", values) for (context, n), values in sorted(cases.items())]
    return marks(f"Decode within one KV budget, overlap {first:g}", "tokens per second", SERIES, drawn)
