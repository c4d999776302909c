"""Integer arrays on the wire: little-endian bytes to and from numpy, without copying on the way in. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from protocol.errors import BadInput, ProtocolError

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
INT32: Final = np.iinfo(np.int32)
_I4: Final = np.dtype("<i4")
_I8: Final = np.dtype("<i8")


def pack_int32(values: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """`values` as little-endian int32 bytes. Raises OverflowError or ValueError when a value does not fit."""
    return np.asarray(values, dtype="<i4").tobytes()


def pack_tokens(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Token ids given by a user as little-endian int32 bytes.

    Raises BadInput unless `tokens` is one-dimensional, of an integer type, and each value fits int32.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise BadInput(
            f"expected a list of int32 token ids, got {ids.ndim} dimensions of {ids.dtype}",
            field="prompt",
            value=f"{ids.size} values",
            remedy="give a list, or a one-dimensional array, of whole numbers",
        )
    beyond = ids[(ids < INT32.min) | (ids > INT32.max)] if ids.size else ids
    if beyond.size:
        remedy = "use the tokenizer of the served model"
        raise BadInput("a token id does not fit int32", field="prompt", value=beyond[0], remedy=remedy)
    return pack_int32(ids)


def pack_int64(values: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """`values` as little-endian int64 bytes."""
    return np.asarray(values, dtype="<i8").tobytes()


def unpack_int32(data: bytes, field: str) -> Int32Array:
    """A read-only view of `data` as int32. Raises ProtocolError naming `field` when its size is no multiple of 4."""
    return np.frombuffer(_checked(data, field, 4), dtype=_I4)


def unpack_int64(data: bytes, field: str) -> Int64Array:
    """A read-only view of `data` as int64. Raises ProtocolError naming `field` when its size is no multiple of 8."""
    return np.frombuffer(_checked(data, field, 8), dtype=_I8)


def _checked(data: bytes, field: str, item_bytes: int) -> bytes:
    if len(data) % item_bytes:
        raise ProtocolError(
            f"{len(data)} bytes do not divide into {item_bytes}-byte integers",
            field=field,
            value=f"{len(data)} bytes",
            remedy=f"send little-endian int{8 * item_bytes} ids",
        )
    return data
