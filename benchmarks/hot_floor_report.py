"""The tables of the hot floor, from a result of its benchmark. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any, Final

from benchmarks.decode_report import table

#: Of the better of resident only and full admission.
TARGET: Final = 0.98
RATIOS: Final = (
    *("overlap", "auto", "its floor", "changed after, s", "full admission", "resident only"),
    *("of the better", "of resident only"),
)
ROWS: Final = ("cluster", "overlap", "tokens/s", "requests", "step, ms", "hits", "floor")


def section(result: Mapping[str, Any]) -> str:
    """What `auto` keeps in each phase, and all that was measured."""
    at, setting, rows = result["machine"], result["setting"], result["rows"]
    found = list(ratios(rows))
    kept = sum(it["of_best"] >= TARGET for it in found)
    retracted = result["clusters"].get("auto", {}).get("retractions", {}).get("throughput", 0)
    return (
        f"Command: `{at['command']}`. Machine: {at['gpu']}, driver and PCIe {at['driver_pcie']}, torch {at['torch']}, "
        f"Python {at['python']}. {setting['layers']} layers, {setting['kv_dtype']} rows, prompts of "
        f"{setting['context']:,} tokens and one, outputs of {setting['output_tokens']:,}, {setting['requests']} "
        f"requests in flight on {setting['seats']} seats, {setting['hot_chunks']:,} hot chunks and "
        f"{setting['index_pages']:,} index pages, {setting['kv_bytes'] / 1e9:.2f} GB.\n\n"
        f"{table(RATIOS, (_ratio(it, result['timeline']) for it in found))}\n"
        f"In {kept} of {len(found)} phases at least {TARGET:.0%} of the better; {retracted} requests were retracted "
        f"for throughput.\n\n"
        f"{table(ROWS, map(_row, rows))}\n"
    )


def ratios(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each phase of `auto` whose overlap the other two measured: tokens a second of all three, and over the better
    of the two."""
    for row in rows:
        others = [_tokens(rows, mode, row["overlap"]) for mode in ("smallest", "resident")]
        if row["mode"] == "auto" and all(others):
            auto, (smallest, resident) = row["tokens_per_s"], others
            yield {
                **{name: row[name] for name in ("phase", "overlap", "floor")},
                **{"auto": auto, "smallest": smallest, "resident": resident},
                **{"of_best": auto / max(smallest, resident), "of_resident": auto / resident},
            }


def changed_after(timeline: Sequence[Mapping[str, Any]], phase: int) -> list[float]:
    """Seconds from the begin of a phase to each second in which its floor was seen to have changed."""
    own = [it for it in timeline if it["phase"] == phase]
    before = [it for it in timeline if it["phase"] < phase][-1:]
    seen = [*before, *own]
    return [b["s"] - own[0]["s"] for a, b in pairwise(seen) if b["floor"] != a["floor"]]


def line(row: Mapping[str, Any]) -> str:
    """A row for a terminal."""
    hits = "" if row["hit_rate"] is None else f"  hits {row['hit_rate']:.3f}"
    return (
        f"{row['mode']:8} overlap {row['overlap']:.2f}  {row['tokens_per_s']:9.1f} tok/s  x{row['running']:<6.1f} "
        f"step {row['step_ms']:7.2f} ms  floor {_floor(row['floor'])}{hits}"
    )


def ratio_line(it: Mapping[str, Any]) -> str:
    """One of `ratios` for a terminal."""
    return f"phase {it['phase']}  overlap {it['overlap']:.2f}  auto {it['of_best']:.3f} of the better, " + (
        f"{it['of_resident']:.3f} of resident only  {'kept' if it['of_best'] >= TARGET else f'below {TARGET}'}"
    )


def _tokens(rows: Sequence[Mapping[str, Any]], mode: str, overlap: float) -> float:
    found = [row["tokens_per_s"] for row in rows if (row["mode"], row["overlap"]) == (mode, overlap)]
    return mean(found) if found else 0.0


def _floor(slots: int) -> str:
    return f"{slots} slots" if slots else "resident"


def _ratio(it: Mapping[str, Any], timeline: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return (
        f"{it['overlap']:.2f}",
        f"{it['auto']:,.0f}",
        _floor(it["floor"]),
        ", ".join(f"{seconds:.0f}" for seconds in changed_after(timeline, it["phase"])),
        f"{it['smallest']:,.0f}",
        f"{it['resident']:,.0f}",
        f"**{it['of_best']:.3f}**",
        f"{it['of_resident']:.3f}",
    )


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["mode"],
        f"{row['overlap']:.2f}",
        f"{row['tokens_per_s']:,.0f}",
        f"{row['running']:.1f}",
        f"{row['step_ms']:.2f}",
        "" if row["hit_rate"] is None else f"{row['hit_rate']:.3f}",
        _floor(row["floor"]),
    )
