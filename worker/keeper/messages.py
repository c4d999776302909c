"""Messages between a keeper of weights and a worker. Pure.

One message is one record of a SOCK_SEQPACKET socket in msgpack, MESSAGE_BYTES_MAX at most.

    worker                keeper
    AskWeights        ->
                      <-  WeightsHeld, its KeptTensors, its SegmentGiven (one each, with a descriptor)
                      <-  WeightsDiffer    it keeps others. Asked again with `replaces`, it lets them go
                      <-  FillWeights      it keeps none, and waits for these
    GrowWeights       ->
                      <-  SegmentGiven     with a descriptor that the worker may write
    KeptTensors       ->                   as often as it takes
    SealWeights       ->
                      <-  WeightsSealed    no process can write them from here on, where the memory can be sealed
                      <-  KeeperRefuses    to any of them, before it closes the connection

A worker that goes before it seals leaves nothing: what it wrote is let go.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

MESSAGE_BYTES_MAX: Final = 64 * 1024
#: Bytes of one piece of memory, which has a descriptor of its own. On a GPU a multiple of what it maps, and small: the
#: last piece is taken whole. On the host pages are taken as they are written, and a process has few descriptors.
GPU_SEGMENT_BYTES: Final = 128 << 20
HOST_SEGMENT_BYTES: Final = 16 << 30
#: Bytes of a model.
WEIGHTS_BYTES_MAX: Final = 2 << 40
#: Tensors of 128 layers of 256 experts, each by itself.
TENSORS_MAX: Final = 262_144
#: Tensors in one message.
ROWS_MAX: Final = 100
#: Where tensors begin: what torch's allocator gives, and more than any copy engine asks for.
ALIGNMENT_BYTES: Final = 512
#: Raise it when a tensor of the same name, dtype and shape comes to hold other values.
TABLE_VERSION: Final = 1
#: Where weights lie without a GPU.
CPU: Final = "cpu"

_Text = Annotated[str, msgspec.Meta(max_length=200)]
_Size = Annotated[int, msgspec.Meta(ge=0, lt=WEIGHTS_BYTES_MAX)]

assert ROWS_MAX * (200 + 32 + 16 * 9 + 64) < MESSAGE_BYTES_MAX  # names, dtypes, shapes and offsets


class WeightsIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that weights in memory follow from: those with equal fields are the same.

    `checkpoint`: digest of its files. `table`: TABLE_VERSION. `device`: CPU, or the id of a GPU. `form`: how weights
    are held and multiplied. `experts`: the share of a rank. `layers`: with a draft layer or without.
    """

    checkpoint: _Text
    table: int
    device: _Text
    dtype: _Text
    form: _Text
    experts: _Text
    layers: _Text

    def differences(self, other: WeightsIdentity) -> list[str]:
        """Names of the fields in which the two differ."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]


class KeptTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A row of the table: a contiguous tensor, from byte `offset` of all segments on."""

    name: _Text
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=16)]
    offset: _Size


class _Tagged(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class AskWeights(_Tagged, frozen=True, tag="ask"):
    identity: WeightsIdentity
    replaces: bool = False


class GrowWeights(_Tagged, frozen=True, tag="grow"):
    pass


class KeptTensors(_Tagged, frozen=True, tag="tensors"):
    rows: Annotated[tuple[KeptTensor, ...], msgspec.Meta(max_length=ROWS_MAX)]


class SealWeights(_Tagged, frozen=True, tag="seal"):
    """`digest` of all bytes; empty where memory can be sealed."""

    digest: _Text


class WeightsHeld(_Tagged, frozen=True, tag="held"):
    tensors: Annotated[int, msgspec.Meta(ge=0, le=TENSORS_MAX)]
    segments: Annotated[int, msgspec.Meta(ge=0, le=WEIGHTS_BYTES_MAX // GPU_SEGMENT_BYTES)]
    digest: _Text


class WeightsDiffer(_Tagged, frozen=True, tag="differ"):
    fields: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=16)]


class FillWeights(_Tagged, frozen=True, tag="fill"):
    pass


class SegmentGiven(_Tagged, frozen=True, tag="segment"):
    pass


class WeightsSealed(_Tagged, frozen=True, tag="sealed"):
    pass


class KeeperRefuses(_Tagged, frozen=True, tag="refused"):
    reason: Annotated[str, msgspec.Meta(max_length=1000)]


FromWorker: TypeAlias = AskWeights | GrowWeights | KeptTensors | SealWeights
FromKeeper: TypeAlias = (
    WeightsHeld | WeightsDiffer | FillWeights | SegmentGiven | KeptTensors | WeightsSealed | KeeperRefuses
)

encode: Final = msgspec.msgpack.Encoder().encode
decode_worker: Final = msgspec.msgpack.Decoder(FromWorker).decode
decode_keeper: Final = msgspec.msgpack.Decoder(FromKeeper).decode


def segment_bytes(device: str) -> int:
    """Bytes of one piece of memory on `device`, CPU or the id of a GPU."""
    return HOST_SEGMENT_BYTES if device == CPU else GPU_SEGMENT_BYTES


def in_messages(rows: list[KeptTensor]) -> list[KeptTensors]:
    """The table in messages of ROWS_MAX rows."""
    return [KeptTensors(tuple(rows[at : at + ROWS_MAX])) for at in range(0, len(rows), ROWS_MAX)]
