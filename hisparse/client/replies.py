"""Messages to and from the gateway: encoding, decoding, waiting for replies, and refusals as errors."""

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

#: Messages that a connection of role client may send.
CLIENT_MESSAGES: Final = get_args(messages.ClientMessage)
#: Errors of encoding or checking a message whose values the wire does not carry.
UNFIT: Final = (OverflowError, UnicodeEncodeError, TypeError, msgspec.ValidationError)
#: The reply to a call: a message, or the error that a Failure carried.
Reply: TypeAlias = GatewayMessage | HiSparseError


class Call(Generic[T]):
    """Waits for one reply. `read` turns the reply into the result as soon as it arrives."""

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
    """Encode and check `message`. The gateway refuses an unreadable one without its tag, which fails all calls.

    Raises NotAllowed for a command that `role` does not have, BadInput naming the field that does not fit.
    """
    if role != "admin" and not isinstance(message, CLIENT_MESSAGES):
        remedy = 'connect to the admin endpoint with role="admin"'
        raise NotAllowed(f"may not send {type(message).__name__}", field="role", value=role, remedy=remedy)
    try:
        data = messages.encode(message)
        messages.decode_admin(data)
    except UNFIT as error:
        name, value = next(_unfit(message), ("message", message))
        raise BadInput(
            f"cannot be sent: {error}", field=name, value=ascii(value), remedy="correct the value"
        ) from error
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
    """Ids as a tuple. Raises BadInput for a str in place of a list, whose letters would count as ids."""
    if isinstance(values, str):
        raise BadInput("one text, not a list of ids", field="ids", value=values, remedy=f"give [{values!r}]")
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
    """`reply` if it is of type `expected`. Raises `reply` if it is an error, otherwise ProtocolError."""
    if isinstance(reply, HiSparseError):
        raise reply
    if not isinstance(reply, expected):
        raise ProtocolError(f"expected {expected.__name__}", field="reply", value=type(reply).__name__)
    return reply
