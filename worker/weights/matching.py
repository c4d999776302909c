"""Compares the tensors that a model needs with those that a repository stores.

The result says of each needed tensor which stored one fills it, and in which form. A repository that lacks a tensor,
holds one that the model does not have, or stores another shape or dtype is refused, with the names and their files.
Left unread, though stored: indexers of layers that share a selection, experts of other processes, the draft layer (MTP
module) unless it is asked for; of that layer, the embedding and the head, which are the model's; and what a family
leaves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from protocol.errors import ConfigError
from worker.families.base import TensorSpec
from worker.families.table import family_of
from worker.weights.layout import (
    EXPERT,
    SCALE_SUFFIX,
    SHARED_BY_DRAFT,
    ExpertShare,
    has_indexer,
    is_of_mtp,
    scale_shape,
    tensors_of,
)
from worker.weights.quantization import SCALE_DTYPES, VALUES_DTYPE, Quantization
from worker.weights.safetensors_header import FIELD
from worker.weights.shards import Located, Shards

PLAIN_DTYPES: Final = ("F32", "BF16", "F16")
#: Tables that some repositories store beside the weights; and what an indexer's tensors are called.
TABLE: Final = ".rotary_emb.inv_freq"
INDEXER: Final = re.compile(r"^model\.layers\.(\d+)\.self_attn\.indexer\.")
#: Tensors that an error names.
NAMED_MAX: Final = 4


class TensorMatch(NamedTuple):
    """A needed tensor; `scale` is the name of its scales where it is stored in FP8, else empty."""

    spec: TensorSpec
    scale: str = ""


def match(
    config: Any,
    shards: Shards,
    quantization: Quantization | None,
    experts: ExpertShare | None = None,
    *,
    draft_layer: bool = False,
) -> list[TensorMatch]:
    """What to read, the draft layer too if asked for. Raises ConfigError as the head of this file says."""
    wanted = list(tensors_of(config, experts, draft_layer=draft_layer))
    stored = shards.tensors
    if missing := [it.name for it in wanted if it.name not in stored]:
        raise _refusal(f"lacks {_names(missing)}", shards.path, "download all files of the checkpoint")
    matches = [_match(it, stored, shards, quantization) for it in wanted]
    known = {it.spec.name for it in matches} | {it.scale for it in matches}
    extra = [name for name in stored if name not in known and not _is_left(name, config, experts, draft_layer)]
    if extra:
        raise _refusal(
            f"holds {_names(extra)}, which a {config.model_type} of this config.json does not have",
            shards.where(extra[0]),
            "use the config.json that belongs to these files",
        )
    return matches


def _match(
    spec: TensorSpec, stored: Mapping[str, Located], shards: Shards, quantization: Quantization | None
) -> TensorMatch:
    tensor, where = stored[spec.name].tensor, shards.where(spec.name)
    if tensor.shape != spec.shape:
        raise _refusal(
            f"{spec.name} is {list(tensor.shape)}, and config.json makes it {list(spec.shape)}",
            where,
            "use the config.json that belongs to these files",
        )
    if tensor.dtype in PLAIN_DTYPES:
        return TensorMatch(spec)
    if tensor.dtype != VALUES_DTYPE or not spec.converts:
        raise _refusal(f"{spec.name} is stored as {tensor.dtype}", where, f"use {', '.join(PLAIN_DTYPES)}")
    if quantization is None:
        raise _refusal(f"{spec.name} is FP8, and config.json has no quantization_config", where, "add it")
    if quantization.excludes(spec.name):
        raise _refusal(f"{spec.name} is FP8, and modules_to_not_convert lists it", where, "mend config.json")
    scale, wanted = spec.name + SCALE_SUFFIX, scale_shape(spec.shape, quantization.block)
    if scale not in stored:
        raise _refusal(f"{spec.name} is FP8 and has no {scale}", where, "download all files of the checkpoint")
    found = stored[scale].tensor
    if found.dtype not in SCALE_DTYPES:
        raise _refusal(f"{scale} is stored as {found.dtype}", shards.where(scale), f"use {' or '.join(SCALE_DTYPES)}")
    if found.shape != wanted:
        blocks = "{} x {}".format(*quantization.block)
        raise _refusal(
            f"{scale} is {list(found.shape)}, and blocks of {blocks} of {list(spec.shape)} make {list(wanted)}",
            shards.where(scale),
            "quantize the checkpoint in these blocks",
        )
    return TensorMatch(spec, scale)


def _is_left(name: str, config: Any, experts: ExpertShare | None, draft_layer: bool) -> bool:
    layers = config.num_hidden_layers
    if name.startswith(family_of(config).unread) or name.endswith(TABLE):
        return True
    if name in {f"model.layers.{layers}.{it}" for it in SHARED_BY_DRAFT}:
        return True
    if is_of_mtp(name, layers) and not draft_layer:
        return True
    if of_indexer := INDEXER.match(name):
        return not has_indexer(config, int(of_indexer[1]))
    found = EXPERT.match(name.removesuffix(SCALE_SUFFIX))
    return (
        found is not None
        and experts is not None
        and int(found[2]) not in experts
        and int(found[2]) < config.n_routed_experts
    )


def _names(names: Iterable[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - NAMED_MAX} more" if len(known) > NAMED_MAX else ""
    return ", ".join(known[:NAMED_MAX]) + more


def _refusal(message: str, where: object, remedy: str) -> ConfigError:
    return ConfigError(message, field=FIELD, value=where, remedy=remedy)
