"""The header of one safetensors file: parsed, and refused unless it describes the file completely. Pure.

    bytes 0..7      length of the header, little-endian
    header          JSON: {"NAME": {"dtype": D, "shape": [..], "data_offsets": [begin, end]}, .., "__metadata__": {..}}
    data            the tensors, row-major, without gap or overlap; offsets count from its first byte

A caller reads PREFIX_BYTES, asks `header_length`, reads as many bytes and calls `parse_header`. Both raise ConfigError
with the file as value. `file` is the path as errors show it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Final

import msgspec

from protocol.errors import ConfigError
from protocol.git_lfs import LFS_POINTER, lfs_pointer

FIELD: Final = "worker.model"
PREFIX_BYTES: Final = 8
#: A checkpoint of 100,000 tensors in one file has a header of 15 MB.
HEADER_BYTES_MAX: Final = 64 * 1024 * 1024
#: Dimensions of a tensor.
DIMENSIONS_MAX: Final = 16
#: Of names and values in errors.
SHOWN_CHARS: Final = 120
METADATA: Final = "__metadata__"

#: Bytes of one element, by dtype as the header names it.
ELEMENT_BYTES: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}

_Size = Annotated[int, msgspec.Meta(ge=0)]


class _HeaderEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=DIMENSIONS_MAX)]
    data_offsets: tuple[_Size, _Size]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file. `begin` and `end`: its bytes, counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header_length(file: str, prefix: bytes, file_bytes: int) -> int:
    """Bytes of the header behind the prefix. Raises ConfigError when the file cannot have such a header."""
    if prefix == LFS_POINTER[:PREFIX_BYTES]:
        raise lfs_pointer(FIELD, file)
    if len(prefix) < PREFIX_BYTES:
        raise _refusal(file, f"has {len(prefix)} bytes, and the length of a safetensors header takes {PREFIX_BYTES}")
    length = int.from_bytes(prefix, "little")
    if length > HEADER_BYTES_MAX:
        raise _refusal(file, f"header length {length} is more than {HEADER_BYTES_MAX} bytes")
    if length > file_bytes - PREFIX_BYTES:
        raise _refusal(file, f"header length {length} is beyond the end of the file, which has {file_bytes} bytes")
    return length


def parse_header(file: str, header: bytes, file_bytes: int) -> dict[str, StoredTensor]:
    """The tensors of a file of `file_bytes`, by name, in the order of their bytes.

    Raises ConfigError unless `header` is an object of tensors with known dtypes, each with as many bytes as dtype and
    shape say, which together are exactly the data of the file.
    """
    start = PREFIX_BYTES + len(header)
    tensors = {name: _tensor(file, name, entry, start) for name, entry in _entries(file, header).items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    _check_ranges(file, ordered, start, file_bytes)
    return ordered


def _entries(file: str, header: bytes) -> dict[str, _HeaderEntry]:
    try:
        table = msgspec.json.decode(header, type=dict[str, Any])
    except RecursionError as error:
        raise _refusal(file, "the header is nested too deeply") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _refusal(file, f"the header is not a JSON object: {_shown(error)}") from error
    table.pop(METADATA, None)
    try:
        return msgspec.convert(table, dict[str, _HeaderEntry])
    except msgspec.ValidationError as error:
        name = next(name for name, entry in table.items() if not _is_entry(entry))
        raise _refusal(file, f"tensor {_shown(name)}: {_shown(error)}; found {_shown(table[name])}") from error


def _is_entry(value: object) -> bool:
    try:
        msgspec.convert(value, _HeaderEntry)
    except msgspec.ValidationError:
        return False
    return True


def _tensor(file: str, name: str, entry: _HeaderEntry, start: int) -> StoredTensor:
    begin, end = entry.data_offsets
    where = f"tensor {_shown(name)}"
    if entry.dtype not in ELEMENT_BYTES:
        raise _refusal(
            file, f"{where}: dtype {_shown(entry.dtype)} is not known", f"use one of {', '.join(ELEMENT_BYTES)}"
        )
    if begin > end:
        raise _refusal(file, f"{where}: data_offsets [{begin}, {end}] end before they begin")
    needed = math.prod(entry.shape) * ELEMENT_BYTES[entry.dtype]
    if needed != end - begin:
        raise _refusal(
            file,
            f"{where}: data_offsets [{begin}, {end}] hold {end - begin} bytes, "
            f"and {entry.dtype} {list(entry.shape)} takes {needed}",
        )
    return StoredTensor(entry.dtype, entry.shape, start + begin, start + end)


def _check_ranges(file: str, ordered: dict[str, StoredTensor], start: int, file_bytes: int) -> None:
    last = max((tensor.end for tensor in ordered.values()), default=start)
    for name, tensor in ordered.items():
        if tensor.end > file_bytes:
            raise _refusal(
                file,
                f"tensor {_shown(name)}: data_offsets [{tensor.begin - start}, {tensor.end - start}] "
                f"are beyond the data, which has {file_bytes - start} bytes",
            )
    ranges = [("the start of the data", start, start)]
    ranges += [(f"tensor {_shown(name)}", tensor.begin, tensor.end) for name, tensor in ordered.items()]
    for (before, _, end), (name, begin, _) in pairwise(ranges):
        if begin != end:
            how = "overlaps" if begin < end else "leaves a gap behind"
            raise _refusal(
                file, f"{name}: data_offsets begin at {begin - start}: it {how} {before}, which ends at {end - start}"
            )
    if last != file_bytes:
        raise _refusal(file, f"{file_bytes - last} bytes at the end belong to no tensor")


def _refusal(file: str, message: str, remedy: str = "download or write the file again") -> ConfigError:
    return ConfigError(f"malformed safetensors file: {message}", field=FIELD, value=file, remedy=remedy)


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
