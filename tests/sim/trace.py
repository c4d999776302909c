"""What happened in one run, in order: kept whole, printed late.

Entries hold what they were given and become text only when they are read, so that a run costs one
tuple for each. Texts name no address, no wall clock and no hash order: two processes that run one seed print the
same lines, and their digests are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import msgspec

from protocol import messages

#: Lines shown of a run that failed.
TAIL_LINES: Final = 200
#: Longest text of one value.
VALUE_CHARS_MAX: Final = 160


#: Fields that are dated by the machine's clock.
WALL_CLOCK: Final = frozenset({"at_s"})
#: How frames are read again, by direction and socket.
DECODERS: Final[dict[str, Callable[[bytes], msgspec.Struct]]] = {
    "> client": messages.decode_client,
    "> admin": messages.decode_admin,
    "< client": messages.decode_gateway,
    "< admin": messages.decode_gateway,
    "> worker": messages.decode_worker,
    "< worker": messages.decode_coordinator,
}


class Violation(Exception):
    """An invariant does not hold, or a request's output is wrong. `invariant` is I1 to I8 or "output"."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


class RequestEntry(NamedTuple):
    at: float
    who: str
    what: str
    detail: object


class Trace:
    """`clock` dates entries; it is read once the run has begun."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.entries: list[RequestEntry] = []

    def note(self, who: str, what: str, detail: object = "") -> None:
        """`detail` must not change afterwards: text, number, or a frozen message."""
        self.entries.append(RequestEntry(self._clock(), who, what, detail))

    def lines(self, last: int | None = None) -> Iterator[str]:
        for entry in self.entries if last is None else self.entries[-last:]:
            yield f"{entry.at:10.4f} {entry.who:<12} {entry.what:<12} {_text(entry)}".rstrip()

    def digest(self) -> str:
        whole = hashlib.sha256()
        for line in self.lines():
            whole.update(line.encode() + b"\n")
        return whole.hexdigest()


def _text(entry: RequestEntry) -> str:
    if isinstance(entry.detail, bytes):
        return _struct(DECODERS[entry.what](entry.detail))
    return _struct(entry.detail) if isinstance(entry.detail, msgspec.Struct) else str(entry.detail)


def _struct(struct: msgspec.Struct) -> str:
    fields = {name: value for name, value in msgspec.structs.asdict(struct).items() if name not in WALL_CLOCK}
    return f"{type(struct).__name__}({', '.join(f'{name}={_value(value)}' for name, value in fields.items())})"


def _value(value: object) -> str:
    """Arrays as their length, structs by their fields, the rest as it is, all of it short."""
    if isinstance(value, bytes):
        return f"<{len(value)}>" if len(value) > 16 else value.hex() or "''"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"[:VALUE_CHARS_MAX]
    if isinstance(value, msgspec.Struct):
        return _struct(value)[:VALUE_CHARS_MAX]
    return str(value)[:VALUE_CHARS_MAX]
