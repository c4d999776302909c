"""A.X-K2 and A.X-K2-Light: gated norms, an output gate beside the queries, routers that may have no groups.

A layer's input norm, and the norm ahead of experts, is an RMS norm times the sigmoid of a low-rank product of itself.
q_b_proj multiplies the query latent after its norm and before it, side by side; of each head it gives the query, and
values whose sigmoid gates the head's output. Stored and module names differ: published names are those of layout.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from worker.families.base import MLP, Module, TensorSpec, in_whole_vectors
from worker.families.latent import LatentFamily

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.expert_choice import ExpertChoice

#: In the form that the published repository's card names for calls.
_TEMPLATE: Final = """\
{% if tools %}<|system|>
# Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Call one as <tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call>
{% endif %}
{% for m in messages %}
{% if m.role == 'assistant' %}<|assistant|>\
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{% for call in m.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{% endfor %}
{% elif m.role == 'tool' %}<|user|><tool_response>{{ m.content }}</tool_response>
{% else %}<|{{ 'user' if m.role == 'user' else 'system' }}|>{{ m.content }}
{% endif %}
{% endfor %}
<|assistant|>{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}
"""
#: What stored names hold, and what the library's modules are called.
_MODULES: Final = {
    "self_attn.q_b_proj": "self_attn.q_gate_proj",
    "layernorm.W_down": "layernorm.mlp.fc1",
    "layernorm.W_up": "layernorm.mlp.fc2",
}


def _sigmoid(gate: Tensor) -> Tensor:
    """Return the sigmoid of `gate` [..., n] in float32."""
    return in_whole_vectors(lambda values: values.sigmoid(), gate.float())


class _AXK2(LatentFamily):
    def norm_tensors(self, config: Any, prefix: str, ahead_of: str) -> Iterator[TensorSpec]:
        if ahead_of == MLP:
            yield from super().norm_tensors(config, prefix, ahead_of)
            return
        yield TensorSpec(f"{prefix}.norm.weight", (config.hidden_size,))
        yield TensorSpec(f"{prefix}.W_down.weight", (config.gated_norm_rank, config.hidden_size))
        yield TensorSpec(f"{prefix}.W_up.weight", (config.hidden_size, config.gated_norm_rank))

    def query_shape(self, config: Any) -> tuple[int, int]:
        rows, columns = super().query_shape(config)
        return rows + config.num_attention_heads * config.v_head_dim, 2 * columns

    def kept_values(self, config: Any) -> int:
        """Return the size of the gate, and of both forms of the query latent."""
        return int(config.num_attention_heads * config.v_head_dim + 2 * config.q_lora_rank)

    def module_name(self, stored: str) -> str:
        for name, module in _MODULES.items():
            stored = stored.replace(name, module)
        return stored

    def rms_of(self, norm: Module) -> Module:
        return getattr(norm, "norm", norm)

    def gate_norm(self, norm: Module, normed: Tensor) -> Tensor:
        from torch.nn.functional import silu

        gate = norm.mlp.fc2(in_whole_vectors(silu, norm.mlp.fc1(normed)))
        return (normed * _sigmoid(gate)).to(normed.dtype)

    def query_input(self, residual: Tensor, compressed: Tensor) -> Tensor:
        import torch

        return torch.cat((residual, compressed), dim=-1)

    def query_projection(self, attention: Module) -> Module:
        return attention.q_gate_proj

    def split_queries(self, attention: Module, product: Tensor) -> tuple[Tensor, Tensor | None]:
        sizes = attention.qk_head_dim, attention.v_head_dim
        queries, gate = product.unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)
        return queries, gate.flatten(-2)

    def gate_attended(self, attended: Tensor, gate: Tensor) -> Tensor:
        return (attended * _sigmoid(gate)).to(attended.dtype)

    def choice(self, router: Module) -> ExpertChoice | None:
        """Return the choice of kernels; none with groups: experts outside of those of a row score 0 here, not less."""
        from kernels.expert_choice import ExpertChoice

        if router.num_group is not None:
            return None
        counts = router.num_experts, 1, 1, router.top_k
        return ExpertChoice(*counts, router.norm_topk_prob, router.routed_scaling_factor)

    def queries_of(self, attention: Module) -> Tensor:
        rank, rows = attention.q_lora_rank, attention.qk_head_dim + attention.v_head_dim
        found: Tensor = attention.q_gate_proj.weight.view(-1, rows, 2 * rank)
        return found[:, : attention.qk_head_dim, :rank]


AXK2: Final = _AXK2(
    model_type="axk2",
    name="a.x-k2",
    config_class="AXK2Config",
    models={
        "a.x-k2-light": {},
        "a.x-k2": {
            **{"num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 64, "num_key_value_heads": 64},
            **{"intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256},
            **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
            **{"v_head_dim": 128, "n_group": 8, "topk_group": 4, "index_n_heads": 64},
        },
    },
    read=frozenset({"gated_norm_rank"}),
    fixed={
        **{"gated_norm": (True,), "attention_output_gate": (True,), "attn_gate_fused": (True,)},
        **{"indexer_rope_interleave": (False,), "index_topk_freq": (1,)},
    },
    widths=("gated_norm_rank",),
    dense_layers=1,
    index_interleaves=False,
    reads_compressed=True,
    chat="hermes",
    template=_TEMPLATE,
    tiny={"gated_norm_rank": 32, "n_group": None, "topk_group": None},
)
