"""Tables as lines of text that fit a width. Pure.

A table that is too wide first shortens the columns that may be shortened, down to their `least` width, and leaves out
the columns that may go, the greatest `goes` first. The others are never cut: a number without its last digits is a
wrong number, and an id must be good to copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from rich.cells import cell_len, set_cell_size

Row = TypeVar("Row")
CUT: Final = ".."


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column: its header, the text of a row's cell, and whether it is aligned right (`numeric`).

    `goes`: 0 for a column that is always shown; of the others the greatest is left out first. `least`: cells that it
    may be shortened to; 0: it is never shortened. `steady`: its least width while nothing is shortened, so that the
    columns of a screen stay where they are. `cuts_middle`: a text that is too long loses its middle, not its end.
    """

    header: str
    cell: Callable[[Row], str]
    numeric: bool = False
    goes: int = 0
    least: int = 0
    steady: int = 0
    cuts_middle: bool = False
    style: Callable[[Row], str] = lambda _: ""


@dataclass(frozen=True)
class TableLayout(Generic[Row]):
    """The columns that are shown with their widths, and the texts of their cells by row."""

    columns: tuple[Column[Row], ...]
    widths: tuple[int, ...]
    cells: tuple[tuple[str, ...], ...]


def lay_out(rows: Sequence[Row], columns: Sequence[Column[Row]], width: int | None, gap: int = 2) -> TableLayout[Row]:
    """`columns` of `rows` within `width` cells, None for any width; wider only when nothing more may go."""
    texts = [[clean(column.cell(row)) for row in rows] for column in columns]
    full = [
        max(column.steady, cell_len(column.header), *map(cell_len, cells), 0)
        for column, cells in zip(columns, texts, strict=True)
    ]
    least = [min(column.least or wide, wide) for column, wide in zip(columns, full, strict=True)]
    shown = list(range(len(columns)))

    def spare() -> int:
        """Cells that are left when each column has its least width."""
        assert width is not None
        return width - sum(least[at] for at in shown) - gap * (len(shown) - 1)

    widths = full
    if width is not None:
        while spare() < 0 and (may_go := [at for at in shown if columns[at].goes]):
            shown.remove(max(may_go, key=lambda at: columns[at].goes))
        left, widths = max(0, spare()), list(least)
        for at in shown:
            given = min(left, full[at] - least[at])
            widths[at], left = least[at] + given, left - given
    cells = tuple(tuple(texts[at][row] for at in shown) for row in range(len(rows)))
    return TableLayout(tuple(columns[at] for at in shown), tuple(widths[at] for at in shown), cells)


def table_lines(rows: Sequence[Row], columns: Sequence[Column[Row]], width: int | None) -> list[str]:
    """The header and a line for each row, without blanks at their ends."""
    layout = lay_out(rows, columns, width)
    headers = tuple(column.header for column in layout.columns)
    return [
        "  ".join(
            fit_cell(text, wide, right=column.numeric, middle=column.cuts_middle)
            for text, wide, column in zip(line, layout.widths, layout.columns, strict=True)
        ).rstrip()
        for line in (headers, *layout.cells)
    ]


def fit_cell(text: str, width: int, *, right: bool = False, middle: bool = False) -> str:
    """`text` in exactly `width` cells; one that is too long is cut, at its end or in its middle, and the cut shows."""
    if cell_len(text) > width:
        return _cut(text, width, middle=middle)
    padding = " " * (width - cell_len(text))
    return padding + text if right else text + padding


def _cut(text: str, width: int, *, middle: bool) -> str:
    left = width - len(CUT)
    if left < 2:
        return set_cell_size(text, width)
    head = left - left // 2 if middle else left
    tail = text[len(text) - (left - head) :]
    while cell_len(tail) > left - head:
        tail = tail[1:]
    return set_cell_size(set_cell_size(text, head) + CUT + tail, width)


def clean(text: str) -> str:
    """`text` with control characters replaced: names and reasons come from other users."""
    return "".join(c if c.isprintable() else "?" for c in text)
