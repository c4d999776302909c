"""Messages to and from the gateway: written, read, matched to what was asked, and errors where they are refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Generic, TypeAlias, TypeVar

import msgspec
import outcome
import trio

from coordinator import messages
from coordinator.errors import BY_CODE, BadInput, HiSparseError, InternalError, ProtocolError
from coordinator.messages import GatewayMessage
from coordinator.transport.frames import read_frame

T = TypeVar("T")
M = TypeVar("M", bound=messages.Message)

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


def encode(message: messages.Message) -> bytes:
    """Raises BadInput naming the field that the wire cannot carry: a number beyond 64 bits, text that is no Unicode."""
    try:
        return messages.encode(message)
    except (OverflowError, UnicodeEncodeError) as error:
        name, value = next(_unfit(message))
        remedy = "choose a smaller number" if isinstance(value, int) else "leave out what is no UTF-8"
        raise BadInput("cannot be sent", field=name, value=ascii(value), remedy=remedy) from error


def _unfit(message: msgspec.Struct) -> Iterator[tuple[str, object]]:
    for name, value in msgspec.structs.asdict(message).items():
        if isinstance(value, msgspec.Struct):
            yield from _unfit(value)
            continue
        try:
            msgspec.msgpack.encode(value)
        except (OverflowError, UnicodeEncodeError):
            yield name, value


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
