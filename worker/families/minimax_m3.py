"""MiniMax-M3, the language model alone: grouped-query attention whose KV heads select blocks of tokens.

The first layers are dense: they attend to all tokens. In the others an indexer has a query for each KV head, and one
key a token, which the heads share. A block's score is its best token's; each head attends to the blocks that score
best, and to those just before the token (worker/runners/block_sparse.py).

config.json has the language model in `text_config`, with what is selected in `sparse_attention_config`; the vision
tower is not read. `intermediate_size` is that of experts there. Stored names differ from those of most families
(`stored_name`), and from the library's modules, which hold gate and up of an MLP in one weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from protocol.units import PAGE_TOKENS, TAIL_PAGES
from worker.families.base import Family, TensorSpec, TokenBytes, Unfit, product_tensors

if TYPE_CHECKING:
    from kernels.layout import Geometry
    from kernels.row_bytes import KvKinds

#: In the form of the published template, whose roles and markers engines name.
_TEMPLATE: Final = """\
{% set ns = ']<]minimax[>[' %}
{% macro xml(value) %}{% if value is mapping %}{% for key, one in value.items() %}{{ ns }}<{{ key }}>{{ xml(one) }}\
{{ ns }}</{{ key }}>{% endfor %}{% elif value is string %}{{ value }}{% elif value is iterable %}{% for one in value %}\
{{ ns }}<item>{{ xml(one) }}{{ ns }}</item>{% endfor %}{% else %}{{ value | tojson }}{% endif %}{% endmacro %}
{% if tools %}]~b]system
# Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Call one as {{ ns }}<tool_call>
{{ ns }}<invoke name="NAME">{{ ns }}<KEY>VALUE{{ ns }}</KEY>{{ ns }}</invoke>
{{ ns }}</tool_call>
{% endif %}
{% for m in messages %}
{% if m.role == 'assistant' %}]~b]ai
{% if m.reasoning_content %}<mm:think>{{ m.reasoning_content }}{% endif %}</mm:think>{{ m.content }}
{% if m.tool_calls %}{{ ns }}<tool_call>
{% for call in m.tool_calls %}{{ ns }}<invoke name="{{ call.function.name }}">{{ xml(call.function.arguments) }}\
{{ ns }}</invoke>
{% endfor %}{{ ns }}</tool_call>
{% endif %}
{% elif m.role == 'tool' %}]~b]tool
<response>{{ m.content }}</response>
{% else %}]~b]{{ 'user' if m.role == 'user' else 'system' }}
{{ m.content }}
{% endif %}
{% endfor %}
]~b]ai
{% if enable_thinking is defined and enable_thinking %}<mm:think>{% endif %}\
{% if thinking_mode is defined and thinking_mode == 'disabled' %}</mm:think>{% endif %}

