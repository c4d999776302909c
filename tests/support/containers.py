"""Containers that grow with requests: lengths of all containers that objects of the product hold, by class."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import Any, Final
from weakref import WeakValueDictionary

from basics.rooms import ROOMS

#: What grows is at least so many longer with this many requests, connections or prompts more.
FEW: Final = 3
MANY: Final = 15
PRODUCT: Final = ("protocol.", "basics.", "metrics.", "coordinator.", "worker.", "hisparse.")
CONTAINERS: Final = dict | list | deque | set | frozenset | tuple | OrderedDict | WeakValueDictionary
LISTED: Final = {container for room in ROOMS for container in room.containers}


def lengths(*roots: object) -> Counter[str]:
    """Count what all containers reached from `roots` hold, by the class and the attribute that they belong to."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting: deque[Any] = deque(roots)
    while waiting:
        it = waiting.popleft()
        if id(it) in seen or not f"{type(it).__module__}.".startswith(PRODUCT):
            continue
        seen.add(id(it))
        for name, value in attributes(it):
            if isinstance(value, tuple) and not hasattr(value, "_fields"):
                waiting.extend(value)
            elif isinstance(value, CONTAINERS) and not isinstance(value, tuple):
                found[f"{type(it).__name__}.{name}"] += held(value, waiting)
            else:
                waiting.append(value)
    return found


def held(value: Any, waiting: deque[Any]) -> int:
    """Count the entries of a container and of those within it, whose other members are to be looked at."""
    members = [*value.values()] if isinstance(value, dict | WeakValueDictionary) else [*value]
    waiting.extend(members)
    return len(members) + sum(held(it, waiting) for it in members if isinstance(it, CONTAINERS))


def attributes(it: object) -> Iterator[tuple[str, Any]]:
    names = {*getattr(it, "__dict__", ())}
    for base in type(it).__mro__:
        names.update(slot for slot in getattr(base, "__slots__", ()) if isinstance(slot, str))
    names.update(getattr(it, "_fields", ()), getattr(it, "__struct_fields__", ()))
    return ((name, getattr(it, name)) for name in sorted(names) if hasattr(it, name))


def grown(before: Counter[str], after: Counter[str]) -> set[str]:
    """Return the containers that have an entry more for each of what came between the two looks."""
    return {name for name, count in after.items() if count - before[name] >= MANY - FEW}
