"""What the ranks of a group say to rank 0, and rank 0 to them, over the control connection. Pure.

Encryption: sockets.py. Unlike protocol/messages.py this never leaves a group, whose ranks run one
version: `Join` names it first, and rank 0 refuses any other.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

#: Longest message. Keys and values of the store are addresses, a few hundred bytes for each rank.
MESSAGE_BYTES_MAX: Final = 1 << 20


class _Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Standing(_Part, frozen=True):
    """How far a rank is. `launched` and `entered` count rounds, and exchanges on a CPU; `waits`: in one of them.

    `turns`: its decode loop turns, so that others may expect progress.
    """

    launched: int = -1
    entered: int = 0
    waits: bool = False
    turns: bool = False


class Join(_Part, frozen=True, tag="join"):
    """First message of a rank. `settings` must be equal on all ranks, name by name. `boot` tells machines apart."""

    version: str
    group: str
    rank: int
    size: int
    worker: str
    pid: int
    boot: str
    settings: dict[str, str]


class Beat(_Part, frozen=True, tag="beat"):
    standing: Standing


class Wake(_Part, frozen=True, tag="wake"):
    """A rank has work before `round`, at which the group sleeps."""

    round: int


class LeaveGroup(_Part, frozen=True, tag="leave"):
    """A rank holds no request and ends."""


class StoreSet(_Part, frozen=True, tag="set"):
    """Set `key` of the store, or append to it."""

    key: str
    value: bytes
    appends: bool = False


class StoreGet(_Part, frozen=True, tag="get"):
    """Answer with StoreValue once `key` is set."""

    key: str


class Member(_Part, frozen=True):
    worker: str
    pid: int
    boot: str


class Waiting(_Part, frozen=True, tag="waiting"):
    """Ranks that have not joined yet."""

    missing: tuple[int, ...]


class Met(_Part, frozen=True, tag="met"):
    """All ranks have joined. `members` by rank."""

    incarnation: int
    members: tuple[Member, ...]


class Turned(_Part, frozen=True, tag="turned"):
    """Rank 0 does not take this rank. `passes`: it may take it later, when processes of the last life have ended."""

    message: str
    field: str
    value: str
    remedy: str
    passes: bool = False


class Standings(_Part, frozen=True, tag="standings"):
    """By rank: how far it is, and seconds since rank 0 heard of it."""

    rows: tuple[tuple[Standing, float], ...]


class Gone(_Part, frozen=True, tag="gone"):
    """A rank left, or its connection to rank 0 broke."""

    rank: int
    left: bool


class StoreValue(_Part, frozen=True, tag="value"):
    key: str
    value: bytes


ToHub: TypeAlias = Join | Beat | Wake | LeaveGroup | StoreSet | StoreGet
FromHub: TypeAlias = Waiting | Met | Turned | Standings | Gone | Wake | StoreValue

encode = msgspec.msgpack.Encoder().encode
decode_to_hub = msgspec.msgpack.Decoder(ToHub).decode
decode_from_hub = msgspec.msgpack.Decoder(FromHub).decode
