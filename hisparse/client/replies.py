"""Messages to and from the gateway: written, read, matched to what was asked, and errors where they are refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, TypeAlias, TypeVar, get_args

import msgspec
import outcome
import trio

from protocol import messages
from protocol.errors import BY_CODE, BadInput, HiSparseError, InternalError, NotAllowed, ProtocolError
from protocol.messages import GatewayMessage
from protocol.transport.frames import read_frame

T = TypeVar("T")
M = TypeVar("M", bound=messages.Message)

#: What a connection of role client may say.
CLIENT_MESSAGES: Final = get_args(messages.ClientMessage)
#: What encoding or checking a message raises for what the wire does not carry.
UNFIT: Final = (OverflowError, UnicodeEncodeError, TypeError, msgspec.ValidationError)
#: What a call gets: a message, or the error that its Failure carried.
Reply: TypeAlias = GatewayMessage | HiSparseError


class Call(Generic[T]):
    """Waits for one reply. `read` turns it into the result in the very moment it arrives."""

    def __init__(self, read: Callable[[Reply], T]) -> None:
        self._read = read
        self._arrived = trio.Event()
        self._result: outcome.Outcome[T] | None = None

    def take(self, reply: Reply) -> None:
        self._result = outcome.capture(self._read, reply)
        self._arrived.set()

    async def wait(self) -> T:
        await self._arrived.wait()
        assert self._result is not None
        return self._result.unwrap()


def encode(message: messages.AdminMessage, role: str) -> bytes:
    """Checked as the gateway would, which hangs up on what it cannot read: that would cost every call in flight.

    Raises NotAllowed for a command that `role` does not have, BadInput naming the field that does not fit.
    """
    if role != "admin" and not isinstance(message, CLIENT_MESSAGES):
        remedy = 'connect to the admin endpoint with role="admin"'
        raise NotAllowed(f"has no {type(message).__name__}", field="role", value=role, remedy=remedy)
    try:
        data = messages.encode(message)
        messages.decode_admin(data)
    except UNFIT as error:
        name, value = next(_unfit(message), ("message", message))
        raise BadInput(f"cannot be sent: {error}", field=name, value=ascii(value), remedy="correct it") from error
    return data


def _unfit(message: msgspec.Struct) -> Iterator[tuple[str, object]]:
    for field in msgspec.structs.fields(message):
        value = getattr(message, field.name)
        if isinstance(value, msgspec.Struct):
            yield from _unfit(value)
            continue
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=field.type)
        except UNFIT:
            yield field.name, value


def ids(values: Sequence[str]) -> tuple[str, ...]:
    """Raises BadInput for a text in place of a list: each of its letters would be an id."""
    if isinstance(values, str):
        raise BadInput("one text, not a list of them", field="ids", value=values, remedy=f"give [{values!r}]")
    return tuple(values)


def decode(frame: bytes) -> GatewayMessage:
    message: GatewayMessage = read_frame(messages.decode_gateway, frame, sys.maxsize, "coordinator")
    return message


def error_of(failure: messages.Failure) -> HiSparseError:
    kind = BY_CODE.get(failure.code, InternalError)
    return kind(failure.message, field=failure.field, value=failure.value, remedy=failure.remedy)


def reply_of(message: GatewayMessage) -> Reply:
    return error_of(message) if isinstance(message, messages.Failure) else message


def expect(reply: Reply, expected: type[M]) -> M:
    """`reply` if it is what was asked for; raises the error that it is, or ProtocolError."""
    if isinstance(reply, HiSparseError):
        raise reply
    if not isinstance(reply, expected):
        raise ProtocolError(f"expected {expected.__name__}", field="reply", value=type(reply).__name__)
    return reply
