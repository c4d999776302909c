"""Fields of config.json: those read, those with one accepted value, those without effect. Pure.

A field that no list names is refused: it may change what the model computes, and a service that ignores it would answer
with tokens of another model. A field of null is absent, and so is an unknown one of false: what it names is off. A
family adds to the lists (worker/families/base.py). tests/worker/weights/test_config_fields.py holds them against the
model library's config classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from protocol.errors import ConfigError
from worker.families.table import FAMILIES

#: Fields that weights, sizes and arithmetic follow from, of every family. `num_experts` and `num_local_experts` are
#: the library's other names of n_routed_experts.
READ: Final = frozenset(
    (
        *("model_type", "dtype", "torch_dtype", "quantization_config", "vocab_size", "max_position_embeddings"),
        *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        *("index_topk", "index_head_dim", "index_n_heads", "attention_bias", "hidden_act", "rms_norm_eps"),
        *("n_routed_experts", "num_experts", "num_local_experts", "n_shared_experts", "num_experts_per_tok"),
        *("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
        *("mlp_layer_types", "first_k_dense_replace", "num_nextn_predict_layers", "eos_token_id"),
        *("rope_parameters", "rope_scaling", "rope_theta"),
    )
)
#: Values that are computed, of fields that could ask for others.
FIXED: Final[Mapping[str, tuple[object, ...]]] = {
    "tie_word_embeddings": (False,),
    "mlp_bias": (False,),
    "is_encoder_decoder": (False,),
    "moe_layer_freq": (1,),
    "moe_router_dtype": ("float32",),
    "partial_rotary_factor": (1,),
    "rope_interleave": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
#: Why each of these fields changes no token.
WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    **dict.fromkeys(("head_dim", "qk_head_dim"), "follows from qk_rope_head_dim and qk_nope_head_dim"),
    **dict.fromkeys(("attention_dropout", "initializer_range", "learnable_sink_init"), "of training"),
    **dict.fromkeys(("aux_loss_alpha", "seq_aux", "router_aux_loss_coef"), "of training"),
    **dict.fromkeys(("ep_size", "pretraining_tp"), "how a trainer placed weights"),
    **dict.fromkeys(("bos_token_id", "pad_token_id", "tokenizer_class"), "of tokenizers, which have their own files"),
    **dict.fromkeys(("do_sample", "temperature", "top_k", "top_p"), "each request has its own"),
    **dict.fromkeys(("output_router_logits", "output_hidden_states", "output_attentions"), "what the library returns"),
    **dict.fromkeys(("return_dict", "use_cache", "chunk_size_feed_forward"), "how the library's own forward runs"),
    **dict.fromkeys(("id2label", "label2id", "num_labels", "problem_type"), "of classifiers"),
    **dict.fromkeys(("architectures", "auto_map", "_name_or_path", "name_or_path"), "names of programs and places"),
    **dict.fromkeys(("transformers_version", "_commit_hash"), "says who wrote the file"),
    "index_share_for_mtp_iteration": "how drafts are made; the model decides which are right",
}
#: Forms of rotation that do not change with the length of a context: kept keys are rotated once.
ROPE_TYPES: Final = ("default", "linear", "yarn", "llama3")
ROPE_FIELDS: Final = frozenset(
    (
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor"),
        *("low_freq_factor", "high_freq_factor"),
    )
)
#: Other families with learned selection, by `model_type`: what each computes that is not implemented.
NOT_SERVED: Final[Mapping[str, str]] = {
    "mistral_large4": "layers that reuse another layer's latent, and layers without rotation",
    "deepseek_v4": "compressed keys, one head of 512 values and a window beside them",
    "deepseek_v41": "rows that few layers write and others share, and selection in two levels",
    "glm5_next": "layers with a recurrent state, and index keys that are pooled",
    "kimi_linear": "layers with a recurrent state",
    "kimi_k3": "layers with a recurrent state, and rows without rotation",
    "qwen4_exp": "layers with a recurrent state, and blocks of keys selected for each head",
    "dots3_note": "layers that attend to a window beside those that select",
}
#: Fields that an error names.
NAMED_MAX: Final = 6


def unserved(config: Mapping[str, Any]) -> str:
    """Return why no family of `config` is served, as text of an error; "" if its `model_type` is."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return ""
    reason = NOT_SERVED.get(kind) if isinstance(kind, str) else None
    return f"model_type {str(kind)[:80]} is not served" + (f": it has {reason}" if reason else "")


def check_fields(config: Mapping[str, Any], file: str, field: str) -> None:
    """Raise ConfigError, with `file` as the value of `field`, where `config` of a served family asks for arithmetic
    that is not computed: by the value of a field, or by a field that no list names."""
    family = FAMILIES[config["model_type"]]
    fixed = {name: values for name, values in {**FIXED, **family.fixed}.items() if name not in family.read}
    present = {name: value for name, value in config.items() if value is not None}
    idle = WITHOUT_EFFECT.keys() | family.without_effect
    known = READ | family.read | fixed.keys() | idle | {"layer_types"}
    if unknown := sorted(name for name in present.keys() - known if present[name] is not False):
        raise _unknown(unknown, file, field)
    for name, values in fixed.items():
        if name in present and present[name] not in values:
            raise _unfit(name, present[name], values, file, field)
    kinds, served = present.get("layer_types", ()), family.layer_kinds
    if other := [kind for kind in kinds if kind not in served] if isinstance(kinds, (list, tuple)) else [kinds]:
        raise _unfit("layer_types", other[0], served, file, field)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(present.get(name), Mapping):
            _check_rope(name, present[name], family.read, file, field)
    if found := family.unfit(present):
        raise _unfit(found.name, found.value, (found.served,), file, field)


def _check_rope(name: str, rope: Mapping[str, Any], read: frozenset[str], file: str, field: str) -> None:
    present = {key: value for key, value in rope.items() if value is not None}
    if unknown := sorted(present.keys() - ROPE_FIELDS):
        raise _unknown([f"{name}.{key}" for key in unknown], file, field)
    for key, values in (("rope_type", ROPE_TYPES), ("type", ROPE_TYPES), ("partial_rotary_factor", (1,))):
        if key in present and key not in read and present[key] not in values:
            raise _unfit(f"{name}.{key}", present[key], values, file, field)


def _unfit(name: str, value: object, values: tuple[object, ...], file: str, field: str) -> ConfigError:
    text = f"{name} {str(value)[:80]} is not served"
    known = f", {' or '.join(map(str, values))} is" if values else ""
    return _refusal(text + known, file, field, "use a checkpoint of the published arithmetic")


def _unknown(names: list[str], file: str, field: str) -> ConfigError:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    named = ", ".join(name[:80] for name in names[:NAMED_MAX])
    text = f"{named}{more}: no such field is known, and a field may change tokens"
    return _refusal(text, file, field, "remove a field that changes none, or use a version that knows the field")


def _refusal(message: str, file: str, field: str, remedy: str) -> ConfigError:
    return ConfigError(message, field=field, value=file, remedy=remedy)
