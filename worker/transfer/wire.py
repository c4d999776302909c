"""What senders and receivers say to each other, over a ZMQ DEALER and ROUTER of their own. Pure.

    sender -> receiver    Begin, Written, Stopped
    receiver -> sender    Ready, Unknown, BeginRefused, Checked, Stop

A *unit* is one part of one page: `index * parts + part`. Anything may be lost or come twice: a sender repeats Begin and
Written, a receiver repeats Stop, until they are answered, and both answer what they have answered before.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from protocol.errors import ProtocolError
from protocol.skew import UNREADABLE
from worker.transfer.interface import Layout

#: Ready carries the transfer's pages, 4 bytes each, and the engine's blob.
CONTROL_BYTES_MAX: Final = 1 << 20


class _TransferMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of what crosses the control socket."""


class Begin(_TransferMessage, frozen=True, tag="begin"):
    """The first message of a transfer.

    `receiver_id` comes from the receiver's description; `part_ends` int64; `place` says to an engine that fetches where
    the sender's pages lie.
    """

    version: int
    receiver_id: int
    transfer_id: int
    pages: int
    layout: Layout
    part_ends: bytes
    place: bytes = b""


class Ready(_TransferMessage, frozen=True, tag="ready"):
    """Write to `pages` (int32) through `endpoint`, which `blob` describes to the engine. From here on writes land."""

    transfer_id: int
    pages: bytes
    endpoint: int
    blob: bytes


class Unknown(_TransferMessage, frozen=True, tag="unknown"):
    """The transfer is not open here, yet or any more: ask again."""

    transfer_id: int


class BeginRefused(_TransferMessage, frozen=True, tag="refused"):
    """The transfer will not be served; nothing was written for it."""

    transfer_id: int
    reason: str


class Written(_TransferMessage, frozen=True, tag="written"):
    """A unit with this xxh3-64 was written, or may be fetched from the sender's host page `source`. `attempt` counts
    from 1."""

    transfer_id: int
    unit: int
    attempt: int
    checksum: int
    source: int


class Checked(_TransferMessage, frozen=True, tag="checked"):
    """Whether the bytes of a unit have the checksum that came with `attempt`."""

    transfer_id: int
    unit: int
    attempt: int
    good: bool


class StopWriting(_TransferMessage, frozen=True, tag="stop"):
    """Post no more writes for the transfer; answer Stopped when none is in flight."""

    transfer_id: int
    reason: str


class Stopped(_TransferMessage, frozen=True, tag="stopped"):
    """No write for the transfer will be posted. `clean`: and each one that was has ended; else one may still land."""

    transfer_id: int
    clean: bool
    reason: str


SenderMessage: TypeAlias = Begin | Written | Stopped
ReceiverMessage: TypeAlias = Ready | Unknown | BeginRefused | Checked | StopWriting

_encoder = msgspec.msgpack.Encoder()
_from_sender: msgspec.msgpack.Decoder[SenderMessage] = msgspec.msgpack.Decoder(SenderMessage)
_from_receiver: msgspec.msgpack.Decoder[ReceiverMessage] = msgspec.msgpack.Decoder(ReceiverMessage)


def encode(message: SenderMessage | ReceiverMessage) -> bytes:
    return _encoder.encode(message)


def from_sender(data: bytes) -> SenderMessage:
    """Raises ProtocolError."""
    try:
        return _from_sender.decode(data)
    except UNREADABLE as error:
        raise ProtocolError(f"unreadable: {error}", field="transfer", value=f"{len(data)} bytes") from error


def from_receiver(data: bytes) -> ReceiverMessage:
    """Raises ProtocolError."""
    try:
        return _from_receiver.decode(data)
    except UNREADABLE as error:
        raise ProtocolError(f"unreadable: {error}", field="transfer", value=f"{len(data)} bytes") from error
