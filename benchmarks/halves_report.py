"""The table of `benchmarks.decode --halves`: whole steps beside steps in halves, which took turns in one run. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any, Final

from benchmarks.decode_report import find, table

#: A mode of whole steps and the same with steps in halves.
PAIRS: Final = {"hisparse": ("hisparse", "halves"), "resident": ("resident", "resident halves")}
KINDS: Final = ("swap", "attention", "products")
COLUMNS: Final = (
    *("context", "mode", "requests", "overlap", "rounds", "step, whole", "in halves", "change"),
    *("exposed load, whole", "in halves"),
    *(f"{kind}, {form}" for kind in KINDS for form in ("whole", "in halves")),
)

Rows = list[dict[str, Any]]


def section(result: dict[str, Any]) -> str:
    """ms. `exposed load`: a step less one of the same batch whose copies are skipped. Spread over the rounds."""
    at, setting = result["machine"], result["setting"]
    return (
        f"Command: `{at['command']}`. Machine: {at['gpu']}, driver and PCIe {at['driver_pcie']}, torch {at['torch']}, "
        f"Python {at['python']}. {setting['layers']} layers, {setting['kv_dtype']} rows; the second "
        f"half's swap_in has {setting['sparing_ranks']} thread blocks a request.\n\n"
        f"{table(COLUMNS, _lines(result['rows']))}\n"
    )


def _lines(rows: Rows) -> Iterator[tuple[str, ...]]:
    for mode, (whole, halves) in PAIRS.items():
        keys = ("context", "concurrency", "overlap")
        same = dict.fromkeys(tuple(row[key] for key in keys) for row in rows if row["mode"] == whole)
        for cell in same:
            at = dict(zip(keys, cell, strict=True))
            forms = [
                [row for row in rows if row["mode"] == form and at.items() <= row.items()] for form in (whole, halves)
            ]
            if all(forms):
                yield _line(mode, at, forms, find(rows, mode="uncopied", **at))


def _line(mode: str, at: dict[str, Any], forms: list[Rows], bare: dict[str, Any] | None) -> tuple[str, ...]:
    steps = [median(row["step_ms"] for row in form) for form in forms]
    exposed = [f"{step - bare['step_ms']:.3f}" if bare else "" for step in steps]
    kinds = [f"{median(row['parts_ms'][kind] for row in form):.2f}" for kind in KINDS for form in forms]
    rounds = min(len(form) for form in forms)
    place = (f"{at['context']:,}", mode, str(at["concurrency"]), f"{at['overlap']:.2f}", str(rounds))
    return (*place, *(_spread(form) for form in forms), f"{steps[1] / steps[0] - 1:+.1%}", *exposed, *kinds)


def _spread(form: Rows) -> str:
    found = [row["step_ms"] for row in form]
    return f"{median(found):.3f} ({min(found):.3f}–{max(found):.3f})"
