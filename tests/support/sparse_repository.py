"""Repositories of published shapes whose files have headers, sizes and no values: sparse files take no room."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

from worker.families.base import TensorSpec
from worker.weights.layout import SCALE_SUFFIX, scale_shape, tensors_of
from worker.weights.shards import INDEX

BLOCK = (128, 128)
SHARD_BYTES = 50_000_000_000
BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}


def write_sparse(path: Path, fields: dict[str, Any], config: Any, *, fp8: bool = True, draft_layer: bool = True) -> int:
    """Write `fields` as config.json and the shards of `config`; returns the bytes of their tensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    shards, at, total = [dict[str, Any]()], 0, 0
    for name, dtype, shape in _entries(tensors_of(config, draft_layer=draft_layer), fp8):
        size = prod(shape) * BYTES[dtype]
        if at + size > SHARD_BYTES:
            shards.append({})
            at = 0
        shards[-1][name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at, total = at + size, total + size
    where: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number:05}.safetensors"
        where |= dict.fromkeys(shard, file)
        header = json.dumps(shard).encode()
        header += b" " * (-len(header) % 8)
        with (path / file).open("wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            out.truncate(8 + len(header) + max(it["data_offsets"][1] for it in shard.values()))
    (path / INDEX).write_text(json.dumps({"weight_map": where}))
    return total


def _entries(specs: Iterable[TensorSpec], fp8: bool) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for spec in specs:
        if fp8 and spec.converts:
            yield spec.name, "F8_E4M3", spec.shape
            yield spec.name + SCALE_SUFFIX, "F32", scale_shape(spec.shape, BLOCK)
        else:
            yield spec.name, "F32" if spec.keeps_float32 else "BF16", spec.shape
