"""Decoding of a frame into a message, with a ProtocolError that gives the reason of a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from protocol.errors import ProtocolError
from protocol.messages import PROTOCOL_VERSION

M = TypeVar("M")

#: Tags of the first message of either end in any version, lower case, without underscores. The element behind the tag
#: is the protocol version.
HELLO_TAGS: Final = {"hello", "workerhello", "welcome", "workerwelcome"}

#: What decoding raises. DecodeError and UnicodeDecodeError are ValueErrors.
UNREADABLE: Final = (ValueError, RecursionError)


def read_frame(decode: Callable[[bytes], M], frame: bytes, bytes_max: int, sender: str) -> M:
    """Decode `frame`. Raises ProtocolError when it is too large or no message that `sender` may send.

    msgspec raises UnicodeDecodeError for text that is not UTF-8, RecursionError for deep nesting, and DecodeError
    otherwise.
    """
    if len(frame) > bytes_max:
        raise ProtocolError(
            f"a {sender} may send at most {bytes_max} bytes",
            field="message",
            value=f"{len(frame)} bytes",
            remedy="send a shorter prompt or fewer ids",
        )
    try:
        return decode(frame)
    except UNREADABLE as error:
        if (version := _other_version(frame)) is not None:
            raise ProtocolError(
                f"the {sender} speaks protocol {version}, this end {PROTOCOL_VERSION}",
                field="protocol",
                value=version,
                remedy="install the same hisparse version on both ends",
            ) from error
        raise ProtocolError(
            f"not a message of a {sender}: {error}",
            field="message",
            value=f"{len(frame)} bytes",
            remedy=f"speak protocol {PROTOCOL_VERSION}, on the socket of your role",
        ) from error


def _other_version(frame: bytes) -> int | None:
    """The protocol version in a hello of another version; None: not a hello, or of this version."""
    try:
        tag, version, *_ = msgspec.msgpack.decode(frame, type=list[object])
    except UNREADABLE:
        return None
    if not isinstance(tag, str) or tag.replace("_", "").lower() not in HELLO_TAGS or not isinstance(version, int):
        return None
    return None if version == PROTOCOL_VERSION else version
