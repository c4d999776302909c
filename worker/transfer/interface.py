"""What executors and coordinators see of page transfer: layouts, descriptions and events of the two ends.

    PageReceiver   on the decode node: opens transfers on host pages, says when each page has arrived, revokes
    PageSender     on the prefill node: sends pages of its own pool to the pages of a transfer

Both have a thread of their own; no method here waits for the network, `close` excepted. Methods are called by one
thread (the executor's); `poll` returns what happened since the last call, in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kernels.layout import Geometry
from protocol.errors import ConfigError, ProtocolError
from protocol.skew import UNREADABLE
from protocol.units import PAGE_TOKENS

#: Version of descriptions and of what senders and receivers say to each other; both ends must have the same.
TRANSFER_VERSION: Final = 1
#: Pages of one transfer: a context of 1,048,576 tokens.
TRANSFER_PAGES_MAX: Final = 16_384
#: Parts that a page may be sent in: layer groups.
PARTS_MAX: Final = 64
#: Transfers that one receiver, or one sender, has open.
TRANSFERS_MAX: Final = 4_096
#: Largest description, and largest name in it.
DESCRIPTION_BYTES_MAX: Final = 16_384
NAME_CHARS_MAX: Final = 256


class Layout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where every byte of a page lies (kernels/layout.py), and whose rows they are. Two ends agree on all of it."""

    page_tokens: int
    page_bytes: int
    layers: int
    row_bytes: int
    split: int
    index_groups: int
    index_row_bytes: int
    model: str

    @classmethod
    def of(cls, geometry: Geometry, model_fingerprint: str) -> Layout:
        g = geometry
        return cls(
            PAGE_TOKENS, g.page_bytes, g.layers, g.row_bytes, g.split, g.groups, g.index_row_bytes, model_fingerprint
        )

    def require_same(self, theirs: Layout, peer: str) -> None:
        """Raises ConfigError naming the first field in which `theirs` differs, and both values."""
        for name in Layout.__struct_fields__:
            ours, other = getattr(self, name), getattr(theirs, name)
            if ours != other:
                raise ConfigError(
                    f"host pages of {peer} have {name} {other}, those of this worker {ours}",
                    field=f"layout.{name}",
                    value=ours,
                    remedy="pair prefill and decode workers of one model, kv_dtype and page size",
                )


class Description(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How to reach a receiver.

    `receiver_id` is drawn for each receiver, so that the description of a dead one reaches no other. The holder of a
    description may begin transfers. They cross networks under `key`, the receiver's CURVE key, which is drawn with the
    id (empty over ipc).
    """

    version: int
    engine: str
    name: str
    address: str
    receiver_id: int
    key: bytes
    layout: Layout

    @classmethod
    def decode(cls, data: bytes) -> Description:
        """Raises ProtocolError for bytes that are none, ConfigError naming both versions for one of another version."""
        if len(data) > DESCRIPTION_BYTES_MAX:
            raise ProtocolError(f"longer than {DESCRIPTION_BYTES_MAX} bytes", field="transfer", value=len(data))
        try:
            version = msgspec.msgpack.decode(data, type=list[msgspec.Raw])[0]
            if msgspec.msgpack.decode(version, type=int) == TRANSFER_VERSION:
                return msgspec.msgpack.decode(data, type=cls)
        except (*UNREADABLE, IndexError) as error:
            raise ProtocolError(f"not a description of a receiver: {error}", field="transfer") from error
        raise ConfigError(
            f"the receiver speaks version {msgspec.msgpack.decode(version)} of page transfer, this worker "
            f"{TRANSFER_VERSION}",
            field="transfer.version",
            value=TRANSFER_VERSION,
            remedy="run one release on prefill and decode nodes",
        )

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


@dataclass(frozen=True)
class PoolMemory:
    """A host pool as one end of transfers sees it. `pages`: uint8[host_pages, page_bytes], C-contiguous, over the
    mapping of the file at `path`, whose page 0 begins at `file_offset`. `pool_id` is that of the file's header."""

    pages: npt.NDArray[np.uint8]
    path: str
    file_offset: int
    pool_id: int


# ---------------------------------------------------------------- what a receiver says


@dataclass(frozen=True)
class Arrived:
    """All bytes of the `index`-th page of the transfer are in host memory, with the checksum that their sender took.

    Said once for each page, in any order. No write to the page is under way and none follows.
    """

    transfer_id: int
    index: int


@dataclass(frozen=True)
class Revoked:
    """The transfer is closed and no write for it can land any more: its pages may go to another owner.

    Answers `revoke`; comes unasked when the sender gave up or was cut off. `reason` says which.
    """

    transfer_id: int
    reason: str


ReceiverEvent: TypeAlias = Arrived | Revoked


# ---------------------------------------------------------------- what a sender says


@dataclass(frozen=True)
class Delivered:
    """The receiver has verified the `index`-th page of the transfer; its source page is free."""

    transfer_id: int
    index: int


@dataclass(frozen=True)
class Failed:
    """The transfer has ended before all its pages were delivered. Nothing reads its source pages any more."""

    transfer_id: int
    reason: str


SenderEvent: TypeAlias = Delivered | Failed
