"""The tensors of a published repository: names, shapes, and which of them FP8 repositories convert. Pure.

    model.embed_tokens  lm_head  model.norm
    model.layers.N.input_layernorm  post_attention_layernorm
    model.layers.N.self_attn.{q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj} and their norms
    model.layers.N.self_attn.indexer.{wq_b, wk, weights_proj, k_norm}       layers with an indexer of their own
    model.layers.N.mlp.{gate, up, down}_proj                                dense layers
    model.layers.N.mlp.gate, mlp.shared_experts.*, mlp.experts.E.*_proj     layers with experts

and, behind the last layer, the draft layer (MTP module), in config.json `num_nextn_predict_layers`: a layer with an
indexer and experts, and

    model.layers.N.{enorm, hnorm, eh_proj, shared_head.norm}
    model.layers.N.{embed_tokens, shared_head.head}                         the model's own, which some publish twice

A family may have more (worker/families/base.py). Some store a layer's experts in two tensors, mlp.experts.gate_up_proj
[E, 2 * I, hidden] and mlp.experts.down_proj [E, hidden, I], which are read as one of each expert (shards.py).

An FP8 repository stores a converted weight [N, K] as e4m3 values and, under the name with `_scale_inv`, a scale for
each block of 128 x 128; the last block of a row or column may be smaller. eh_proj is not converted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Final

from kernels.expert_choice import CHOICE_BYTES, state_bytes
from protocol.errors import ConfigError
from protocol.messages import GROUP_SIZE_MAX
from worker.families.base import ATTENTION, EXPERTS, MLP, TensorSpec, product_tensors
from worker.families.table import family_of
from worker.weights.dimensions import bounds_of
from worker.weights.quantization import require_quantizes

SCALE_SUFFIX: Final = "_scale_inv"
#: Weights that FP8 repositories convert: the products of attention, of its indexer, and of MLPs.
CONVERTED: Final = re.compile(
    r"\.(q_a_proj|q_b_proj|q_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|wq_b|wk|gate_proj|up_proj|down_proj)\.weight$"
)
EXPERT: Final = re.compile(
    r"^((?:language_model\.)?model\.layers\.\d+\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\."
    r"(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight$"
)
#: What some families call the projections of an expert.
PROJECTIONS: Final = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
LAYER: Final = re.compile(r"^(?:language_model\.)?model\.layers\.(\d+)\.")
#: Fields that shapes follow from, beside those of a family.
DIMENSIONS: Final = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "n_shared_experts", "n_routed_experts"),
)
#: Of the draft layer, those that it shares with the model.
SHARED_BY_DRAFT: Final = ("embed_tokens.weight", "shared_head.head.weight")
BYTES: Final = {"float32": 4, "bfloat16": 2}
#: Rows of an exchange begin at multiples of this many bytes.
EXCHANGED_ROW_ALIGNMENT: Final = 16
#: Rows of all ranks that experts compute at once (worker/group/exchange.py: PIECE_ROWS).
EXPERT_ROWS_MAX: Final = 4_096
#: Likewise of experts whose rows are quantized (kernels/cuda/deep_gemm.py: PIECE_TOKENS, ROWS_MANY); an expert's rows
#: end in a tile.
QUANTIZED_EXPERT_ROWS_MAX: Final = 16_384
EXPERT_TILE_ROWS: Final = 128
#: Prompt passes that are held: two that are open, and one whose first token waits for a mask.
PASSES_HELD: Final = 3
#: What prompt_topk holds on a GPU: lists (kernels/cuda/prompt_index.py: scratch_bytes), or scores in float32
#: (kernels/cuda/prompt_topk.py: SCORES_MAX).
TOPK_SCRATCH_BYTES: Final = 4 << 24
#: Rows that a rank's split pass sends to the others at once (worker/runners/splitting.py).
EARLIER_ROWS_MAX: Final = 16_384
#: Of a token id on the device.
TOKEN_BYTES: Final = 8


@dataclass(frozen=True)
class ExpertShare:
    """The experts that this process holds: `count` of them from `first` on."""

    first: int
    count: int

    def __contains__(self, expert: object) -> bool:
        return isinstance(expert, int) and self.first <= expert < self.first + self.count

    @classmethod
    def of(cls, rank: int, size: int, total: int) -> ExpertShare:
        """The share of rank `rank` of `size`, which hold equal parts of `total` experts, in the order of ranks.

        Raises ConfigError, with the sizes that are possible, unless the experts can be divided evenly.
        """
        if size < 1 or total % size:
            raise ConfigError(
                f"{total} experts cannot be divided evenly among that many ranks",
                field="worker.group_size",
                value=size,
                remedy=f"use one of {', '.join(map(str, group_sizes(total)))}",
            )
        if not 0 <= rank < size:
            raise ConfigError(
                f"not a rank of a group of {size}",
                field="worker.group_rank",
                value=rank,
                remedy=f"use 0 to {size - 1}",
            )
        return cls(rank * (total // size), total // size)


def group_sizes(total: int) -> list[int]:
    """Sizes of groups whose ranks hold equal parts of `total` experts, ascending."""
    return [size for size in range(1, min(total, GROUP_SIZE_MAX) + 1) if total % size == 0]


def tensors_of(config: Any, experts: ExpertShare | None = None, *, draft_layer: bool = False) -> Iterator[TensorSpec]:
    """All tensors of the model that `config` describes; of routed experts those of the share. `draft_layer`: with those
    of the draft layer, what it shares with the model apart.

    `config` has the fields of config.json as attributes. Raises ConfigError naming a field that is absent or unfit.
    """
    family = family_of(config)
    _require_dimensions(config, (*DIMENSIONS, *family.sizes, *family.widths))
    if draft_layer:
        require_draft_layer(config)
    for spec in _tensors(config, experts or ExpertShare(0, config.n_routed_experts), draft_layer):
        yield spec._replace(name=family.stored_name(spec.name), converts=spec.converts and family.quantizes)


def _tensors(config: Any, experts: ExpertShare, draft_layer: bool) -> Iterator[TensorSpec]:
    """Yield the tensors by the names of most families."""
    yield TensorSpec("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    for layer in range(config.num_hidden_layers):
        yield from _layer(config, layer, experts)
    yield TensorSpec("model.norm.weight", (config.hidden_size,))
    yield from family_of(config).model_tensors(config)
    yield TensorSpec("lm_head.weight", (config.vocab_size, config.hidden_size))
    if draft_layer:
        yield from _draft_layer(config, experts)


def stored_tensors(config: Any, *, fp8: bool) -> Iterator[TensorSpec]:
    """Yield the tensors of a repository that is written here, the draft layer's among them, if there may be one.

    Experts are stacked where the family stores them so; in FP8 each has tensors of its own. Raises ConfigError where no
    FP8 repository of the family is served.
    """
    family = family_of(config)
    if fp8:
        require_quantizes(family, "fp8", True)
    for spec in tensors_of(config, draft_layer=family.drafts):
        found = EXPERT.match(spec.name) if family.stacks_experts and not fp8 else None
        if found is None:
            yield spec
        elif found[2] == "0" and found[3] != "up_proj":
            name, (rows, columns) = found[3].replace("gate", "gate_up"), spec.shape
            rows *= 2 if found[3] == "gate_proj" else 1
            yield TensorSpec(f"{found[1]}.{name}", (config.n_routed_experts, rows, columns))


def require_draft_layer(config: Any) -> None:
    """Raise ConfigError unless `config` says that the model has one draft layer, of a family whose form is known."""
    layers = getattr(config, "num_nextn_predict_layers", None)
    if not family_of(config).drafts:
        raise ConfigError(
            "the draft layer of this family is not served",
            field="config.json model_type",
            value=config.model_type,
            remedy="draft no tokens",
        )
    if layers != 1 or isinstance(layers, bool):
        raise ConfigError(
            "drafts need a model with one MTP layer",
            field="config.json num_nextn_predict_layers",
            value=layers,
            remedy="draft no tokens, or use a checkpoint with that layer",
        )


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a weight [..., N, K]."""
    return (*shape[:-2], ceil(shape[-2] / block[0]), ceil(shape[-1] / block[1]))


