"""Names of a module that are imported from their homes when they are first used (PEP 562).

The module's imports for type checkers are the one list of these names, a line each: `from HOME import NAME as NAME`.
They are read from the module's source at the first use of a name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module


def attributes(module: str, *others: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for `module`; its `__all__` has `others` too."""

    @cache
    def homes() -> dict[str, str]:
        import linecache

        found = vars(sys.modules[module])
        lines = map(str.split, linecache.getlines(found["__file__"], found))
        return {words[5]: words[1] for words in lines if words[4:] and words[3:] == [words[3], "as", words[3]]}

    def get(name: str) -> object:
        value: object
        if name == "__all__":
            value = sorted((*homes(), *others))
        elif name in homes():
            value = getattr(import_module(homes()[name]), name)
        else:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        setattr(sys.modules[module], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[module]), *homes(), *others})

    return get, names
