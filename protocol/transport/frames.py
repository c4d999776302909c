"""Decoding of a frame into a message, with a ProtocolError that gives the reason of a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from protocol.errors import ProtocolError
from protocol.messages import PROTOCOL_VERSION

M = TypeVar("M")

#: Tags of the first message of either end in any version, lower case, without underscores. The element behind the tag
#: is the protocol version.
HELLO_TAGS: Final = {"hello", "workerhello", "welcome", "workerwelcome"}

#: What decoding raises. DecodeError and UnicodeDecodeError are ValueErrors.
UNREADABLE: Final = (ValueError, RecursionError)


def check_equal(version: int) -> None:
    """Raises ProtocolError for another protocol version than this one."""
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the other end speaks protocol {version}, this end {PROTOCOL_VERSION}",
            field="protocol",
            value=version,
            remedy="install the same hisparse version on both ends",
        )


def read_frame(
    decode: Callable[[bytes], M],
    frame: bytes,
    bytes_max: int,
    sender: str,
    check: Callable[[int], None] = check_equal,
) -> M:
    """Decode `frame`. Raises ProtocolError when it is too large or no message that `sender` may send: what `check`
    raises for the protocol version of a hello that cannot be decoded comes first.

    msgspec raises UnicodeDecodeError for text that is not UTF-8, RecursionError for deep nesting, and DecodeError
    otherwise.
    """
    check_size(len(frame), bytes_max, sender)
    try:
        return decode(frame)
    except UNREADABLE as error:
        if (version := _version_of_hello(frame)) is not None:
            check(version)
        raise ProtocolError(
            f"not a message of a {sender}: {error}",
            field="message",
            value=f"{len(frame)} bytes",
            remedy=f"speak protocol {PROTOCOL_VERSION}, on the socket of your role",
        ) from error


def check_size(frame_bytes: int, bytes_max: int, sender: str) -> None:
    """Raises ProtocolError when a frame of so many bytes is too large for `sender`."""
    if frame_bytes > bytes_max:
        raise ProtocolError(
            f"a {sender} may send at most {bytes_max} bytes",
            field="message",
            value=f"{frame_bytes} bytes",
            remedy="send a shorter prompt or fewer ids",
        )


def _version_of_hello(frame: bytes) -> int | None:
    """The protocol version in a hello of any version; None: not a hello.

    Looks at the first two elements alone: a peer chooses what comes behind them, and decoding 8 MiB of it to objects
    would take half a second.
    """
    try:
        tag, at = _text(frame, _array(frame))
        version = _integer(frame, at)
    except (IndexError, ValueError):
        return None
    return version if tag.replace("_", "").lower() in HELLO_TAGS else None


# ---------------------------------------------------------------- msgpack, as far as a hello begins


def _array(frame: bytes) -> int:
    """Where the first element of an array begins. Raises IndexError or ValueError."""
    match frame[0]:
        case first if 0x90 <= first <= 0x9F:
            return 1
        case 0xDC:
            return 3
        case 0xDD:
            return 5
    raise ValueError("no array")


def _text(frame: bytes, at: int) -> tuple[str, int]:
    """A text of at most 255 bytes, and where it ends. Raises IndexError or ValueError."""
    first = frame[at]
    if 0xA0 <= first <= 0xBF:
        start, size = at + 1, first & 0x1F
    elif first == 0xD9:
        start, size = at + 2, frame[at + 1]
    else:
        raise ValueError("no short text")
    return frame[start : start + size].decode(), start + size


def _integer(frame: bytes, at: int) -> int:
    """Raises IndexError or ValueError."""
    first = frame[at]
    if first < 0x80 or first >= 0xE0:
        return first if first < 0x80 else first - 0x100
    if not 0xCC <= first <= 0xD3:
        raise ValueError("no integer")
    size = 1 << (first & 3)
    data = frame[at + 1 : at + 1 + size]
    if len(data) < size:
        raise IndexError("cut off")
    return int.from_bytes(data, "big", signed=first >= 0xD0)
