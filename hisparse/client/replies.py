"""Messages to and from the gateway: encoding, decoding, waiting for replies, and refusals as errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Final, Generic, TypeAlias, TypeVar, get_args, get_origin

import msgspec
import outcome
import trio

from basics.request_checks import SEED_MAX
from protocol import messages
from protocol.errors import BY_CODE, BadInput, HiSparseError, InternalError, NotAllowed, ProtocolError
from protocol.messages import PRIORITY_MAX, GatewayMessage
from protocol.skew import read_frame

T = TypeVar("T")
M = TypeVar("M", bound=messages.Message)

#: Messages that a connection of role client may send.
CLIENT_MESSAGES: Final = get_args(messages.ClientMessage)
#: Errors of encoding or checking a message whose values the wire does not carry.
UNFIT: Final = (OverflowError, UnicodeEncodeError, TypeError, msgspec.ValidationError)
#: The integers of each field, and those of any field that the wire carries.
RANGES: Final = {"priority": (-PRIORITY_MAX, PRIORITY_MAX), "seed": (0, SEED_MAX)}
WIRE_RANGE: Final = (-(2**63), 2**64 - 1)
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
        if isinstance(self._result, outcome.Error):
            self._result.error.__traceback__ = None  # its frames refer to it
        self._arrived.set()

    async def wait(self) -> T:
        await self._arrived.wait()
        result, self._result = self._result, None
        assert result is not None
        try:
            return result.unwrap()
        finally:
            del result  # an error refers to this frame, which must not refer to it


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
        raise next(_unfit(message), InternalError(f"{type(message).__name__} cannot be encoded")) from error
    return data


def _unfit(message: msgspec.Struct) -> Iterator[BadInput]:
    """A refusal of each field whose value the wire does not carry."""
    for field in msgspec.structs.fields(message):
        value = getattr(message, field.name)
        if isinstance(value, msgspec.Struct) and type(value) is field.type:
            yield from _unfit(value)
            continue
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=field.type)
        except UNFIT as error:
            yield _refusal(field.name, field.type, value, error)


def _refusal(field: str, kind: Any, value: object, error: Exception) -> BadInput:
    """The encoder's own text is not told: it names positions on the wire, and changes with the library."""
    if isinstance(error, OverflowError):
        low, high = RANGES.get(field, WIRE_RANGE)
        text, remedy = f"must be {low} to {high}", "choose a value in that range"
    elif isinstance(error, UnicodeEncodeError):
        text, remedy = "holds half of a surrogate pair, which UTF-8 cannot encode", "give whole characters"
    elif get_origin(kind) is Annotated and isinstance(value, tuple) and len(value) > messages.NAMES_MAX:
        text, remedy = f"holds more than {messages.NAMES_MAX}", "send several commands"
        return BadInput(text, field=field, value=f"{len(value)} names", remedy=remedy)
    else:
        plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        expected = plain.__name__ if isinstance(plain, type) else str(plain)
        text, remedy = f"must be of the type {expected}", "give a value of that type"
    return BadInput(text, field=field, value=ascii(value), remedy=remedy)


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
