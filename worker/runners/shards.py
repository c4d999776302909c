"""The safetensors files of a checkpoint directory, checked before the model library opens them. Imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from protocol.errors import ConfigError
from protocol.small_files import open_regular, read_json_object
from worker.runners.safetensors_header import FIELD, PREFIX_BYTES, StoredTensor, header_length, parse_header

INDEX_NAME: Final = "model.safetensors.index.json"
#: Files of one checkpoint: large ones have a few hundred.
SHARDS_MAX: Final = 4096
LAYER: Final = re.compile(r"model\.layers\.(\d{1,9})\.")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name (parse_header). Raises ConfigError."""
    with open_regular(path, FIELD) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        length = header_length(str(path), file.read(PREFIX_BYTES), file_bytes)
        return parse_header(str(path), file.read(length), file_bytes)


def check_shards(path: Path, layers: int | None) -> None:
    """Raise ConfigError unless the directory's safetensors files are whole, its index names files that are there, and
    each of `layers` layers has a tensor. None: the configuration does not say how many layers there are."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise _refusal("no safetensors files", path, "download the weights too")
    if len(files) > SHARDS_MAX:
        raise _refusal(f"{len(files)} safetensors files, more than {SHARDS_MAX}", path, "name the directory of a model")
    _check_index(path, {file.name for file in files})
    names = [name for file in files for name in read_header(file)]
    stored = {int(match[1]) for match in map(LAYER.match, names) if match}
    missing = next((layer for layer in range(layers or 0) if layer not in stored), None)
    if missing is not None:
        raise _refusal(
            f"num_hidden_layers is {layers}, and no safetensors file has a tensor of layer {missing}",
            path / "config.json",
            "download the rest of the weights, or correct config.json",
        )


def _check_index(path: Path, files: set[str]) -> None:
    file = path / INDEX_NAME
    if not os.path.lexists(file):
        return
    places = read_json_object(file, FIELD).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise _refusal("weight_map does not name a file for each tensor", file, "download it again")
    absent = sorted(set(places.values()) - files)
    if absent:
        raise _refusal(f"weight_map names {absent[0]!r}, and there is no such file", file, "download the file too")


def _refusal(message: str, path: Path, remedy: str) -> ConfigError:
    return ConfigError(message, field=FIELD, value=path, remedy=remedy)
