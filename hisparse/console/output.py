"""Rows on stdout: as a table, one JSON array, or one JSON object per line. Only tables import rich."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

    from hisparse.console.table import Column

Row = TypeVar("Row")
#: Width of what rich draws where there is no terminal.
PIPED_WIDTH: Final = 240


def emit(rows: Sequence[Row], columns: Sequence[Column[Row]], output: str) -> None:
    """Print `rows` (structs) as `output`: table, json or jsonl."""
    if output == "json":
        write_json([plain(row) for row in rows])
    elif output == "jsonl":
        for row in rows:
            write_json(plain(row))
    else:
        print_table(rows, columns)


def emit_one(value: object, output: str, lines: Iterable[str]) -> None:
    """Print `value` as JSON, or `lines` when `output` is table."""
    if output == "table":
        for line in lines:
            write_line(line)
    else:
        write_json(plain(value))


def plain(value: object) -> Any:
    """`value` as JSON types. msgspec would write wire structs as arrays (`array_like`); here they become objects."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(item) for name, item in msgspec.structs.asdict(value).items()}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def write_json(value: object) -> None:
    """Print `value` on a line, with escapes where stdout cannot take all characters."""
    takes_all = (sys.stdout.encoding or "").lower().startswith("utf")
    write_line(json.dumps(value, ensure_ascii=not takes_all))


def write_line(text: str) -> None:
    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """Print a line to stderr, for the user."""
    print(text, file=sys.stderr, flush=True)


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def print_table(rows: Sequence[Row], columns: Sequence[Column[Row]]) -> None:
    """Print as a table that fits the terminal; elsewhere all columns are whole, so that grep works."""
    from hisparse.console.table import table_lines

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table_lines(rows, columns, width):
        write_line(line)


# ---------------------------------------------------------------- cells


def size_text(size_bytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def share_text(part: float, whole: float) -> str:
    """1, 4 -> "25.0%"; a dash when `whole` is 0."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def rate_text(share: float | None) -> str:
    """0.25 -> "25.0%"; None -> a dash."""
    return "-" if share is None else f"{100 * share:.1f}%"


def times_text(count: int) -> str:
    """0 -> "never", 1 -> "once", 3 -> "3 times"."""
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def duration_text(duration_s: float) -> str:
    """75 -> "1m15s"."""
    if duration_s < 60:
        return f"{duration_s:.1f}s"
    minutes, seconds = divmod(int(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"


def hot_text(hot_slots: int) -> str:
    """Text of a hot size: resident, a number of slots, or a dash for none."""
    return {0: "resident", -1: "-"}.get(hot_slots, str(hot_slots))
