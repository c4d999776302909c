"""Two protocol versions in one cluster: which peers a coordinator accepts, and what it sends to the older ones. Pure.

    peer              coordinator
    N                 N              all messages as they are
    N - 1             N              accepted. The coordinator answers in N - 1, without fields that were added since
    N                 N - 1          refused by name by the coordinator, which changes nothing: it is upgraded first
    N - 2 or older    N              refused by name

What a version may change so that the one before is served: add a field with a default at the end of a struct, and add
a message that only a newer peer asks for. PROTOCOL_VERSION_MIN is then the version before, and NEWER_FIELDS has each
struct with new fields that a coordinator sends, as in {Ended: 2}.

Rejected: readers that ignore what they do not know, since a worker that skips part of a command would do something
else than was decided; a version for each message, since nothing is gained over one number for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from protocol.errors import ProtocolError
from protocol.messages import (
    PROTOCOL_VERSION,
    CoordinatorMessage,
    GatewayMessage,
    WorkerRow,
    WorkerRows,
    encode,
)

#: The oldest protocol version that a coordinator accepts: one minor version of hisparse back. Workers of 8 refuse what
#: their slab has no pages for, which a ledger of 9 does not count; no release spoke 8.
PROTOCOL_VERSION_MIN: Final[int] = 9
#: How many fields at the end of a struct PROTOCOL_VERSION_MIN does not have, of structs that a coordinator sends. None
#: of them contains another.
NEWER_FIELDS: Final[Mapping[type[msgspec.Struct], int]] = {WorkerRow: 1}
#: Messages of a coordinator that contain such a struct.
CHANGED: Final[frozenset[type[msgspec.Struct]]] = frozenset({WorkerRows})

assert PROTOCOL_VERSION - PROTOCOL_VERSION_MIN in (0, 1)  # no version between them, for which nothing is cut


def check_version(version: int) -> None:
    """Raises ProtocolError when a coordinator does not serve a peer of this protocol version."""
    serves_older = PROTOCOL_VERSION_MIN < PROTOCOL_VERSION
    if version > PROTOCOL_VERSION:
        remedy = "upgrade the coordinator first"
    elif version < PROTOCOL_VERSION_MIN:
        remedy = "install the hisparse of the coordinator" + ", or one minor version before it" * serves_older
    else:
        return
    raise ProtocolError(
        f"this coordinator speaks protocol {PROTOCOL_VERSION}"
        + f", and {PROTOCOL_VERSION_MIN} to older peers" * serves_older,
        field="protocol",
        value=version,
        remedy=remedy,
    )


def encode_for(message: GatewayMessage | CoordinatorMessage, version: int) -> bytes:
    """`message` as a peer of `version` reads it, which `check_version` has accepted."""
    if version == PROTOCOL_VERSION or type(message) not in CHANGED:
        return encode(message)
    return encode(_without_newer_fields(message))


def _without_newer_fields(value: object) -> object:
    if isinstance(value, tuple):
        return [_without_newer_fields(it) for it in value]
    if not isinstance(value, msgspec.Struct):
        return value
    if newer := NEWER_FIELDS.get(type(value)):  # in C: a list may have 10,000 rows
        return msgspec.to_builtins(value, builtin_types=(bytes,))[:-newer]
    names, tag = value.__struct_fields__, value.__struct_config__.tag
    elements = [_without_newer_fields(getattr(value, name)) for name in names]
    return elements if tag is None else [tag, *elements]