"""
_FULL, _SPARSE = "full_attention", "minimax_m3_sparse"
#: Names of sizes within `sparse_attention_config`, and what the library's class calls them.
_INDEX: Final = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
#: Names of all families, and what the library's class calls the same sizes.
_NAMES: Final = {
    "n_routed_experts": "num_local_experts",
    "intermediate_size": "dense_intermediate_size",
    "moe_intermediate_size": "intermediate_size",
}
#: Tokens of a published block.
_BLOCK_TOKENS: Final = 128
#: Blocks that a head of a tiny checkpoint selects at least: with one it had no choice.
_BLOCKS_LEAST: Final = 2
_NOT_INDEXED: Final = "sparse_attention_config.sparse_disable_index_value"
#: Fields of the whole, that of the vision tower among them, which no token of text hangs on.
_OF_THE_WHOLE: Final = (
    *("vision_config", "image_token_index", "video_token_index", "image_token_id", "video_token_id"),
    *("projector_hidden_size", "projector_hidden_act", "multimodal_projector_bias", "vision_feature_layer"),
    *("vision_feature_select_strategy", "img_token_compression_config", "image_grid_pinpoints", "image_seq_length"),
    *("process_image_mode", "merged_hidden_size"),
)
#: Stored names, by what most families store, in the order in which they are replaced.
_STORED: Final = (
    (re.compile(r"^(model\.|lm_head\.)"), r"language_model.\1"),
    (re.compile(r"\.mlp\.(experts|shared_experts)\."), r".block_sparse_moe.\1."),
    (re.compile(r"\.mlp\.gate\.weight$"), ".block_sparse_moe.gate.weight"),
    (re.compile(r"\.mlp\.gate\.e_score_correction_bias$"), ".block_sparse_moe.e_score_correction_bias"),
    (re.compile(r"(\.experts\.\d+)\.gate_proj\."), r"\1.w1."),
    (re.compile(r"(\.experts\.\d+)\.up_proj\."), r"\1.w3."),
    (re.compile(r"(\.experts\.\d+)\.down_proj\."), r"\1.w2."),
)
#: What stored names hold, and what the library's modules are called.
_MODULES: Final = (
    ("block_sparse_moe.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
    ("block_sparse_moe", "mlp"),
    ("self_attn.index_", "self_attn.indexer."),
)
_HALF: Final = re.compile(r"^(.*\.(?:mlp|shared_experts))\.(gate|up)_proj\.weight$")


class _MiniMaxM3(Family):
    # ---------------------------------------------------------------- config

    def config(self, **fields: Any) -> Any:
        """Return a config of the language model, of fields by the names of all families; others than the library's
        are left out."""
        from dataclasses import fields as fields_of

        from transformers import MiniMaxM3VLConfig, MiniMaxM3VLTextConfig

        known, layers = {one.name for one in fields_of(MiniMaxM3VLTextConfig)}, fields.get("num_hidden_layers", 60)
        text = {_NAMES.get(name, name): value for name, value in fields.items()}
        text = {name: value for name, value in text.items() if name in known}
        if "index_topk" in fields:
            blocks = fields["index_topk"] // fields.get("index_block_size", _BLOCK_TOKENS)
            text["index_topk_blocks"] = max(_BLOCKS_LEAST, blocks)
        dense = min(3, layers - 1)
        default = {
            "layer_types": [_FULL] * dense + [_SPARSE] * (layers - dense),
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
            "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
        }
        whole = MiniMaxM3VLConfig(text_config=default | text, vision_config=fields.get("vision_config"))
        return self.of_library(whole)

    def fields(self, config: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(config.get("text_config"), Mapping):
            return dict(config)
        whole = {name: value for name, value in config.items() if name != "text_config"}
        found = whole | dict(config["text_config"]) | {"model_type": self.model_type}
        if whole.get("tie_word_embeddings"):  # ties embeddings whatever the part says
            found["tie_word_embeddings"] = whole["tie_word_embeddings"]
        sparse = found.pop("sparse_attention_config", None)
        if isinstance(sparse, Mapping):
            found |= {_INDEX.get(name, f"sparse_attention_config.{name}"): value for name, value in sparse.items()}
            _name_kinds(found, "sparse_attention_config.sparse_attention_freq", "layer_types", _FULL, _SPARSE)
        elif sparse is not None:
            found["sparse_attention_config"] = sparse
        _name_kinds(found, "moe_layer_freq", "mlp_layer_types", "dense", "sparse")
        blocks, tokens = found.get("index_topk_blocks"), found.get("index_block_size")
        if type(blocks) is int and type(tokens) is int and blocks and tokens:
            found["index_topk"] = blocks * tokens
        same = {"n_routed_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"}
        return {"n_shared_experts": 1} | found | {name: found[known] for name, known in same.items() if known in found}

    def of_library(self, config: Any) -> Any:
        text = config.text_config
        text.vision_config = config.vision_config.to_dict()
        text.model_type, text.dtype = self.model_type, text.dtype or config.dtype
        text.n_routed_experts, text.n_shared_experts = text.num_local_experts, 1
        text.moe_intermediate_size = text.intermediate_size
        text.index_topk = text.index_topk_blocks * text.index_block_size
        return text

    def published(self, config: Any) -> dict[str, Any]:
        sparse = [int(kind == _SPARSE) for kind in config.layer_types]
        text = {name: getattr(config, name) for name in _PUBLISHED}
        rope = config.rope_parameters
        text |= {"hidden_act": "swigluoai", "rope_theta": rope["rope_theta"]}
        text |= {"partial_rotary_factor": rope["partial_rotary_factor"], **_SWITCHES}
        text["moe_layer_freq"] = [int(kind == "sparse") for kind in config.mlp_layer_types]
        text["sparse_attention_config"] = {
            **{stored: getattr(config, name) for stored, name in _INDEX.items()},
            **{"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0},
            **{"sparse_attention_freq": sparse, "sparse_disable_index_value": sparse},
        }
        return {
            "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
            "model_type": self.model_type,
            "projector_hidden_size": config.hidden_size,
            "text_config": text,
            "vision_config": config.vision_config,
        }

    def unfit(self, config: Mapping[str, Any]) -> Unfit | None:
        return next(_unfit(config), None)

    def shared_selections(self, layers: int, every: int) -> dict[str, Any]:
        """Return the kinds of a tiny checkpoint's layers: the first one is dense."""
        return {"layer_types": [_FULL] + [_SPARSE] * (layers - 1)}

    def selects(self, config: Any, layer: int) -> bool:
        return bool(config.layer_types[layer] == _SPARSE)

    # ---------------------------------------------------------------- memory

    def geometry(self, config: Any, kinds: KvKinds, *, draft_layer: bool) -> Geometry:
        """Return K and V planes for each KV head, in slots that hold a page."""
        from kernels.layout import DENSE, Geometry
        from kernels.row_bytes import PLAIN_BYTES

        value, dense = PLAIN_BYTES[kinds.rows], config.layer_types.count(_FULL)
        return Geometry(
            layers=config.num_hidden_layers,
            row_bytes=config.num_key_value_heads * 2 * config.head_dim * value,
            group_of_layer=(*[DENSE] * dense, *range(config.num_hidden_layers - dense)),
            index_row_bytes=config.index_head_dim * value,
            topk=config.index_topk_blocks * config.index_block_size // PAGE_TOKENS,
            split=config.head_dim * value,
            heads=config.num_key_value_heads,
            slot_tokens=PAGE_TOKENS,
        )

    def token_bytes(self, config: Any, value: int) -> TokenBytes:
        """Return projections and index queries while heads select; queries and what they attend to after it."""
        heads, pairs, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        pages = 4 * pairs * config.index_topk // PAGE_TOKENS
        row, keys = 2 * pairs * size, (config.index_n_heads + 1) * config.index_head_dim
        return TokenBytes(
            kept=value * 2 * size + pages,
            unit=pages,
            selecting=value * (heads * size + row + keys),
            attending=value * 2 * heads * size,
            row=value * (row + config.index_head_dim),
        )

    # ---------------------------------------------------------------- weights

    def attention_tensors(self, config: Any, prefix: str, *, selects: bool) -> Iterator[TensorSpec]:
        hidden, size = config.hidden_size, config.head_dim
        for name, heads in (("q", config.num_attention_heads), *((one, config.num_key_value_heads) for one in "kv")):
            yield from product_tensors(f"{prefix}.{name}_proj", heads * size, hidden)
        yield from product_tensors(f"{prefix}.o_proj", hidden, config.num_attention_heads * size)
        yield from (TensorSpec(f"{prefix}.{name}_norm.weight", (size,)) for name in "qk")
        if selects:
            for name, heads in (("q", config.index_n_heads), ("k", 1)):
                yield from product_tensors(f"{prefix}.index_{name}_proj", heads * config.index_head_dim, hidden)
                yield TensorSpec(f"{prefix}.index_{name}_norm.weight", (config.index_head_dim,))

    def mlp_widths(self, config: Any) -> tuple[int, int]:
        return config.dense_intermediate_size, config.shared_intermediate_size

    def stored_name(self, name: str) -> str:
        for pattern, stored in _STORED:
            name = pattern.sub(stored, name)
        return name

    def module_name(self, stored: str) -> str:
        stored = stored.removeprefix("language_model.")
        for name, module in _MODULES:
            stored = stored.replace(name, module)
        return stored

    def joined(self, stored: str) -> tuple[str, int] | None:
        found = _HALF.match(stored)
        return None if found is None else (f"{found[1]}.gate_up_proj.weight", int(found[2] == "up"))


