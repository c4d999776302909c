"""Memory sizes as text: "256MiB", "auto". Pure."""

from __future__ import annotations

import re
from typing import Final

from protocol.errors import ConfigError

#: In place of a size or a dtype: the worker chooses it.
AUTO: Final = "auto"
#: By their names in lower case.
SIZE_UNITS: Final = {"": 1, "b": 1} | {
    name: scale**power
    for power, letter in enumerate("kmgt", start=1)
    for name, scale in ((f"{letter}ib", 1024), (f"{letter}b", 1000), (letter, 1024))
}

#: Of a size: more than any memory has bytes, and few enough to be computed with.
DIGITS_MAX: Final = 30


def parse_size(text: str, field: str, *, takes_auto: bool = False) -> int:
    """Bytes of "256MiB", "1.5 gib", "1GB" (1000-based) or "4096". Raises ConfigError naming `field`.

    `takes_auto`: the remedy names "auto" too, which the caller reads.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or len(match[1]) > DIGITS_MAX:
        remedy = "write a number and a unit: KiB, MiB, GiB, TiB, or KB, MB, GB, TB of 1000"
        remedy += f"; or {AUTO}" if takes_auto else ""
        raise ConfigError("not a size", field=field, value=text, remedy=remedy)
    return int(float(match[1]) * unit)
