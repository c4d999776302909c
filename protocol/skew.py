"""Frames, and two protocol versions in one cluster: how a frame is read, which peers a coordinator accepts, and what it
sends to the older ones. Pure.

    peer              coordinator
    N                 N              all messages as they are
    N - 1             N              accepted. The coordinator answers in N - 1, without fields that were added since
    N                 N - 1          refused by name by the coordinator, which changes nothing: it is upgraded first
    N - 2 or older    N              refused by name

What a version may change so that the one before is served: add a field with a default at the end of a struct, and add
a message that only a newer peer asks for. PROTOCOL_VERSION_MIN is then the version before, and NEWER_FIELDS has each
struct with new fields that a coordinator sends, as in {Ended: 2}.

Rejected: readers that ignore what they do not know, since a worker that skips part of a command would do something
else than was decided; a version for each message, since nothing is gained over one number for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec

from protocol.errors import ProtocolError
from protocol.messages import (
    PROTOCOL_VERSION,
    CoordinatorMessage,
    GatewayMessage,
    WorkerRow,
    WorkerRows,
    encode,
)

#: The oldest protocol version that a coordinator accepts: one minor version of hisparse back. Workers of 8 refuse what
#: their slab has no pages for, which a ledger of 9 does not count; no release spoke 8.
PROTOCOL_VERSION_MIN: Final[int] = 9
#: How many fields at the end of a struct PROTOCOL_VERSION_MIN does not have, of structs that a coordinator sends. None
#: of them contains another.
NEWER_FIELDS: Final[Mapping[type[msgspec.Struct], int]] = {WorkerRow: 1}
#: Messages of a coordinator that contain such a struct.
CHANGED: Final[frozenset[type[msgspec.Struct]]] = frozenset({WorkerRows})

assert PROTOCOL_VERSION - PROTOCOL_VERSION_MIN in (0, 1)  # no version between them, for which nothing is cut


def check_version(version: int) -> None:
    """Raises ProtocolError when a coordinator does not serve a peer of this protocol version."""
    serves_older = PROTOCOL_VERSION_MIN < PROTOCOL_VERSION
    if version > PROTOCOL_VERSION:
        remedy = "upgrade the coordinator first"
    elif version < PROTOCOL_VERSION_MIN:
        remedy = "install the hisparse of the coordinator" + ", or one minor version before it" * serves_older
    else:
        return
    raise ProtocolError(
        f"this coordinator speaks protocol {PROTOCOL_VERSION}"
        + f", and {PROTOCOL_VERSION_MIN} to older peers" * serves_older,
        field="protocol",
        value=version,
        remedy=remedy,
    )


def encode_for(message: GatewayMessage | CoordinatorMessage, version: int) -> bytes:
    """`message` as a peer of `version` reads it, which `check_version` has accepted."""
    if version == PROTOCOL_VERSION or type(message) not in CHANGED:
        return encode(message)
    return encode(_without_newer_fields(message))


def _without_newer_fields(value: object) -> object:
    if isinstance(value, tuple):
        return [_without_newer_fields(it) for it in value]
    if not isinstance(value, msgspec.Struct):
        return value
    if newer := NEWER_FIELDS.get(type(value)):  # in C: a list may have 10,000 rows
        return msgspec.to_builtins(value, builtin_types=(bytes,))[:-newer]
    names, tag = value.__struct_fields__, value.__struct_config__.tag
    elements = [_without_newer_fields(getattr(value, name)) for name in names]
    return elements if tag is None else [tag, *elements]


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
