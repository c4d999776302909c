"""Bounds of the sizes in a model's config.json, so that an absurd one is refused before anything is allocated. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, Final

from protocol.errors import ConfigError
from worker.families.table import FAMILIES

LAYERS_MAX: Final = 1024
HEADS_MAX: Final = 4096
WIDTH_MAX: Final = 1 << 20
EXPERTS_MAX: Final = 1 << 16
TOKENS_MAX: Final = 1 << 28
VOCAB_MAX: Final = 1 << 24
#: Of a value in errors.
SHOWN_CHARS: Final = 80

#: Least and most of each size, at least 8 times what models of the served families have.
BOUNDS: Final[dict[str, tuple[int, int]]] = {
    **dict.fromkeys(("num_hidden_layers", "index_topk_freq"), (1, LAYERS_MAX)),
    **dict.fromkeys(("first_k_dense_replace", "index_skip_topk_offset"), (0, LAYERS_MAX)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "index_n_heads"), (1, HEADS_MAX)),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), (1, WIDTH_MAX)),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "head_dim", "index_head_dim"), (1, WIDTH_MAX)),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), (1, WIDTH_MAX)),
    **dict.fromkeys(("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"), (1, EXPERTS_MAX)),
    "n_shared_experts": (0, EXPERTS_MAX),
    **dict.fromkeys(("index_topk", "max_position_embeddings"), (1, TOKENS_MAX)),
    "index_local_blocks": (0, TOKENS_MAX),
    "vocab_size": (1, VOCAB_MAX),
}
#: Values of `indexer_types`: a layer runs the indexer, or uses the selection of the layer before it.
INDEXER_KINDS: Final = ("full", "shared")


def bounds_of(name: str) -> tuple[int, int]:
    """Return the least and the most of a size; one that is a family's own is a width."""
    return BOUNDS.get(name, (1, WIDTH_MAX))


def check_dimensions(config: Mapping[str, Any], file: str, field: str) -> None:
    """Raise ConfigError, with `file` as the value of `field`, unless every size that `config` has is within BOUNDS, the
    family's `numbers` are above 0, and `indexer_types`, if it is there, names a kind for each layer. A size of null is
    the model library's default."""
    family = FAMILIES.get(config.get("model_type", ""))
    for name in (*BOUNDS, *((*family.widths, *family.sizes) if family else ())):
        value, (least, most) = config.get(name), bounds_of(name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise _refusal(f"{name} {_shown(value)} is not a whole number from {least} to {most}", file, field)
    for name in family.numbers if family else ():
        number = config.get(name)
        if number is not None and (type(number) not in (int, float) or not 0 < number < inf):
            raise _refusal(f"{name} {_shown(number)} is no finite number above 0", file, field)
    kinds, layers = config.get("indexer_types"), config.get("num_hidden_layers")
    if kinds is not None:
        if not isinstance(kinds, list) or not kinds or any(kind not in INDEXER_KINDS for kind in kinds):
            known = " or ".join(INDEXER_KINDS)
            raise _refusal(f"indexer_types {_shown(kinds)} is not a list of {known}, one for each layer", file, field)
        if layers is not None and len(kinds) < layers:
            raise _refusal(f"indexer_types has {len(kinds)} entries, and num_hidden_layers is {layers}", file, field)


def _refusal(message: str, file: str, field: str) -> ConfigError:
    remedy = "correct the file, or copy it again from where it came"
    return ConfigError(message, field=field, value=file, remedy=remedy)


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**SHOWN_CHARS else "of many digits"
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
