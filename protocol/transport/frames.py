"""From a frame to a message, or to the ProtocolError that says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from protocol.errors import ProtocolError
from protocol.messages import PROTOCOL_VERSION

M = TypeVar("M")

#: The first message of either end, as any version has tagged it; the second element is its protocol version.
HELLO_TAGS: Final = {"hello", "workerhello", "welcome", "workerwelcome"}


def read_frame(decode: Callable[[bytes], M], frame: bytes, bytes_max: int, sender: str) -> M:
    """What `decode` makes of `frame`. Raises ProtocolError when it is too large or nothing that `sender` may say.

    msgspec reports most of what is wrong as DecodeError, and text that is not UTF-8 as UnicodeDecodeError: both are
    ValueErrors.
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
    except ValueError as error:
        if (version := _other_version(frame)) is not None:
            raise ProtocolError(
                f"the {sender} speaks protocol {version}, this end {PROTOCOL_VERSION}",
                field="protocol",
                value=version,
                remedy="install the same hisparse version on both ends",
            ) from error
        raise ProtocolError(
            f"no message of a {sender}: {error}",
            field="message",
            value=f"{len(frame)} bytes",
            remedy=f"speak protocol {PROTOCOL_VERSION}, on the socket of your role",
        ) from error


def _other_version(frame: bytes) -> int | None:
    """The protocol version of a hello that another version wrote; None: not a hello, or of this version."""
    try:
        tag, version, *_ = msgspec.msgpack.decode(frame, type=list[object])
    except ValueError:
        return None
    if not isinstance(tag, str) or tag.replace("_", "").lower() not in HELLO_TAGS or not isinstance(version, int):
        return None
    return None if version == PROTOCOL_VERSION else version
