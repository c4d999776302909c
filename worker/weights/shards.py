"""The safetensors files of a repository, and where each tensor's bytes lie. Reads by position, maps nothing.

A repository has one index file that names the shard of each tensor, or no index and any number of files. Experts that
are stored together are found one by one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from protocol.errors import ConfigError
from protocol.small_files import open_regular, read_small_file
from worker.weights.safetensors_header import FIELD, PREFIX_BYTES, StoredTensor, header_length, parse_header

INDEX: Final = "model.safetensors.index.json"
#: Tensors that some repositories store for all experts of a layer.
STACKED: Final = re.compile(r"^(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)$")
#: The index of 100,000 tensors is 10 MB.
INDEX_BYTES_MAX: Final = 256 * 1024 * 1024


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True)
class Located:
    """A tensor and its file."""

    file: str
    tensor: StoredTensor

    @property
    def bytes(self) -> int:
        return self.tensor.end - self.tensor.begin


class Shards:
    """The tensors of a repository by name; its files stay open until `close`. Threads may read at once."""

    def __init__(self, path: Path, tensors: dict[str, Located], descriptors: dict[str, int]) -> None:
        self.path = path
        self.tensors = tensors
        self._descriptors = descriptors

    @classmethod
    def open(cls, path: str | Path) -> Shards:
        """Read the index and all headers. Raises ConfigError naming the file for whatever is absent or malformed."""
        directory, descriptors = Path(path), dict[str, int]()
        try:
            weight_map = _read_index(directory)
            names = sorted(set(weight_map.values())) if weight_map else _files(directory)
            headers = {name: _open(directory / name, name, descriptors) for name in names}
            tensors = _split_experts(_locate(directory, weight_map, headers))
        except BaseException:
            for descriptor in descriptors.values():
                os.close(descriptor)
            raise
        return cls(directory, tensors, descriptors)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self._descriptors)

    def where(self, name: str) -> str:
        """The file of tensor `name`, as errors show it."""
        return str(self.path / self.tensors[name].file)

    def read_into(self, name: str, first: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of tensor `name` from byte `first` on. Raises ConfigError at the file's end."""
        located, done = self.tensors[name], 0
        start = located.tensor.begin + first
        while done < len(buffer):
            count = os.preadv(self._descriptors[located.file], [buffer[done:]], start + done)
            if count == 0:
                raise ConfigError(
                    f"ended while {name} was read", field=FIELD, value=self.where(name), remedy="download it again"
                )
            done += count

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_index(directory: Path) -> dict[str, str]:
    """Shard by tensor; empty without an index file."""
    file = directory / INDEX
    if not os.path.lexists(file):
        return {}
    data, _ = read_small_file(file, FIELD, bytes_max=INDEX_BYTES_MAX)
    try:
        weight_map = msgspec.json.decode(data, type=_Index).weight_map
    except (RecursionError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _refusal(f"no readable index: {error}", file) from error
    for name in set(weight_map.values()):
        if name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise _refusal(f"names {name!r}, which is no safetensors file beside it", file)
    if not weight_map:
        raise _refusal("names no tensors", file)
    return weight_map


def _files(directory: Path) -> list[str]:
    names = sorted(it.name for it in directory.glob("*.safetensors"))
    if not names:
        raise _refusal("no safetensors files", directory, "download the weights too")
    return names


def _open(path: Path, name: str, descriptors: dict[str, int]) -> dict[str, StoredTensor]:
    if not os.path.lexists(path):
        raise _refusal(f"is missing, and {INDEX} names it", path, "download it too")
    with open_regular(path, FIELD) as file:
        descriptors[name] = os.dup(file.fileno())
        size = os.fstat(file.fileno()).st_size
        length = header_length(str(path), file.read(PREFIX_BYTES), size)
        return parse_header(str(path), file.read(length), size)


def _locate(
    directory: Path, weight_map: dict[str, str], headers: dict[str, dict[str, StoredTensor]]
) -> dict[str, Located]:
    found: dict[str, Located] = {}
    for file, name, tensor in _stored(headers):
        if weight_map and weight_map.get(name) != file:
            raise _refusal(f"holds {name}, which {INDEX} does not place there", directory / file)
        if name in found:
            raise _refusal(f"holds {name}, and so does {found[name].file}", directory / file)
        found[name] = Located(file, tensor)
    if missing := weight_map.keys() - found.keys():
        name = min(missing)
        raise _refusal(f"lacks {name}, which {INDEX} places there", directory / weight_map[name])
    return found


def _split_experts(found: dict[str, Located]) -> dict[str, Located]:
    """`found` with the tensors of single experts in place of STACKED ones of three dimensions, by places in the same
    file: [E, n, K] is E tensors [n, K], and of gate_up_proj each is two."""
    split: dict[str, Located] = {}
    for name, located in found.items():
        stacked, shape = STACKED.match(name), located.tensor.shape
        parts = ("gate_proj", "up_proj") if stacked and stacked[2] == "gate_up_proj" else ("down_proj",)
        if stacked is None or len(shape) != 3 or not shape[0] or shape[1] % len(parts):
            split[name] = located
            continue
        size, rows, begin = located.bytes // shape[0] // len(parts), shape[1] // len(parts), located.tensor.begin
        for expert in range(shape[0]):
            for part in parts:
                tensor = StoredTensor(located.tensor.dtype, (rows, shape[2]), begin, begin + size)
                split[f"{stacked[1]}.{expert}.{part}.weight"] = Located(located.file, tensor)
                begin += size
    return split


def _stored(headers: dict[str, dict[str, StoredTensor]]) -> Iterator[tuple[str, str, StoredTensor]]:
    for file, tensors in headers.items():
        for name, tensor in tensors.items():
            yield file, name, tensor


def _refusal(message: str, file: Path, remedy: str = "download the checkpoint again") -> ConfigError:
    return ConfigError(message, field=FIELD, value=file, remedy=remedy)
