"""The weights of tiny checkpoints (worker/runners/tiny.py): random, but shaped.

Random weights of the usual scale make a model that tests nothing: its output soon repeats one token, and every token
is answered alike whatever came before. And they make a model that cannot be compared token by token: its indexer knows
nothing of its attention, so that a token at the edge of the top-k, which rounding puts in or out once in a thousand
steps, may be the very one that a head attends to. The weights here are random too, but shaped:

| property                               | how                                                                       |
|----------------------------------------|---------------------------------------------------------------------------|
| the indexer finds what heads attend to | its queries and key are attention's own; heads differ in their values     |
| the edge of the top-k weighs nothing   | sharp attention over keys in which rope dominates                         |
| layers that share a selection agree    | they have their anchor's queries and key; the anchor moves little         |
| output hangs on the context            | values are blind to what all tokens share, lm_head to the token itself    |
| output varies                          | lm_head is blind to what all final states share; its rows have one norm   |
| output can be read, and seldom ends    | lm_head rows other than printable ASCII are zero, end-of-sequence too     |
| selections overlap from step to step   | embeddings share a component, and queries follow it more than the rest    |
| index scores have no exact ties        | half of the index heads ask for the opposite, with negative weights: the  |
|                                        | score grows with query . key below 0 too, where one relu leaves only 0    |

The draft layer attends as the first layers do: it copies the attention of the *leading* layer, the last that uses the
first selection, with the indexer of the first. It sees the tokens one place on, and so foretells what the leading layer
will add to the next state, and nothing else. In a `predictable` checkpoint the other layers, and all MLPs, add
PREDICTABLE_GAIN of what they add else, and most drafts are right. The draft layer's own weights are drawn behind all of
the model's, which are the same with and without it.

Measured with seeds 0 to 2 on prompts of 2,000 to 4,500 tokens of text, 128 new tokens, a hot buffer of 1/8 of the
context: 30 to 60 distinct tokens, hit rates of 0.35 to 0.49, gaps between the two best logits 0.3 in the median. Logits
of absorbed decoding and of the library's generate() differ by 5e-6 in the median and 2e-4 at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kernels.block_weight import BlockFp8
from worker.families.base import TensorSpec
from worker.families.latent import LatentFamily
from worker.families.table import family_of
from worker.weights.layout import EXPERT, PROJECTIONS, stored_tensors
from worker.weights.model import append_draft_layer
from worker.weights.writing import SHARD_BYTES, quantize_blocks, write_repository

BYTES: Final = 256
PRINTABLE: Final = (10, *range(32, 127))

#: Attention logits per standard deviation of query . key, were the key's rope part no larger than the rest.
SHARPNESS: Final = 10.0
ROPE_GAIN: Final = 2.5
#: Likewise where blocks are selected by their best tokens, which differ less than tokens do.
BLOCK_SHARPNESS: Final = 80.0
#: Shares of the common component: in embeddings, and of its direction in queries.
EMBEDDING_COMMON: Final = 0.7
QUERY_COMMON: Final = 0.6
#: Size of what an index head's weight takes from the token, beside the constant 1.
HEAD_WEIGHT_OWN: Final = 0.2
#: What attention and MLP add to the residual, in units of the embedding; times the second in a layer that is followed.
LAYER_GAIN: Final = 0.5
FOLLOWED_GAIN: Final = 0.2
LOGIT_NORM: Final = 2.0
#: Of a predictable checkpoint: what attention, unless its layer leads, and any MLP add, in parts of what they add else.
PREDICTABLE_GAIN: Final = 0.1
#: Share of the hidden state in what the draft layer reads, beside the token's embedding; and of its experts.
DRAFT_STATE_GAIN: Final = 0.03
DRAFT_EXPERT_GAIN: Final = 0.05
#: Random tokens whose final states say what all of them share.
CALIBRATION_TOKENS: Final = 1_024

Normal = Callable[..., Tensor]  # torch.randn with the checkpoint's generator


def random_model(config: Any, seed: int, *, predictable: bool) -> Any:
    """Return the library's model of `config` in float32 with shaped weights, a draft layer among its layers where the
    family's is known."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    _shape(model, generator, predictable=predictable)
    if family_of(config).drafts:
        _add_draft_layer(model, generator)
    return model


