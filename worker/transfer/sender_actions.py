"""What the sending end's core asks its shell and its engines to do. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from worker.transfer.interface import SenderEvent
from worker.transfer.wire import SenderMessage


@dataclass(frozen=True)
class SendToReceiver:
    """To the receiver at control address `peer`."""

    peer: str
    message: SenderMessage


@dataclass(frozen=True)
class Reach:
    """Connect to the control address of a receiver, whose CURVE key is `key`, unless it was done."""

    peer: str
    key: bytes


@dataclass(frozen=True)
class Leave:
    """Nothing was said to `peer` for long: close the connection to its control address."""

    peer: str


@dataclass(frozen=True)
class Connect:
    """Make ready to write through `endpoint` of `peer`; a Post that follows fails if it cannot be had."""

    peer: str
    endpoint: int
    engine: str
    blob: bytes


@dataclass(frozen=True)
class Disconnect:
    """Let go of an endpoint, whatever is in flight."""

    peer: str
    endpoint: int


@dataclass(frozen=True)
class Post:
    """Take the checksum of `length` bytes at `offset` of host page `source`, write them to the same place of host page
    `target`; `written` answers."""

    peer: str
    endpoint: int
    transfer_id: int
    unit: int
    attempt: int
    source: int
    target: int
    offset: int
    length: int


@dataclass(frozen=True)
class EmitSenderEvent:
    event: SenderEvent


Action: TypeAlias = SendToReceiver | Reach | Leave | Connect | Disconnect | Post | EmitSenderEvent
