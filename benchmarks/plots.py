"""Plots as SVG text, without a library: values of several series per row, on a logarithmic axis.

A row is one case, a series one way of doing or bounding it. Axes begin and end at the data, rounded outwards to 1, 2
or 5 times a power of ten; a series without a value in a row leaves no mark there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

ROW, HEAD, FOOT, LABEL, WIDTH, MARGIN = 15, 48, 34, 190, 900, 20  # pixels
STEPS: Final = (1, 2, 5)
FONT: Final = "font-family='sans-serif' font-size='11'"


@dataclass(frozen=True)
class Series:
    """How one series is drawn. `shape`: dot, ring, tick or cross."""

    name: str
    colour: str
    shape: str


@dataclass(frozen=True)
class Row:
    """One case and its values by series name."""

    label: str
    values: Mapping[str, float]


def marks(title: str, unit: str, series: Sequence[Series], rows: Sequence[Row]) -> str:
    """An SVG document with a mark per row and series. Values must be above zero."""
    values = [value for row in rows for value in row.values.values()]
    low, high = _round(min(values), down=True), _round(max(values), down=False)
    span = math.log(high / low) or 1.0
    right = WIDTH - MARGIN

    def x(value: float) -> float:
        return LABEL + (right - LABEL) * math.log(value / low) / span

    height = HEAD + ROW * len(rows) + FOOT
    bottom = height - FOOT
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' {FONT}>",
        "<rect width='100%' height='100%' fill='white'/>",
        f"<text x='{MARGIN}' y='18' font-size='13' font-weight='bold'>{escape(title)}</text>",
    ]
    for place, one in enumerate(series):
        at = MARGIN + 6 + place * 170
        parts += [_mark(one, at, 34), f"<text x='{at + 10}' y='38'>{escape(one.name)}</text>"]
    for tick in _ticks(low, high):
        parts.append(f"<line x1='{x(tick):.1f}' y1='{HEAD}' x2='{x(tick):.1f}' y2='{bottom}' stroke='#ddd'/>")
        parts.append(f"<text x='{x(tick):.1f}' y='{bottom + 14}' text-anchor='middle'>{tick:g}</text>")
    parts.append(f"<text x='{right}' y='{bottom + 29}' text-anchor='end'>{escape(unit)}, logarithmic</text>")
    for place, row in enumerate(rows):
        y = HEAD + ROW * place + ROW / 2
        parts.append(f"<text x='{LABEL - 8}' y='{y + 4}' text-anchor='end'>{escape(row.label)}</text>")
        parts += [_mark(one, x(row.values[one.name]), y) for one in series if one.name in row.values]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _mark(series: Series, x: float, y: float) -> str:
    paint = f"stroke='{series.colour}' stroke-width='1.6'"
    match series.shape:
        case "dot":
            return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{series.colour}'/>"
        case "ring":
            return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='none' {paint}/>"
        case "tick":
            return f"<path d='M{x:.1f} {y - 6:.1f}v12' {paint}/>"
        case "cross":
            return f"<path d='M{x - 3:.1f} {y - 3:.1f}l6 6m0-6l-6 6' {paint}/>"
    raise ValueError(f"{series.shape}: no such shape")


def _round(value: float, *, down: bool) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    steps = [step * power for step in (*STEPS, 10)]
    return max(s for s in steps if s <= value * 1.0001) if down else min(s for s in steps if s >= value * 0.9999)


def _ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [s * 10.0**p for p in powers for s in STEPS if low * 0.999 <= s * 10.0**p <= high * 1.001]