def is_of_mtp(name: str, layers: int) -> bool:
    """Whether a tensor belongs to a draft layer (MTP module), which follow the model's `layers`."""
    found = LAYER.match(name)
    return found is not None and int(found[1]) >= layers


def has_experts(config: Any, layer: int) -> bool:
    """Whether the MLP of `layer` is a mixture of experts."""
    if layer >= config.num_hidden_layers:
        return True
    kinds, dense = getattr(config, "mlp_layer_types", None), getattr(config, "first_k_dense_replace", None)
    if kinds:
        return bool(kinds[layer] == "sparse")
    return layer >= (family_of(config).dense_layers if dense is None else int(dense))


def has_float32_routers(config: Any) -> bool:
    """Return whether weights of routers are held in float32, whatever they are stored in (`moe_router_dtype`).

    Products of a router are float32 in any case: of bfloat16 by bfloat16 they are exact.
    """
    return str(getattr(config, "moe_router_dtype", None)) == "float32"


def has_indexer(config: Any, layer: int) -> bool:
    """Return whether `layer` selects for itself and has an indexer's weights, as the draft layer does."""
    return family_of(config).selects(config, layer)


def weights_bytes(
    config: Any,
    dtype: str,
    block: tuple[int, int] | None,
    *,
    on_gpu: bool,
    experts: ExpertShare | None = None,
    draft_layer: bool = False,
) -> Mapping[str, int]:
    """Bytes of the weights as one process holds them, by dtype: `float8_e4m3fn`, `dtype`, `float32`.

    `block`: the repository's blocks, None where it is not quantized. On a GPU converted weights stay FP8; on a CPU they
    are decoded at load. The two halves of kv_b_proj are held in `dtype`, on a CPU beside the weight itself. `experts`:
    the share of a rank, by default all. `draft_layer`: with the draft layer's. Weights of routers count in float32 if
    `moe_router_dtype` says so, else in `dtype`; of a repository that stores float32 without that field a worker may
    hold float32 ones too (model.py: `keeps_exact`).
    """
    held = {"float8_e4m3fn": 0, dtype: 0, "float32": 0}
    for spec in tensors_of(config, experts, draft_layer=draft_layer):
        count = prod(spec.shape)
        halves = spec.name.endswith("kv_b_proj.weight")
        if spec.keeps_float32:
            held["float32"] += 4 * count
        elif on_gpu and block is not None and spec.converts and not halves:
            held["float8_e4m3fn"] += count
            held["float32"] += 4 * prod(scale_shape(spec.shape, block))
        else:
            held[dtype] += BYTES[dtype] * count * (2 if halves and not on_gpu else 1)
    return {name: size for name, size in held.items() if size}