def _shape(model: Any, generator: torch.Generator, *, predictable: bool) -> None:
    """All weights of `model`, in place."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    for name, weight in sorted(model.named_parameters()):
        if weight.dim() > 1:
            gain = LAYER_GAIN if "o_proj" in name or "down_proj" in name else 1.0
            weight.copy_(normal(*weight.shape) * (gain / math.sqrt(weight.shape[-1])))
    common, family = normal(model.config.hidden_size), family_of(model.config)
    embedding = model.model.embed_tokens.weight
    embedding.copy_(_mix(EMBEDDING_COMMON, common, normal(*embedding.shape)))
    if isinstance(family, LatentFamily):
        _shape_latent(model.model.layers, common, family, normal)
        family.shape(model, normal)
    else:
        for layer in model.model.layers:
            _shape_grouped(layer.self_attn, common, normal)
    if predictable:
        _let_one_layer_lead(model.model.layers)
    _shape_head(model, common, generator)


def _shape_latent(layers: Any, common: Tensor, family: LatentFamily, normal: Normal) -> None:
    anchor = None
    for layer in layers:
        if layer.self_attn.indexer is not None:
            anchor = layer
            _shape_attention(layer.self_attn, common, family, normal)
            _shape_indexer(layer.self_attn, common, family)
        else:
            _follow(layer.self_attn, anchor, family)


def _shape_grouped(attention: Any, common: Tensor, normal: Normal) -> None:
    """One key for all KV heads, in which rope dominates, and a query for each of them, both of them the indexer's too;
    values of their own. Norms of queries make attention sharp: they are stored as what is added to 1."""
    size, hidden, rotary = attention.head_dim, len(common), attention.config.rotary_dim
    key, values = attention.k_proj.weight, attention.v_proj.weight
    _forget(key, common)
    _forget(values, common)
    key[:rotary] *= ROPE_GAIN
    key.view(-1, size, hidden)[1:] = key[:size]
    groups = len(key) // size
    static = torch.outer(normal(groups * size), common / common.norm())
    queries = _mix(QUERY_COMMON, static, normal(groups * size, hidden)) / math.sqrt(hidden)
    each = attention.num_key_value_groups
    attention.q_proj.weight.copy_(queries.view(groups, 1, size, hidden).expand(-1, each, -1, -1).flatten(0, 2))
    attention.q_norm.weight.fill_(BLOCK_SHARPNESS - 1)
    if attention.indexer is not None:
        attention.indexer.q_proj.weight.copy_(queries)
        attention.indexer.k_proj.weight.copy_(key[:size])


def _shape_attention(attention: Any, common: Tensor, family: LatentFamily, normal: Normal) -> None:
    """One query for all heads, over one key: a nope part made of the latent, and a larger rope part."""
    heads, nope, rank = attention.num_heads, attention.qk_nope_head_dim, attention.q_lora_rank
    down = attention.kv_a_proj_with_mqa.weight
    _forget(down, common)
    down /= math.sqrt(1 - EMBEDDING_COMMON**2)
    down[attention.kv_lora_rank :] *= ROPE_GAIN
    up = attention.kv_b_proj.weight.view(heads, -1, attention.kv_lora_rank)
    up[1:, :nope] = up[0, :nope]
    direction = attention.q_a_proj.weight @ common
    static = torch.outer(normal(attention.qk_head_dim), direction / direction.norm())
    query = _mix(QUERY_COMMON, static, normal(attention.qk_head_dim, rank))
    family.queries_of(attention).copy_(query.expand(heads, -1, -1) * (SHARPNESS / math.sqrt(rank)))


def _shape_indexer(attention: Any, common: Tensor, family: LatentFamily) -> None:
    """The queries and the key of `attention`, rope part where the indexer has it."""
    indexer, nope, latent = attention.indexer, attention.qk_nope_head_dim, attention.kv_lora_rank
    rotary, order = torch.arange(indexer.qk_rope_head_dim), -1 if family.index_rotates_last else 1
    if family.interleaves and not family.index_interleaves:  # halves, where its attention rotates neighbours
        rotary = torch.cat((rotary[0::2], rotary[1::2]))
    down = attention.kv_a_proj_with_mqa.weight
    key = attention.kv_b_proj.weight.view(attention.num_heads, -1, latent)[0, :nope] @ down[:latent]
    indexer.wk.weight.copy_(torch.cat((down[latent:][rotary], key)[::order]))
    queries = family.queries_of(attention)
    wanted = torch.cat((nope + rotary, torch.arange(nope))[::order])
    opposite = slice(attention.num_heads // 2, None)
    indexer.wq_b.weight.copy_(queries[:, wanted].flatten(0, 1))
    indexer.wq_b.weight.view(attention.num_heads, len(wanted), -1)[opposite].neg_()
    weights = indexer.weights_proj.weight
    weights.mul_(HEAD_WEIGHT_OWN).add_(common / common.square().sum())
    weights[opposite].neg_()


def _follow(attention: Any, anchor: Any, family: LatentFamily) -> None:
    """Make a layer that shares a selection attend by the same queries and keys, to values of its own; and make its
    anchor change the residual little, so that they stay the same."""
    source = anchor.self_attn
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        getattr(attention, name).weight.copy_(getattr(source, name).weight)
    family.queries_of(attention).copy_(family.queries_of(source))
    shape, nope = (attention.num_heads, -1, attention.kv_lora_rank), attention.qk_nope_head_dim
    attention.kv_b_proj.weight.view(shape)[:, :nope] = source.kv_b_proj.weight.view(shape)[:, :nope]
    for name, weight in anchor.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.mul_(FOLLOWED_GAIN)


def _leading(layers: Any) -> int:
    """The last layer of the first selection, whose attention the draft layer copies."""
    anchors = [number for number, layer in enumerate(layers) if layer.self_attn.indexer is not None]
    return [*anchors, len(layers)][1] - 1


def _let_one_layer_lead(layers: Any) -> None:
    for number, layer in enumerate(layers):
        for name, weight in layer.named_parameters():
            if "down_proj" in name or ("o_proj" in name and number != _leading(layers)):
                weight.mul_(PREDICTABLE_GAIN)


def _add_draft_layer(model: Any, generator: torch.Generator) -> None:
    """See the head of this file."""
    model.config.num_nextn_predict_layers = 1
    append_draft_layer(model)
    layers, hidden = model.model.layers, model.config.hidden_size
    layer, leading = layers[-1], layers[_leading(layers)]
    layer.to_empty(device="cpu").requires_grad_(False)
    for name, weight in sorted(layer.state_dict().items()):
        if weight.dim() < 2:
            weight.fill_(float(name.endswith("norm.weight")))
            continue
        gain = DRAFT_EXPERT_GAIN if "down_proj" in name else 1.0
        weight.copy_(torch.randn(weight.shape, generator=generator) * (gain / math.sqrt(weight.shape[-1])))
    layer.self_attn.load_state_dict(layers[0].self_attn.state_dict() | leading.self_attn.state_dict())
    layer.input_layernorm.load_state_dict(leading.input_layernorm.state_dict())
    layer.eh_proj.weight[:, hidden:] *= DRAFT_STATE_GAIN
    layer.eh_proj.weight[:, :hidden] = torch.eye(hidden)


def _shape_head(model: Any, common: Tensor, generator: torch.Generator) -> None:
    weight = model.lm_head.weight
    prompt = torch.randint(0, BYTES, (1, CALIBRATION_TOKENS), generator=generator)
    shared = model.model(prompt).last_hidden_state[0, CALIBRATION_TOKENS // 4 :].mean(0)
    tokens = model.model.embed_tokens.weight[list(PRINTABLE)]
    span = torch.linalg.qr(torch.cat((tokens, common[None], shared[None])).T).Q
    weight -= weight @ span @ span.T
    weight *= LOGIT_NORM / weight.norm(dim=1, keepdim=True)
    silent = torch.ones(len(weight), dtype=torch.bool)
    silent[list(PRINTABLE)] = False
    weight[silent] = 0


def _mix(share: float, common: Tensor, own: Tensor) -> Tensor:
    """Return a mix of the size of its parts, when they are unrelated."""
    return share * common + math.sqrt(1 - share**2) * own


def _forget(weight: Tensor, direction: Tensor) -> None:
    """Make a projection blind to `direction`, in place."""
    unit = direction / direction.norm()
    weight -= torch.outer(weight @ unit, unit)


class _Weights:
    """See worker/weights/writing.py: `TensorSource`. The weights of a model, as the published layout names them."""

    def __init__(self, model: Any, *, powers_of_two: bool) -> None:
        self._state: dict[str, Tensor] = model.state_dict()
        self._family = family_of(model.config)
        self._powers_of_two = powers_of_two

    def plain(self, spec: TensorSpec, first: int, count: int) -> Tensor:
        weight = self._weight(spec)
        return weight[first : first + count] if weight.dim() > 1 else weight

    def values(self, spec: TensorSpec, first: int, count: int) -> Tensor:
        return self._blocks(spec, first, count).values

    def scales(self, spec: TensorSpec, first: int, count: int) -> Tensor:
        return self._blocks(spec, first, count).scales

    def _blocks(self, spec: TensorSpec, first: int, count: int) -> BlockFp8:
        return quantize_blocks(self.plain(spec, first, count), powers_of_two=self._powers_of_two)

    def _weight(self, spec: TensorSpec) -> Tensor:
        found = EXPERT.match(spec.name)
        if found is None and (joined := self._family.joined(spec.name)) is not None:
            return self._state[self._family.module_name(joined[0])].chunk(2)[joined[1]]
        if found is None:
            return self._state[self._family.module_name(spec.name)]
        prefix, expert = self._family.module_name(found[1]), found[2]
        if (projection := PROJECTIONS.get(found[3], found[3])) == "down_proj":
            return self._state[f"{prefix}.down_proj"][int(expert)]
        gate, up = self._state[f"{prefix}.gate_up_proj"][int(expert)].chunk(2)
        return gate if projection == "gate_proj" else up


def write_weights(path: Path, model: Any, *, fp8: bool, powers_of_two: bool) -> None:
    """Write the repository of `model` in the published layout, in FP8 in shards of 1 MiB: a weight and its scales
    may lie in two."""
    about = family_of(model.config).published(model.config)
    source, specs = _Weights(model, powers_of_two=powers_of_two), stored_tensors(model.config, fp8=fp8)
    stored: Any = {"fp8": fp8, "powers_of_two": powers_of_two, "shard_bytes": 1 << 20 if fp8 else SHARD_BYTES}
    write_repository(path, about, specs, source, dtype=torch.float32, **stored)
    model.generation_config.save_pretrained(path)
