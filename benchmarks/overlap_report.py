"""The table of a decode benchmark that ran in two forms of the program, on one machine. Pure."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.decode_report import find, table

FORMS: Final = ("in line", "beside")
COLUMNS: Final = (
    *("requests", "overlap", "step, in line", "beside", "change"),
    *("swap, in line", "beside", "products, in line", "beside"),
    *("of copies skipped, in line", "beside"),
)


def section(result: dict[str, Any]) -> str:
    """`result` has the result of benchmarks.decode of each form."""
    line, beside = (result["runs"][form] for form in FORMS)
    at = beside["machine"]
    pairs = [(row, other) for row in line["rows"] for other in beside["rows"] if _same(row, other)]
    return (
        f"Command: `{at['command']}`. Machine: {at['gpu']}, driver and PCIe {at['driver_pcie']}, torch {at['torch']}, "
        f"Python {at['python']}. {beside['setting']['layers']} layers.\n\n"
        f"{table(COLUMNS, (_line(line['rows'], beside['rows'], *pair) for pair in pairs))}\n"
    )


def _same(row: dict[str, Any], other: dict[str, Any]) -> bool:
    keys = ("context", "mode", "concurrency", "overlap")
    return row["mode"] == "hisparse" and all(row[key] == other[key] for key in keys)


def _line(
    rows: list[dict[str, Any]], others: list[dict[str, Any]], row: dict[str, Any], other: dict[str, Any]
) -> tuple[str, ...]:
    change = other["step_ms"] / row["step_ms"] - 1
    kinds = [f"{of['parts_ms'][kind]:.2f}" for kind in ("swap", "products") for of in (row, other)]
    shares = (_of_uncopied(rows, row), _of_uncopied(others, other))
    steps = (f"{row['step_ms']:.3f}", f"{other['step_ms']:.3f}", f"{change:+.1%}")
    return (str(row["concurrency"]), f"{row['overlap']:.2f}", *steps, *kinds, *shares)


def _of_uncopied(rows: list[dict[str, Any]], row: dict[str, Any]) -> str:
    """Tokens per second over those of the same batch whose copies are skipped, where that was measured."""
    same = {key: row[key] for key in ("context", "concurrency", "overlap")}
    bare = find(rows, mode="uncopied", **same)
    return f"{row['tokens_per_s'] / bare['tokens_per_s']:.1%}" if bare else ""
