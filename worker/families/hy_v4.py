"""Hy4: four residual streams, attention sinks, an output gate of its own projection, and shared selections.

Ahead of attention, of an MLP and of the model's last norm, a *connection* makes one hidden state of the streams: each
stream has a weight, the sigmoid of a product with all of them. What attention or the MLP adds goes to every stream by
another such weight; streams are not mixed. Weights and sums are float32.

Heads attend to a sink beside their rows. Attention and indexer rotate halves, the indexer the last values of a head.
Routed experts limit gate and up ahead of their product; shared experts and dense MLPs do not. Logits are float32.

Stored and module names differ: published names are those of layer_tensors. A repository's draft layer
(`model.mtp_layers`) has no class in the model library, and is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from worker.families.base import ATTENTION, HEAD, Module, TensorSpec, in_whole_vectors
from worker.families.latent import LatentFamily

if TYPE_CHECKING:
    from torch import Tensor

#: The published format of calls is not read; reasoning is.
_TEMPLATE: Final = """\
{% for m in messages %}
{% if m.role == 'assistant' %}<|assistant|>\
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{% else %}<|{{ 'system' if m.role == 'system' else 'user' }}|>{{ m.content }}
{% endif %}
{% endfor %}
<|assistant|>{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
"""
#: What stored names hold, and what the library's modules are called.
_MODULES: Final = {
    "self_attn.linear_gate": "self_attn.gate_proj",
    "self_attn.learnable_sink_param": "self_attn.sinks",
    "hc_attn_layer.hc_pre.hc_": "attn_hc.",
    "hc_mlp_layer.hc_pre.hc_": "ffn_hc.",
    "hc_head.hc_head_": "hc_head.hc_",
}
#: Layers that select, behind the first, are this many apart in published models.
_SELECT_EVERY: Final = 4


def _weights(logits: Tensor) -> Tensor:
    """Return the sigmoid of `logits` [..., n], in their dtype."""
    return in_whole_vectors(lambda values: values.sigmoid(), logits)


class _HYV4(LatentFamily):
    def layer_tensors(self, config: Any, prefix: str) -> Iterator[TensorSpec]:
        heads, attention = config.num_attention_heads, f"{prefix}.self_attn"
        shape = heads * config.v_head_dim, config.hidden_size
        yield TensorSpec(f"{attention}.linear_gate.weight", shape, converts=True)
        yield TensorSpec(f"{attention}.learnable_sink_param", (heads,), keeps_float32=True)
        for part in ("attn", "mlp"):
            yield from _connection_tensors(config, f"{prefix}.hc_{part}_layer.hc_pre.hc_", 2)

    def model_tensors(self, config: Any) -> Iterator[TensorSpec]:
        yield from _connection_tensors(config, "model.hc_head.hc_head_", 1)

    def kept_values(self, config: Any) -> int:
        """Return the size of the gate, and of two float32 copies of the residual, in which connections compute."""
        return int(config.num_attention_heads * config.v_head_dim + 4 * config.hc_mult * config.hidden_size)

    def module_name(self, stored: str) -> str:
        for name, module in _MODULES.items():
            stored = stored.replace(name, module)
        return stored

    def streams(self, config: Any) -> int:
        return int(config.hc_mult)

    def connection(self, owner: Module, ahead_of: str) -> Module:
        if ahead_of == HEAD:
            return owner.hc_head
        return owner.attn_hc if ahead_of == ATTENTION else owner.ffn_hc

    def read_residual(self, connection: Module, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        from torch.nn.functional import linear

        streams, flat = connection.hc_mult, residual.float()
        is_head = hasattr(connection, "hc_fn")
        kinds = ("hc_fn", "hc_base", "hc_scale") if is_head else ("fn", "base", "scale")
        weight, base, scale = (getattr(connection, kind) for kind in kinds)
        norm = connection.input_norm(flat)
        logits = (linear(flat, weight) * norm).unflatten(-1, (-1, streams)) * scale.unsqueeze(-1)
        weights = _weights(logits + base.view(-1, streams))
        eps = connection.eps if is_head else connection.hc_eps
        own = (weights[..., 0, :] + eps).unsqueeze(-1)
        state = (own * flat.unflatten(-1, (streams, -1))).sum(-2).to(residual.dtype)
        return state, None if is_head else connection.hc_post_magnitude * weights[..., 1, :] + eps

    def write_residual(self, residual: Tensor, added: Tensor, shares: Tensor) -> Tensor:
        streams = residual.unflatten(-1, (shares.shape[-1], -1)).float()
        total: Tensor = shares.unsqueeze(-1) * added.float().unsqueeze(-2) + streams
        return total.to(residual.dtype).flatten(-2)

    def gate_projection(self, attention: Module) -> Module:
        return attention.gate_proj

    def sinks(self, attention: Module) -> Tensor:
        found: Tensor = attention.sinks
        return found

    def gate_attended(self, attended: Tensor, gate: Tensor) -> Tensor:
        return attended * _weights(gate)

    def expert_limit(self, config: Any) -> float:
        return float(config.swiglu_limit)

    def shape(self, model: Module, normal: Callable[..., Tensor]) -> None:
        """Make streams differ, by weights that hang on them, and give heads sinks that take part of what they attend
        to."""
        connections = [model.model.hc_head]
        for layer in model.model.layers:
            connections += [layer.attn_hc, layer.ffn_hc]
            layer.self_attn.sinks.copy_(normal(layer.self_attn.num_heads) + _SINK)
        for one in connections:
            kinds = ("hc_base", "hc_scale") if hasattr(one, "hc_fn") else ("base", "scale")
            base, scale = (getattr(one, kind) for kind in kinds)
            base.add_(normal(*base.shape) * _BASE_SPREAD)
            scale.fill_(_SCALE)


#: Of tiny checkpoints: the middle of sinks, the spread of a connection's base, and its scale.
_SINK, _BASE_SPREAD, _SCALE = 8.0, 0.5, 0.2


def _connection_tensors(config: Any, prefix: str, kinds: int) -> Iterator[TensorSpec]:
    """Yield the tensors of a connection that has `kinds` weights for each stream."""
    rows = kinds * config.hc_mult
    yield TensorSpec(f"{prefix}fn", (rows, config.hc_mult * config.hidden_size), keeps_float32=True)
    yield TensorSpec(f"{prefix}base", (rows,), keeps_float32=True)
    yield TensorSpec(f"{prefix}scale", (kinds,), keeps_float32=True)


HY_V4: Final = _HYV4(
    model_type="hy_v4",
    name="hy4",
    config_class="HYV4Config",
    models={
        "hy4": {
            **{"num_hidden_layers": 78, "hidden_size": 6144, "num_attention_heads": 64, "num_key_value_heads": 64},
            **{"intermediate_size": 18432, "moe_intermediate_size": 2048, "q_lora_rank": 2048, "index_n_heads": 32},
            **{"max_position_embeddings": 1_048_576},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0},
        },
    },
    read=frozenset({"indexer_types", "hc_mult", "hc_magnitude", "hc_eps", "swiglu_limit"}),
    fixed={
        **{"enable_ihc": (True,), "gated_mla": (True,), "gating_type": ("elementwise",), "learnable_sink": (True,)},
        **{"rope_interleave": (False,), "indexer_rope_interleave": (False,)},
    },
    widths=("hc_mult",),
    numbers=("hc_magnitude", "hc_eps", "swiglu_limit"),
    dense_layers=1,
    interleaves=False,
    index_interleaves=False,
    index_rotates_last=True,
    stacks_experts=True,
    drafts=False,
    unread=("model.mtp_layers.",),
    shares_by_default=True,
    chat="reasoning",
    template=_TEMPLATE,
)
