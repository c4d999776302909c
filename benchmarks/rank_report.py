"""The tables of one rank of a group, from results of its benchmarks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.decode_report import BESIDE_SLAB, beside_slab, find, table

COLUMNS = (
    *("context", "mode", "requests", "hits", "step, ms", "links, ms", "floor, ms", "of floor", "tokens/s a GPU"),
    "host memory, distinct of wanted",
)
RATIOS = ("context", "hits", "resident, most that fit", "HiSparse, most that fit", "ratio", "capacity")


def section(result: Mapping[str, Any]) -> str:
    at, setting, rows = result["machine"], result["setting"], result["rows"]
    rates, weights = setting["rates"], sum(setting["weights_bytes"].values())
    measured = [f"{name}: {ms:.1f}" for row in rows[:1] for name, ms in row["parts_ms"].items()]
    contexts, overlaps = (list(dict.fromkeys(row[name] for row in rows)) for name in ("context", "overlap"))
    floors = [f"{name} {ms:.1f}" for row in rows[:1] for name, ms in row["floor_parts_ms"].items()]
    return (
        f"Command: `{at['command']}`. Machine: {at['gpu']}, driver and PCIe {at['driver_pcie']}, torch {at['torch']}; "
        f"copy {rates['copy_bytes_per_us'] / 1e3:,.0f} GB/s, bfloat16 product "
        f"{rates['operations_per_us'] / 1e6:,.0f} TFLOP/s, one copy from the host "
        f"{rates['dma_bytes_per_us'] / 1e3:.1f} GB/s. {setting['layers']} layers, weights {weights / 1e9:.1f} GB, hot "
        f"buffers of {setting['hot_slots']} slots, {setting['kv_budget_bytes'] / 1e9:.1f} GB for KV.\n\n"
        f"{table(COLUMNS, map(_line, rows))}\n"
        "The most that fit, of tokens/s a GPU:\n\n"
        f"{table(RATIOS, (_ratio(rows, c, o) for c in contexts for o in overlaps))}\n"
        "Requests that fit beside a prefill slab for one prompt of that context, computed:\n\n"
        f"{table(BESIDE_SLAB, (beside_slab(result, c) for c in contexts))}\n"
        f"Of the first row, ms of kernels: {', '.join(measured)}. Floors: {', '.join(floors)}.\n"
    )


DRAFT_COLUMNS = (
    *("requests", "drafts", "step, ms", "links, ms", "of plain", "misses a request", "chance", "tokens a step"),
    *("tokens/s a GPU", "of plain", "expected", "distinct host pages"),
)
PARTS = ("swap", "index", "attention", "products", "busy")


def drafts(result: Mapping[str, Any]) -> str:
    """Steps with drafts by batch; kernels of steps, where they were listed; what a worker that chooses would give."""
    at, setting, rows = result["machine"], result["setting"], result["rows"]
    weights = sum(setting["weights_bytes"].values())
    head = (
        f"Command: `{at['command']}`. Machine: {at['gpu']}, driver and PCIe {at['driver_pcie']}, torch {at['torch']}. "
        f"{setting['layers']} layers and the draft layer, weights {weights / 1e9:.1f} GB, contexts of "
        f"{setting['context']:,} tokens, hot buffers of {setting['hot_slots']} slots, {setting['overlap']:.0%} of a "
        f"row's selection in that of the row before."
    )
    steps = table(DRAFT_COLUMNS, (line for row in rows for line in _draft_lines(row)))
    plain = {row["batch"]: row["parts_ms"] for row in rows if row["mode"] == "plain" and "parts_ms" in row}
    listed = [row for row in rows if "parts_ms" in row and row["batch"] in plain]
    of_parts = (
        (str(row["batch"]), _named(row), *(_part(row["parts_ms"], plain[row["batch"]], name) for name in PARTS))
        for row in listed
    )
    parts = table(("requests", "drafts", *(f"{name}, ms" for name in PARTS)), of_parts) if listed else ""
    auto = ((str(it["batch"]), f"{it['chance']:.2f}", f"{it['x1']:.3f} ×") for it in result["auto"])
    chosen = table(("requests", "chance", "tokens/s of auto, of plain"), auto) if result["auto"] else ""
    return "\n".join(part for part in (f"{head}\n", steps, parts, chosen) if part)


def drafts_line(row: Mapping[str, Any]) -> str:
    """A row for a terminal."""
    told = "  ".join(f"{chance}: {it['x1']:.2f}" for chance, it in row["chances"].items())
    return (
        f"batch {row['batch']:3} {_named(row):8} step {row['step_ms']:7.2f} ms ({row['step_min_ms']:.2f} to "
        f"{row['step_max_ms']:.2f}, {row['steps']}) + {row['links_ms']:.2f}  x{row['step_x1']:.2f}  "
        f"misses {row['misses']:5.1f}  tokens/s of plain by chance  {told}"
    )


def _named(row: Mapping[str, Any]) -> str:
    return {"plain": "plain", "auto": f"auto ({row['drafts']})"}.get(row["mode"], str(row["drafts"]))


def _draft_lines(row: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for chance, it in row["chances"].items():
        yield (
            str(row["batch"]),
            _named(row),
            f"{row['step_ms']:.1f} ({row['step_min_ms']:.1f}–{row['step_max_ms']:.1f})",
            f"{row['links_ms']:.1f}",
            f"{row['step_x1']:.2f} ×",
            f"{row['misses']:.0f}",
            chance if row["drafts"] else "",
            f"{it['tokens_per_step']:.2f}",
            f"{it['tokens_per_s']:,.0f}",
            f"{it['x1']:.2f} ×",
            f"{it['expected_x1']:.2f} ×",
            f"{row['distinct_gib']:.0f} of {row['wanted_gib']:.0f} GiB",
        )


def _part(parts: Mapping[str, float], plain: Mapping[str, float], name: str) -> str:
    return f"{parts[name]:.1f} ({parts[name] / plain[name]:.2f} ×)" if plain[name] else f"{parts[name]:.1f}"


def _ratio(rows: list[dict[str, Any]], context: int, overlap: float) -> tuple[str, ...] | None:
    """As of decode_report, of what a GPU of the group gives. None where the most that fit were not measured."""
    resident, most = (find(rows, context=context, mode=mode) for mode in ("resident", "hisparse"))
    ours = find(rows, context=context, mode="hisparse", overlap=overlap)
    if not (resident and most and ours) or ours["concurrency"] < most["concurrency"]:
        return None
    told = (f"{it['concurrency']}: {it['rank_tokens_per_s']:,.0f} tok/s" for it in (resident, ours))
    ratio = ours["rank_tokens_per_s"] / resident["rank_tokens_per_s"]
    capacity = ours["concurrency"] / resident["concurrency"]
    return f"{context:,}", f"{ours['hit_rate']:.3f}", *told, f"**{ratio:.2f}**", f"{capacity:.2f}"


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['context']:,}",
        row["mode"],
        str(row["concurrency"]),
        "" if row["hit_rate"] is None else f"{row['hit_rate']:.3f}",
        f"{row['step_ms']:.1f}",
        f"{row['link_ms']:.1f}",
        f"{row['floor_ms']:.1f}",
        f"{row['step_ms'] / row['floor_ms']:.2f}",
        f"{row['rank_tokens_per_s']:,.0f}",
        f"{row['distinct_gib']:.0f} of {row['wanted_gib']:.0f} GiB",
    )
