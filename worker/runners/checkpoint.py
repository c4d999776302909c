"""What a checkpoint directory says about its model, without loading weights."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from kernels.layout import Geometry
from kernels.row_bytes import KvKinds
from protocol.byte_sizes import AUTO
from protocol.errors import ConfigError, HiSparseError
from protocol.messages import EOS_IDS_MAX, ModelInfo
from protocol.settings import WorkerSettings
from protocol.small_files import read_json_object
from protocol.tokenizer_files import TokenizerFile
from worker.families.base import SHARING
from worker.families.table import FAMILIES, family_of, library_config
from worker.weights.config_fields import check_fields, unserved
from worker.weights.dimensions import VOCAB_MAX, check_dimensions
from worker.weights.layout import BYTES, require_draft_layer
from worker.weights.quantization import read_quantization
from worker.weights.safetensors_header import FIELD
from worker.weights.shards import Shards

#: Files of a checkpoint that are read: configurations, weights, tokenizers, chat templates.
READ_SUFFIXES: Final = (".json", ".safetensors", ".jinja", ".model", ".txt")
#: Fields that sizes follow from, beside those of a family.
DIMENSIONS: Final = ("num_hidden_layers", "index_topk", "max_position_embeddings", "vocab_size")
#: Bytes hashed at both ends of each weights file: its header, and enough values to tell two seeds apart.
FINGERPRINT_BYTES: Final = 64 * 1024
#: Of the model library's words in an error.
ERROR_CHARS_MAX: Final = 300


def read_config(path: str | Path, *, with_weights: bool = True) -> dict[str, Any]:
    """The fields of config.json of a checkpoint that can be served, by the names that all families have (`fields` of
    worker/families/base.py). Raises ConfigError, for its files of weights too unless they are read later or not at all
    (`with_weights`)."""
    if not str(path):
        raise _refusal("no checkpoint is named", path, "pass its directory, as in --model PATH")
    _check_permissions(Path(path))
    file = Path(path) / "config.json"
    if not os.path.lexists(file):
        raise _refusal("no readable checkpoint: it has no config.json", path, "pass a directory with config.json")
    config = read_json_object(file, FIELD)
    if reason := unserved(config):
        raise _refusal(reason, path, f"use one of {', '.join(FAMILIES)}")
    config = FAMILIES[config["model_type"]].fields(config)
    read_quantization(config, file)
    _check_values(config, file, FIELD)
    _eos_token_ids(path, config.get("eos_token_id"), config.get("vocab_size") or VOCAB_MAX)
    if with_weights:
        Shards.open(path).close()
    return config


def read_dimensions(path: str | Path) -> Any:
    """What `geometry_of` needs of a config.json, or of a directory with one, weights or none. Raises ConfigError.

    The model library is asked only where the file leaves it to the library which layers share a selection.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    config = read_json_object(file, "config")
    if reason := unserved(config):
        raise _unfit(reason, path, f"use one of {', '.join(FAMILIES)}")
    family = FAMILIES[config["model_type"]]
    config = family.fields(config)
    _check_values(config, file, "config")
    leaves = family.shares and (family.shares_by_default or SHARING & config.keys())
    if leaves and not config.get("indexer_types"):
        return read_by_library(file)
    missing = [name for name in (*family.row_sizes, *DIMENSIONS) if not isinstance(config.get(name), int)]
    if missing:
        raise _unfit(f"has no {', no '.join(missing)}", path, "pass the config.json of the whole model")
    return SimpleNamespace(**config)


def kinds_of(dimensions: Any, settings: WorkerSettings) -> KvKinds:
    """Return the kinds that a worker of these settings would keep KV in: by default that of the weights."""
    model = stored_dtype(dimensions) if settings.dtype == AUTO else settings.dtype
    kinds = kv_kinds(model, settings.kv_dtype, settings.row_dtype, settings.index_dtype)
    require_kinds(dimensions, kinds, model)
    return kinds


def kv_kinds(model: str, kv_dtype: str, row_dtype: str = AUTO, index_dtype: str = AUTO) -> KvKinds:
    """Return the kinds that these settings say, of a model that is computed in the dtype `model`."""
    both = model if kv_dtype == AUTO else kv_dtype
    return KvKinds(*(both if kind == AUTO else kind for kind in (row_dtype, index_dtype)))


def require_kinds(config: Any, kinds: KvKinds, model: str) -> None:
    """Raise ConfigError where the family keeps KV in the dtype `model` alone, in which its model is computed."""
    family = family_of(config)
    if family.keeps_kv_exact and set(kinds) != {model}:
        raise ConfigError(
            f"{family.name} keeps its KV in the model's dtype alone, {model}",
            field="worker.kv_dtype",
            value=kinds.rows if kinds.rows != model else kinds.keys,
            remedy="use auto",
        )


def stored_dtype(dimensions: Any) -> str:
    """The dtype of the weights that are not quantized: `bfloat16`, `float32`. Raises ConfigError for another."""
    stored = getattr(dimensions, "dtype", None) or getattr(dimensions, "torch_dtype", None) or "float32"
    name = str(stored).removeprefix("torch.")
    if name not in BYTES:
        remedy = f"set it to one of {', '.join(BYTES)}: weights are converted when they are read"
        raise ConfigError("no model is computed in it", field="config.json dtype", value=name, remedy=remedy)
    return name