def exchange_bytes(
    config: Any, dtype: str, group_size: int, rows: int, *, deterministic: bool = False, quantized: bool = False
) -> int:
    """Bytes of the buffers in which the ranks of a group exchange rows, on each rank, for at most `rows` rows of each.

    They hold a rank's rows and those of all ranks, with their choices of experts, and twice the partial sums: those
    that a rank has computed and those that it is given. Sums are float32 in deterministic mode, else of `dtype`. A
    group of one rank exchanges nothing. `quantized`: rows travel as e4m3.
    """
    if group_size == 1:
        return 0
    _require_dimensions(config, ("hidden_size", "num_experts_per_tok"))
    sum_bytes = BYTES["float32"] if deterministic else BYTES[dtype]
    values = state_bytes(config.hidden_size, 1 if quantized else BYTES[dtype])
    row_bytes = exchanged_row_bytes(values, config.num_experts_per_tok)
    return int(rows * ((group_size + 1) * row_bytes + 2 * group_size * config.hidden_size * sum_bytes))


def prompt_scratch_bytes(
    config: Any, rows_max: int, pass_tokens: int, passes: int = PASSES_HELD, *, dtype: str = "bfloat16", ranks: int = 1
) -> int:
    """Bytes that prompts take on a GPU beside weights and KV, at most: `passes` open passes of `pass_tokens`, and one
    block of `rows_max` rows on its way through a layer.

    A pass keeps tokens, hidden states, angles and selection. A block holds its states, their sum and its norm, its
    selection, its projections while tokens select, its queries, latents and values while they attend, and then what an
    MLP or experts make of it; the largest of the last three counts. The experts of a group's `ranks` take rows of all
    of them, EXPERT_ROWS_MAX together or those of one rank. In a pass that ranks split, they gather rows and index keys,
    and behind the last layer states.
    Raises ConfigError naming a field that is absent or unfit.
    """
    family = family_of(config)
    _require_dimensions(config, (*DIMENSIONS, *family.sizes, "index_topk", "num_experts_per_tok"))
    value, hidden = BYTES[dtype], config.hidden_size
    token, state = family.token_bytes(config, value), hidden * family.streams(config)
    kept = value * state + token.kept + TOKEN_BYTES
    selecting = rows_max * token.selecting + TOPK_SCRATCH_BYTES
    attending = rows_max * token.attending
    computing = value * max(_mlp_values(config, rows_max), _experts_values(config, rows_max, ranks))
    computing = max(computing, _quantized_experts_bytes(config, rows_max, ranks, value))
    residual = rows_max * (value * (2 * state + hidden) + token.unit)
    gathering = 0
    if ranks > 1:
        gathered, sent = pass_tokens + ranks, ceil(pass_tokens / ranks)
        residual += (gathered + sent + EARLIER_ROWS_MAX) * token.row + TOPK_SCRATCH_BYTES
        gathering = value * state * (gathered + sent)
    return int(passes * pass_tokens * kept + residual + max(selecting, attending, computing, gathering))