def _name_kinds(fields: dict[str, Any], flags: str, name: str, off: str, on: str) -> None:
    """Make a list of kinds `name` of one of `flags`, unless both are there; what is no list of flags stays."""
    found = fields.get(flags)
    if isinstance(found, list) and all(flag in (0, 1) for flag in found):
        del fields[flags]
        kinds = [on if flag else off for flag in found]
        fields[name] = fields.get(name) or kinds


def _unfit(config: Mapping[str, Any]) -> Iterator[Unfit]:
    """Yield fields that do not go together, or that nothing here computes."""
    layers, kinds = config.get("num_hidden_layers"), config.get("layer_types", ())
    for name in ("layer_types", "mlp_layer_types"):
        found = config.get(name)
        if not isinstance(found, list) or not found or (layers is not None and len(found) != layers):
            yield Unfit(name, found, "a list with an entry for each layer")
            return
    dense = kinds.index(_SPARSE) if _SPARSE in kinds else len(kinds)
    if _FULL in kinds[dense:] or dense == len(kinds):
        yield Unfit("layer_types", kinds, f"{_FULL} in the first layers, and {_SPARSE} in all others,")
    not_indexed = config.get(_NOT_INDEXED)
    if not_indexed is not None and not_indexed != [int(kind == _SPARSE) for kind in kinds]:
        yield Unfit(_NOT_INDEXED, not_indexed, "1 in the layers that select, and 0 in others,")
    if (block := config.get("index_block_size", PAGE_TOKENS)) % PAGE_TOKENS:
        yield Unfit("index_block_size", block, f"a multiple of {PAGE_TOKENS}")
    pairs = config.get("num_key_value_heads", 1)
    if (heads := config.get("num_attention_heads", pairs)) % pairs:
        yield Unfit("num_key_value_heads", pairs, f"a divisor of {heads}, num_attention_heads,")
    if (index := config.get("index_n_heads", pairs)) != pairs:
        yield Unfit("index_n_heads", index, f"{pairs}, as num_key_value_heads is,")
    if (near := config.get("index_local_blocks", 0)) > (blocks := config.get("index_topk_blocks", near)):
        yield Unfit("index_local_blocks", near, f"a number up to index_topk_blocks, {blocks},")
    rope = config.get("rope_parameters")
    part = (rope if isinstance(rope, Mapping) else {}).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if type(part) not in (int, float) or not 0 < part <= 1:
        yield Unfit("partial_rotary_factor", part, "a part above 0, at most 1,")
        return
    size = int(config.get("head_dim", 0) * part)
    if config.get("rotary_dim", size) != size:
        yield Unfit("rotary_dim", config["rotary_dim"], f"{size}, as head_dim times partial_rotary_factor is,")


