"""The writer of all tables in TABLES.md: a cell holds one figure, with its spread, and one limit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Read = str | Callable[[Row], Any]  # a key of the row, or a function of the row; None leaves the cell empty

MEAN_OFF = 0.05  # a mean that differs from the median by more is shown


class Column(NamedTuple):
    """One figure of each row. `form`: a format specification; `limit`: shown behind the figure, in the same form."""

    header: str
    read: Read
    form: str = ""
    unit: str = ""
    limit: Read | None = None
    spread: tuple[Read, Read] | None = None

    def cell(self, row: Row) -> str:
        figure = _value(self.read, row)
        if figure is None:
            return ""
        text = format(figure, self.form)
        if self.spread:
            low, high = (format(_value(end, row), self.form) for end in self.spread)
            text += f" ({low}–{high})"
        limit = _value(self.limit, row) if self.limit else None
        return text if limit is None else f"{text} of {format(limit, self.form)}"


def table(columns: Iterable[Column], rows: Iterable[Row]) -> str:
    """A Markdown table; a column without any figure is left out."""
    listed = list(rows)
    shown = [(column, cells) for column in columns if any(cells := [column.cell(row) for row in listed])]
    heads = [f"{column.header}, {column.unit}" if column.unit else column.header for column, _ in shown]
    lines = [heads, ["---"] * len(heads), *zip(*(cells for _, cells in shown), strict=True)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def scaled(key: str, factor: float) -> Read:
    """The value of a key in a smaller or larger unit."""
    return lambda row: None if row.get(key) is None else factor * row[key]


def over(figure: str, limit: str) -> Read:
    """One value over another."""
    return lambda row: row[figure] / row[limit]


def of(*keys: str) -> Read:
    """A value within another."""
    return lambda row: reduce(getitem, keys, row)


def micros(header: str, way: str = "") -> Sequence[Column]:
    """Columns of a median in µs with its spread, and of a mean that differs from the median."""
    median = Column(header, f"{way}us", ".1f", spread=(f"{way}us_min", f"{way}us_max"))
    return median, Column(f"{header}, mean", lambda row: mean_off(row, way), ".1f")


def mean_off(row: Row, way: str = "") -> float | None:
    """The mean, where the median hides that some launches take longer or shorter."""
    median, mean = row.get(f"{way}us"), row.get(f"{way}mean_us")
    return mean if mean is not None and median is not None and abs(mean - median) > MEAN_OFF * median else None


def _value(read: Read, row: Row) -> Any:
    return row.get(read) if isinstance(read, str) else read(row)
