"""Memory sizes as text: "256MiB", "auto"."""

from __future__ import annotations

import re
from typing import Final

from protocol.errors import ConfigError

#: In place of a size or a dtype: the worker chooses it.
AUTO: Final = "auto"
SIZE_UNITS: Final = {"": 1, "B": 1} | {
    name: scale**power
    for power, letter in enumerate("KMGT", start=1)
    for name, scale in ((f"{letter}iB", 1024), (f"{letter}B", 1000), (letter, 1024))
}


def parse_size(text: str, field: str) -> int:
    """Bytes of "256MiB", "1.5 GiB", "1GB" (1000-based) or "4096". Raises ConfigError naming `field`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = SIZE_UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise ConfigError("not a size", field=field, value=text, remedy="write a number and KiB, MiB, GiB or TiB")
    return int(float(match[1]) * unit)
