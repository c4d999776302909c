"""Families with multi-head latent attention over rows that a lightning indexer selects.

RMS norms, and MLPs or mixtures of experts, as worker/runners/attention.py and worker/runners/layers.py compute them
from the model library's modules. A family says in which names, sizes and steps it differs.

A layer, with the hooks in the order of their use:

    residual (connection, read_residual) -> input norm (rms_of, gate_norm) -> q_a_proj, kv_a_proj -> query norm
    -> query_input -> query_projection -> split_queries, gate_projection
    -> selection (index_interleaves, index_rotates_last)
    -> attention (interleaves, sinks) -> gate_attended -> o_proj, residual (write_residual, connection, read_residual)
    -> norm ahead of the MLP (rms_of, gate_norm) -> MLP, or router (choice) and experts -> residual (write_residual)

The residual is one stream of hidden states [N, S, hidden], or several side by side: [N, S, C * hidden].

N batch, S tokens, H heads, k qk_head_dim, v v_head_dim, q q_lora_rank, C residual streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from protocol.errors import ConfigError
from worker.families.base import Family, Module, TensorSpec, TokenBytes, Unfit, product_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.expert_choice import ExpertChoice
    from kernels.layout import Geometry
    from kernels.row_bytes import KvKinds

_SIZES: Final = (
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("index_head_dim", "index_n_heads"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentFamily(Family):
    """Facts of such a family, and hooks with the defaults that the head of this file describes."""

    layer_kinds: tuple[str, ...] = ("indexed_attention", "deepseek_sparse_attention")
    sizes: tuple[str, ...] = _SIZES
    row_sizes: tuple[str, ...] = ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")
    interleaves: bool = True  # attention rotates neighbours; else halves
    index_interleaves: bool  # the indexer rotates neighbours; else halves
    index_rotates_last: bool = False  # the indexer rotates the last values of a head; else the first
    reads_compressed: bool = False  # queries are made of more than the normed product of q_a_proj

    def unfit(self, config: Mapping[str, Any]) -> Unfit | None:
        heads, pairs = config.get("num_attention_heads"), config.get("num_key_value_heads")
        if heads is not None and pairs is not None and heads != pairs:
            return Unfit("num_key_value_heads", pairs, str(heads))
        return None

    # ---------------------------------------------------------------- memory

    def geometry(self, config: Any, kinds: KvKinds, *, draft_layer: bool) -> Geometry:
        """Return one row of latent and rope a token; the draft layer is in a group of its own. Raises ConfigError where
        the first layer has no indexer to share."""
        from kernels.layout import Geometry
        from kernels.row_bytes import index_key_shape, kv_row_shape

        sharing = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
        if sharing[0] != "full":
            raise ConfigError(
                "the first layer has no selection to share",
                field="indexer_types",
                value=sharing,
                remedy="start with a full layer",
            )
        groups, group = [], -1
        for kind in sharing[: config.num_hidden_layers]:
            group += kind == "full"
            groups.append(group)
        if draft_layer:
            groups.append(group + 1)
        return Geometry(
            layers=len(groups),
            row_bytes=kv_row_shape(kinds.rows, config.kv_lora_rank, config.qk_rope_head_dim).row_bytes,
            group_of_layer=tuple(groups),
            index_row_bytes=index_key_shape(kinds.keys, config.index_head_dim).row_bytes,
            topk=config.index_topk,
        )

    def token_bytes(self, config: Any, value: int) -> TokenBytes:
        """Return projections while tokens select; queries, latents and values while they attend."""
        heads, row = config.num_attention_heads, config.kv_lora_rank + config.qk_rope_head_dim
        query = sum(self.query_shape(config)) + heads * row  # and against rows
        index = 2 * config.index_n_heads * config.index_head_dim  # turned, and in the order of the kernel
        return TokenBytes(
            kept=value * 2 * config.qk_rope_head_dim + 4 * config.index_topk,
            unit=value * self.kept_values(config) + 4 * config.index_topk,
            selecting=value * (query + index + config.hidden_size + 2 * row),
            attending=value * heads * (row + config.kv_lora_rank + config.v_head_dim),
            row=value * (row + config.index_head_dim),
        )

    # ---------------------------------------------------------------- weights

    def attention_tensors(self, config: Any, prefix: str, *, selects: bool) -> Iterator[TensorSpec]:
        heads, hidden, latent = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
        has_bias = bool(getattr(config, "attention_bias", False))
        yield from product_tensors(f"{prefix}.q_a_proj", config.q_lora_rank, hidden, has_bias)
        yield TensorSpec(f"{prefix}.q_a_layernorm.weight", (config.q_lora_rank,))
        yield from product_tensors(f"{prefix}.q_b_proj", *self.query_shape(config))
        yield from product_tensors(f"{prefix}.kv_a_proj_with_mqa", latent + config.qk_rope_head_dim, hidden, has_bias)
        yield TensorSpec(f"{prefix}.kv_a_layernorm.weight", (latent,))
        yield from product_tensors(f"{prefix}.kv_b_proj", heads * (config.qk_nope_head_dim + config.v_head_dim), latent)
        yield from product_tensors(f"{prefix}.o_proj", hidden, heads * config.v_head_dim, has_bias)
        if not selects:
            return
        prefix = f"{prefix}.indexer"
        yield from product_tensors(f"{prefix}.wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        yield from product_tensors(f"{prefix}.wk", config.index_head_dim, hidden)
        yield TensorSpec(f"{prefix}.k_norm.weight", (config.index_head_dim,))
        yield TensorSpec(f"{prefix}.k_norm.bias", (config.index_head_dim,))
        yield TensorSpec(f"{prefix}.weights_proj.weight", (config.index_n_heads, hidden))

    def query_shape(self, config: Any) -> tuple[int, int]:
        """Return the shape [rows, columns] of q_b_proj as it is stored."""
        return config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), config.q_lora_rank

    def kept_values(self, config: Any) -> int:
        """Return how many values a token keeps beside its queries until its layer has attended."""
        return 0

    # ---------------------------------------------------------------- residual

    def connection(self, owner: Module, ahead_of: str) -> Module | None:
        """Return the module that reads the residual ahead of ATTENTION or MLP in the layer `owner`, or ahead of the
        HEAD of the model `owner`; None where the residual is one stream, which is read as it is."""
        return None

    def read_residual(self, connection: Module, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what a norm takes of `residual` [N, S, C * hidden], [N, S, hidden], and by which shares
        float32[N, S, C] what becomes of that is added to each stream. Rows stay apart."""
        return residual, None

    def write_residual(self, residual: Tensor, added: Tensor, shares: Tensor) -> Tensor:
        """Return `residual` [N, S, C * hidden] and `added` [N, S, hidden] by the `shares` of `read_residual`."""
        return residual + added

    # ---------------------------------------------------------------- layers

    def rms_of(self, norm: Module) -> Module:
        """Return the RMS norm within a layer's norm; itself where nothing follows it."""
        return norm

    def gate_norm(self, norm: Module, normed: Tensor) -> Tensor:
        """Return the output of `norm` for the output `normed` [..., hidden] of the RMS norm within. Rows stay apart
        (`in_whole_vectors`)."""
        return normed

    def query_input(self, residual: Tensor, compressed: Tensor) -> Tensor:
        """Return the input of the query projection, of the normed product `residual` [N, S, q] of q_a_proj and the
        product itself. Asked where `reads_compressed`."""
        return residual

    def query_projection(self, attention: Module) -> Module:
        """Return the module that is stored as q_b_proj."""
        return attention.q_b_proj

    def split_queries(self, attention: Module, product: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return queries [N, S, H, k] of the query projection's `product` [N, S, ...], and a gate, if there is one."""
        return product.unflatten(-1, (-1, attention.qk_head_dim)), None

    def gate_projection(self, attention: Module) -> Module | None:
        """Return the module whose product with normed hidden states is the gate; None where `split_queries` has it, if
        there is one."""
        return None

    def sinks(self, attention: Module) -> Tensor | None:
        """Return a logit float32[H] for each head that no row has, if there are any (kernels/attention.py)."""
        return None

    def gate_attended(self, attended: Tensor, gate: Tensor) -> Tensor:
        """Return the input of o_proj for attention's output [N, S, H * v] and its `gate`. Rows stay apart."""
        return attended

    def choice(self, router: Module) -> ExpertChoice | None:
        """Return how a router chooses experts; None where kernels do not choose so, and the library's router runs."""
        from kernels.expert_choice import ExpertChoice

        return ExpertChoice.of(router)

    # ---------------------------------------------------------------- tiny checkpoints

    def queries_of(self, attention: Module) -> Tensor:
        """Return the weights [H, k, q] that make queries of the normed product of q_a_proj: a view."""
        found: Tensor = attention.q_b_proj.weight.view(attention.num_heads, attention.qk_head_dim, -1)
        return found

    def shape(self, model: Module, normal: Callable[..., Tensor]) -> None:
        """Draw, by `normal` (torch.randn with a generator), the weights of a library's `model` that have one dimension,
        are no norms, and would change nothing as the library makes them."""