def anonymous_info(config: Any, name: str) -> ModelInfo:
    """The ModelInfo of a model that has dimensions and no files."""
    return ModelInfo(
        fingerprint=name,
        name=name,
        context_max_tokens=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        layers=config.num_hidden_layers,
        topk=config.index_topk,
        eos_token_ids=(),
        tokenizer_kind="bytes",
        tokenizer_hash="",
    )


def describe_model(path: str | Path, config: Any, tokenizer: TokenizerFile) -> ModelInfo:
    """The ModelInfo of a checkpoint; `config` is the library's config object."""
    return ModelInfo(
        fingerprint=fingerprint(path),
        name=Path(path).resolve().name,
        context_max_tokens=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        layers=config.num_hidden_layers,
        topk=config.index_topk,
        eos_token_ids=_eos_token_ids(path, config.eos_token_id, config.vocab_size),
        tokenizer_kind=tokenizer.kind,
        tokenizer_hash=tokenizer.hash,
        chat_template=tokenizer.chat_template,
    )


def geometry_of(config: Any, kinds: KvKinds | str, *, draft_layer: bool = False) -> Geometry:
    """Rows and index groups of a model whose KV is kept in `kinds` (kernels.row_bytes.KINDS; one for both).
    `draft_layer`: with those of the draft layer, the last layer, in a group of its own.

    Raises ConfigError when rows do not fit it, when the first layer has no indexer to share, or when the model has no
    draft layer.
    """
    if draft_layer:
        require_draft_layer(config)
    if isinstance(kinds, str):
        kinds = KvKinds(kinds, kinds)
    require_kinds(config, kinds, kinds.rows if kinds.rows in BYTES else stored_dtype(config))
    return family_of(config).geometry(config, kinds, draft_layer=draft_layer)


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


def weights_digest(path: str | Path) -> str:
    """Digest of the bytes that weights are made of: `fingerprint`, and of each file the file system's own account.

    A file whose bytes change has another time of change, which no program can set back: what is mapped by this digest
    is never older than its files. One that is copied or touched is loaded once more.
    """
    digest = hashlib.blake2b(fingerprint(path).encode(), digest_size=16)
    for file in sorted(Path(path).iterdir()):
        if file.suffix not in (".json", ".safetensors"):
            continue
        status = file.stat()
        about = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        digest.update(f"{file.name} {about}".encode())
    return digest.hexdigest()


def _check_values(config: dict[str, Any], file: Path, field: str) -> None:
    check_dimensions(config, str(file), field)
    check_fields(config, str(file), field)
    for name in ("dtype", "torch_dtype"):
        if not isinstance(config.get(name), str | None):
            raise ConfigError(f"{name} is no text", field=field, value=file, remedy="correct the file")


def _eos_token_ids(path: str | Path, in_config: object, vocab_size: int) -> tuple[int, ...]:
    """generation_config.json wins over config.json, as in the library's generate(). Raises ConfigError."""
    file = Path(path) / "generation_config.json"
    stored = read_json_object(file, FIELD).get("eos_token_id") if os.path.lexists(file) else None
    found = in_config if stored is None else stored
    ids = () if found is None else tuple(found) if isinstance(found, list) else (found,)
    if len(ids) > EOS_IDS_MAX or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise _refusal(
            f"eos_token_id is not a token id below {vocab_size}, or a list of at most {EOS_IDS_MAX}",
            Path(path) / "config.json" if stored is None else file,
            "correct the file",
        )
    return ids


@contextmanager
def library_refusals(path: str | Path, field: str) -> Iterator[None]:
    """Makes ConfigErrors of what the model library raises when the files of a checkpoint are not as it expects."""
    try:
        yield
    except HiSparseError:
        raise
    except Exception as error:
        text = str(error).strip().partition("\n")[0][:ERROR_CHARS_MAX]
        raise ConfigError(
            f"the model library cannot load it: {type(error).__name__}: {text}",
            field=field,
            value=path,
            remedy="correct the files, or copy them again from where they came",
        ) from error


def read_by_library(file: Path) -> Any:
    """The model library's config object of a config.json, or of a directory with one. Raises ConfigError."""
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise _unfit(
            f"what config.json leaves to the model library needs the package {error.name}",
            file,
            "pip install 'hisparse[worker]'",
        ) from error
    with library_refusals(file, "config"):
        return library_config(file)


def _check_permissions(path: Path) -> None:
    """Raise ConfigError that names the first file of the directory `path` that this user may not read.

    The model library takes such a file for one that is missing.
    """
    denied = path
    try:
        for file in sorted(path.iterdir()) if path.is_dir() else ():
            denied = file
            if file.is_file() and file.suffix in READ_SUFFIXES:
                file.open("rb").close()
    except PermissionError as error:
        whose = ""
        with suppress(OSError):
            status = denied.stat()
            whose = f" (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o})"
        text = f"user {os.geteuid()} has no permission to read {denied}{whose}"
        remedy = f"chmod -R a+rX {path}, and a+x on the directories above it; or give it to user {os.geteuid()}"
        raise _refusal(text, path, remedy) from error


def _unfit(message: str, path: str | Path, remedy: str) -> ConfigError:
    return ConfigError(message, field="config", value=path, remedy=remedy)


def _refusal(message: str, path: str | Path, remedy: str) -> ConfigError:
    return ConfigError(message, field=FIELD, value=path, remedy=remedy)
