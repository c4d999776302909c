"""From a frame to a message, or to the ProtocolError that says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from protocol.errors import ProtocolError
from protocol.messages import PROTOCOL_VERSION

M = TypeVar("M")


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
        raise ProtocolError(
            f"no message of a {sender}: {error}",
            field="message",
            value=f"{len(frame)} bytes",
            remedy=f"speak protocol {PROTOCOL_VERSION}, on the socket of your role",
        ) from error
