"""Writes a repository in the published layout: shards, an index, config.json. One tensor per expert and projection.

Names, dtypes and shapes are known before the values, so each shard's header is written first and values follow in
pieces of rows: memory is bounded, whatever the size of the repository.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.block_weight import BLOCK, BlockFp8
from kernels.row_format import E4M3_MAX
from worker.families.base import TensorSpec
from worker.weights.layout import SCALE_SUFFIX, scale_shape
from worker.weights.quantization import VALUES_DTYPE
from worker.weights.safetensors_header import ELEMENT_BYTES
from worker.weights.shards import INDEX

#: As the published repositories have: DeepSeek-V3.2 comes in 163 files.
SHARD_BYTES: Final = 4 * 1024**3
#: Values of a piece.
PIECE_VALUES: Final = 1 << 24
#: Dtypes of weights that are not converted, as torch and as safetensors name them.
STORED: Final = {torch.float32: "F32", torch.bfloat16: "BF16"}
QUANTIZATION: Final[dict[str, Any]] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}


class TensorSource(Protocol):
    """A source of values, by rows `first` to `first + count - 1`; a tensor of one dimension is one row, and a row
    of three dimensions is a matrix."""

    def plain(self, spec: TensorSpec, first: int, count: int) -> Tensor:
        """Values of any floating dtype."""
        ...

    def values(self, spec: TensorSpec, first: int, count: int) -> Tensor:
        """In float8_e4m3fn; `first` is a multiple of BLOCK."""
        ...

    def scales(self, spec: TensorSpec, first: int, count: int) -> Tensor:
        """Of the blocks of these rows, in float32."""
        ...


class _ShardEntry(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: TensorSpec

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]


def quantize_blocks(weight: Tensor, *, powers_of_two: bool = False) -> BlockFp8:
    """Block-FP8 of `weight` [N, K]: each block's largest magnitude becomes the largest e4m3 value.

    `powers_of_two`: scales as `scale_fmt` ue8m0 has them, rounded up.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = tiles.abs().amax((1, 3)).clamp(min=1e-12) / E4M3_MAX
    if powers_of_two:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    values = (tiles / scales[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return BlockFp8(values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).contiguous(), scales)


def write_repository(
    path: Path,
    config: Mapping[str, Any],
    specs: Iterable[TensorSpec],
    source: TensorSource,
    *,
    fp8: bool,
    dtype: torch.dtype = torch.bfloat16,
    powers_of_two: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write config.json and the shards, with an index of several; returns the bytes of all tensors. `config` is
    config.json's.

    With `fp8` weights that publishers convert are stored in FP8; all others in `dtype`, or in float32 where the model
    keeps that. Shards are cut before they exceed `shard_bytes`, except for a tensor that is larger by itself.
    """
    path.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(_entries(specs, fp8, STORED[dtype]), shard_bytes))
    weight_map: dict[str, str] = {}
    for number, entries in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):06}.safetensors" if shards[1:] else "model.safetensors"
        weight_map |= dict.fromkeys((it.name for it in entries), file)
        _write_shard(path / file, entries, source)
    total = sum(it.bytes for entries in shards for it in entries)
    if shards[1:]:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True))
    about = dict(config) | {"dtype": str(dtype).removeprefix("torch.")}
    if fp8:
        about["quantization_config"] = QUANTIZATION | ({"scale_fmt": "ue8m0"} if powers_of_two else {})
    (path / "config.json").write_text(json.dumps(about, indent=1, sort_keys=True))
    return total


def _entries(specs: Iterable[TensorSpec], fp8: bool, stored: str) -> Iterator[_ShardEntry]:
    for spec in specs:
        if fp8 and spec.converts:
            yield _ShardEntry(spec.name, VALUES_DTYPE, spec.shape, spec)
            yield _ShardEntry(spec.name + SCALE_SUFFIX, "F32", scale_shape(spec.shape, (BLOCK, BLOCK)), spec)
        else:
            yield _ShardEntry(spec.name, "F32" if spec.keeps_float32 else stored, spec.shape, spec)


def _shards(entries: Iterable[_ShardEntry], shard_bytes: int) -> Iterator[list[_ShardEntry]]:
    """A weight's values and scales may lie in two shards, as in published repositories."""
    shard: list[_ShardEntry] = []
    for entry in entries:
        if shard and sum(it.bytes for it in shard) + entry.bytes > shard_bytes:
            yield shard
            shard = []
        shard.append(entry)
    yield shard


def _write_shard(file: Path, entries: list[_ShardEntry], source: TensorSource) -> None:
    header, at = dict[str, Any](), 0
    for it in entries:
        header[it.name] = {"dtype": it.dtype, "shape": list(it.shape), "data_offsets": [at, at + it.bytes]}
        at += it.bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for it in entries:
            for piece in _pieces(it, source):
                array: Any = piece.contiguous().view(torch.uint8).numpy()
                out.write(array.reshape(-1))


def _pieces(entry: _ShardEntry, source: TensorSource) -> Iterator[Tensor]:
    spec = entry.spec
    rows = spec.shape[0] if len(spec.shape) > 1 else 1
    at_once, least = PIECE_VALUES // (prod(spec.shape) // rows), 1 if len(spec.shape) > 2 else BLOCK
    at_once = max(least, at_once // least * least)
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        if entry.dtype == VALUES_DTYPE:
            yield source.values(spec, first, count)
        elif entry.name.endswith(SCALE_SUFFIX):
            yield source.scales(spec, first, count)
        else:
            dtype = next(it for it, name in STORED.items() if name == entry.dtype)
            yield source.plain(spec, first, count).to(dtype)