def _mlp_values(config: Any, rows: int) -> int:
    """Values that a layer without experts makes of `rows`: gate, up, their product, output."""
    return int(rows * (3 * family_of(config).mlp_widths(config)[0] + config.hidden_size))


def _experts_values(config: Any, rows: int, ranks: int) -> int:
    """Values that experts make of `rows` of each rank: for each choice what they read, gate and up, their product, and
    the output before and after its weight; beside them the output of shared experts."""
    together = min(ranks * rows, max(rows, EXPERT_ROWS_MAX))
    chosen = config.num_experts_per_tok * 3 * (config.hidden_size + config.moe_intermediate_size)
    return int(together * chosen + rows * config.hidden_size)


def _quantized_experts_bytes(config: Any, rows: int, ranks: int, value: int) -> int:
    """Bytes of what experts make of `rows` of each rank where activations are quantized: for each choice two of what
    they read, gate and up, their product, and the output, at a time; beside them the output of shared experts."""
    together, middle = min(ranks * rows, QUANTIZED_EXPERT_ROWS_MAX), config.moe_intermediate_size
    read, gated = (state_bytes(values, 1) for values in (config.hidden_size, middle))
    both, output = 2 * value * middle, value * config.hidden_size
    padded = together * config.num_experts_per_tok + EXPERT_TILE_ROWS * ceil(config.n_routed_experts / ranks)
    return int(padded * max(read + both, both + gated, gated + output) + rows * output)


def exchanged_row_bytes(values_bytes: int, choices: int) -> int:
    """Bytes of one row of an exchange: a hidden state of `values_bytes`, `choices` choices, and padding."""
    return ceil((values_bytes + choices * CHOICE_BYTES) / EXCHANGED_ROW_ALIGNMENT) * EXCHANGED_ROW_ALIGNMENT


def _layer(config: Any, number: int, experts: ExpertShare) -> Iterator[TensorSpec]:
    prefix, hidden, family = f"model.layers.{number}", config.hidden_size, family_of(config)
    ahead_of = EXPERTS if has_experts(config, number) else MLP
    yield from family.norm_tensors(config, f"{prefix}.input_layernorm", ATTENTION)
    yield from family.attention_tensors(config, f"{prefix}.self_attn", selects=has_indexer(config, number))
    yield from family.layer_tensors(config, prefix)
    yield from family.norm_tensors(config, f"{prefix}.post_attention_layernorm", ahead_of)
    dense, shared = family.mlp_widths(config)
    if ahead_of == MLP:
        yield from _mlp(f"{prefix}.mlp", hidden, dense)
        return
    yield TensorSpec(
        f"{prefix}.mlp.gate.weight", (config.n_routed_experts, hidden), keeps_float32=has_float32_routers(config)
    )
    yield TensorSpec(f"{prefix}.mlp.gate.e_score_correction_bias", (config.n_routed_experts,), keeps_float32=True)
    yield from _mlp(f"{prefix}.mlp.shared_experts", hidden, shared)
    for expert in range(experts.first, experts.first + experts.count):
        yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, config.moe_intermediate_size)


def _draft_layer(config: Any, experts: ExpertShare) -> Iterator[TensorSpec]:
    prefix, hidden = f"model.layers.{config.num_hidden_layers}", config.hidden_size
    yield TensorSpec(f"{prefix}.enorm.weight", (hidden,))
    yield TensorSpec(f"{prefix}.hnorm.weight", (hidden,))
    yield TensorSpec(f"{prefix}.eh_proj.weight", (hidden, 2 * hidden))
    yield from _layer(config, config.num_hidden_layers, experts)
    yield TensorSpec(f"{prefix}.shared_head.norm.weight", (hidden,))


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[TensorSpec]:
    yield from product_tensors(f"{prefix}.gate_proj", inner, hidden)
    yield from product_tensors(f"{prefix}.up_proj", inner, hidden)
    yield from product_tensors(f"{prefix}.down_proj", hidden, inner)


def _require_dimensions(config: Any, names: tuple[str, ...]) -> None:
    for name in names:
        value, (least, most) = getattr(config, name, None), bounds_of(name)
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(
                f"must be a whole number from {least} to {most}",
                field=f"config.json {name}",
                value=value,
                remedy="use the config.json of the whole model",
            )
