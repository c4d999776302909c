"""What a checkpoint directory says about its model, without loading weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from coordinator.errors import ConfigError
from coordinator.messages import ModelInfo
from kernels.layout import Geometry
from kernels.row_bytes import index_key_shape, kv_row_shape
from worker.runners.text import read_tokenizer

FAMILIES: Final = ("deepseek_v32", "glm_moe_dsa")
#: Bytes hashed at both ends of each weights file: its header, and enough values to tell two seeds apart.
FINGERPRINT_BYTES: Final = 64 * 1024


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint that can be served. Raises ConfigError."""
    file = Path(path) / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise _refusal(f"no readable checkpoint: {error}", path, "pass a directory with config.json") from error
    family = config.get("model_type")
    if family not in FAMILIES:
        raise _refusal(f"model_type {family} is not served", path, f"use one of {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        raise _refusal("quantized weights are not served", path, "convert the checkpoint to bfloat16")
    if not list(Path(path).glob("*.safetensors")):
        raise _refusal("no safetensors files", path, "download the weights too")
    return config


def describe_model(path: str | Path, config: Any) -> ModelInfo:
    """The ModelInfo of a checkpoint; `config` is the library's config object."""
    tokenizer = read_tokenizer(path)
    return ModelInfo(
        fingerprint=fingerprint(path),
        name=Path(path).resolve().name,
        context_max_tokens=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        layers=config.num_hidden_layers,
        topk=config.index_topk,
        eos_token_ids=_eos_token_ids(path, config),
        tokenizer_kind=tokenizer.kind,
        tokenizer_hash=tokenizer.hash,
        chat_template=tokenizer.chat_template,
    )


def geometry_of(config: Any, kv_dtype: str) -> Geometry:
    """Rows and index groups of a model whose KV is kept in `kv_dtype` (kernels.row_bytes.KINDS).

    Raises ConfigError when rows do not fit it, or when the first layer has no indexer to share.
    """
    kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    if kinds[0] != "full":
        raise ConfigError(
            "the first layer has no selection to share",
            field="indexer_types",
            value=kinds,
            remedy="start with a full layer",
        )
    groups, group = [], -1
    for kind in kinds[: config.num_hidden_layers]:
        group += kind == "full"
        groups.append(group)
    return Geometry(
        layers=config.num_hidden_layers,
        row_bytes=kv_row_shape(kv_dtype, config.kv_lora_rank, config.qk_rope_head_dim).row_bytes,
        group_of_layer=tuple(groups),
        index_row_bytes=index_key_shape(kv_dtype, config.index_head_dim).row_bytes,
        topk=config.index_topk,
    )


def fingerprint(path: str | Path) -> str:
    """32 hex digits over config.json and, of each weights file, name, size and both ends."""
    digest = hashlib.blake2b((Path(path) / "config.json").read_bytes(), digest_size=16)
    for file in sorted(Path(path).glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as data:
            digest.update(data.read(FINGERPRINT_BYTES))
            data.seek(max(0, size - FINGERPRINT_BYTES))
            digest.update(data.read())
    return digest.hexdigest()


def _eos_token_ids(path: str | Path, config: Any) -> tuple[int, ...]:
    """generation_config.json wins over config.json, as in the library's generate()."""
    file = Path(path) / "generation_config.json"
    stored = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    ids = config.eos_token_id if stored is None else stored
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _refusal(message: str, path: str | Path, remedy: str) -> ConfigError:
    return ConfigError(message, field="worker.model", value=path, remedy=remedy)