#: Fields of a published `text_config` that are called as in the library's class.
_PUBLISHED: Final = (
    *("vocab_size", "hidden_size", "intermediate_size", "dense_intermediate_size", "shared_intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("rms_norm_eps", "num_local_experts", "num_experts_per_tok", "n_shared_experts", "routed_scaling_factor"),
    *("rotary_dim", "swiglu_alpha", "swiglu_limit", "bos_token_id", "eos_token_id", "pad_token_id"),
    "tie_word_embeddings",
)
_SWITCHES: Final = {
    **{"use_gemma_norm": True, "use_qk_norm": True, "qk_norm_type": "per_head"},
    **{"scoring_func": "sigmoid", "use_routing_bias": True},
}

MINIMAX_M3: Final = _MiniMaxM3(
    model_type="minimax_m3_vl",
    name="minimax-m3",
    config_class="MiniMaxM3VLConfig",
    models={"minimax-m3": {"max_position_embeddings": 1_048_576}},
    read=frozenset(
        {
            *("head_dim", "rotary_dim", "partial_rotary_factor", "dense_intermediate_size", "swiglu_alpha"),
            "shared_intermediate_size",
            *("swiglu_limit", "index_block_size", "index_topk_blocks", "index_local_blocks", _NOT_INDEXED),
        }
    ),
    fixed={
        **{name: (value,) for name, value in _SWITCHES.items()},
        **{"hidden_act": ("swigluoai", "silu"), "n_shared_experts": (1,), "swiglu_beta": (1,)},
        "sparse_attention_config.use_sparse_attention": (True,),
        "sparse_attention_config.sparse_score_type": ("max",),
        "sparse_attention_config.sparse_init_block": (0,),
    },
    without_effect=frozenset({*_OF_THE_WHOLE, "num_mtp_modules", "router_jitter_noise"}),
    layer_kinds=(_FULL, _SPARSE),
    sizes=(
        *("num_key_value_heads", "head_dim", "index_n_heads", "index_head_dim", "index_block_size"),
        *("index_topk_blocks", "dense_intermediate_size", "shared_intermediate_size"),
    ),
    row_sizes=("num_key_value_heads", "head_dim", "index_head_dim", "index_block_size", "index_topk_blocks"),
    numbers=("swiglu_alpha", "swiglu_limit"),
    on_gpu=False,
    quantizes=False,
    keeps_kv_exact=True,
    drafts=False,
    unread=(
        *("vision_tower.", "multi_modal_projector.", "patch_merge_mlp."),
        *("mtp.", "language_model.mtp.", "language_model.model.mtp."),
    ),
    chat="minimax",
    topk_least=_BLOCKS_LEAST * _BLOCK_TOKENS,
    hot_multiple=TAIL_PAGES * PAGE_TOKENS,
    template=_TEMPLATE,
    tiny={
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "rotary_dim": 16, "index_n_heads": 2},
        **{"index_head_dim": 32, "index_block_size": _BLOCK_TOKENS, "shared_intermediate_size": 64},
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        "vision_config": {
            **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"image_size": 28, "patch_size": 14},
        },
    },
)
