"""A model family: the facts and hooks in which one differs from another.

All families have multi-head latent attention over rows that a lightning indexer selects, RMS norms, and MLPs or
mixtures of experts, as worker/runners/attention.py and worker/runners/layers.py compute them from the model library's
modules. A family says in which names, sizes and steps it differs; every hook's default is the form of DeepSeek-V3.2.

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
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.expert_choice import ExpertChoice

Module = Any  # modules of the model library, whose attributes are not typed

#: Fields of config.json that one layer's use of another's selection follows from.
SHARING: Final = frozenset({"indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"})
#: torch's CPU loops take this many floats at a time (two AVX-512 registers); what is left over takes another path.
VECTOR_FLOATS: Final = 32
#: What follows the norms of a layer; and the model's last norm.
ATTENTION, MLP, EXPERTS, HEAD = "attention", "mlp", "experts", "head"


class TensorSpec(NamedTuple):
    """One tensor of a repository. `converts`: FP8 repositories hold it as values and scales."""

    name: str
    shape: tuple[int, ...]
    converts: bool = False
    keeps_float32: bool = False


def in_whole_vectors(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Return function(values) for an elementwise `function`, with the same bits whatever rows are beside a row of
    `values` [..., n]: on a CPU no row lies in the tail of a vector loop (worker/runners/layers.py)."""
    width = values.shape[-1]
    if values.is_cuda or not width % VECTOR_FLOATS:
        return function(values)
    from torch.nn.functional import pad

    return function(pad(values, (0, -width % VECTOR_FLOATS)))[..., :width]


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Facts of a family, and hooks with the defaults that the head of this file describes."""

    model_type: str  # in config.json
    name: str  # of the family in commands, and of its first published model
    config_class: str  # in the model library
    #: Changes of the config class's defaults that make each published model, by its name.
    models: Mapping[str, Mapping[str, Any]]
    #: Fields of config.json beside those of all families that are read, and values of others that are computed.
    read: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    #: Sizes among the fields that are read, which must be there; and numbers, which are above 0.
    widths: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    dense_layers: int = 3  # first_k_dense_replace of a config.json that leaves it out
    interleaves: bool = True  # attention rotates neighbours; else halves
    index_interleaves: bool  # the indexer rotates neighbours; else halves
    index_rotates_last: bool = False  # the indexer rotates the last values of a head; else the first
    reads_compressed: bool = False  # queries are made of more than the normed product of q_a_proj
    stacks_experts: bool = False  # repositories that are not quantized store a layer's experts in two tensors
    drafts: bool = True  # the draft layer of a repository, if there is one, is known
    unread: tuple[str, ...] = ()  # begin names of stored tensors that are left unread
    #: A config.json without one of SHARING leaves it to the config class which layers select; else all do.
    shares_by_default: bool = False
    #: Format of calls and reasoning, a row in hisparse/http/models/formats/known.py, and a small template in that form.
    chat: str
    template: str
    tiny: Mapping[str, Any] = field(default_factory=dict)  # changes of a tiny checkpoint's config

    # ---------------------------------------------------------------- config

    @property
    def shares(self) -> bool:
        """Return whether layers may use the selection of another."""
        return "indexer_types" in self.read

    def config(self, **fields: Any) -> Any:
        """Return the model library's config object."""
        import transformers

        return getattr(transformers, self.config_class)(**fields)

    def shared_selections(self, layers: int, every: int) -> dict[str, Any]:
        """Return fields by which every `every`-th layer selects, where the family has layers that do not."""
        kinds = ["shared" if number % every else "full" for number in range(layers)]
        return {"indexer_types": kinds} if self.shares else {}

    # ---------------------------------------------------------------- weights

    def norm_tensors(self, config: Any, prefix: str, ahead_of: str) -> Iterator[TensorSpec]:
        """Yield the tensors of a layer's norm `prefix` ahead of ATTENTION, MLP or EXPERTS."""
        yield TensorSpec(f"{prefix}.weight", (config.hidden_size,))

    def layer_tensors(self, config: Any, prefix: str) -> Iterator[TensorSpec]:
        """Yield tensors that layers `prefix` of this family alone have."""
        yield from ()

    def model_tensors(self, config: Any) -> Iterator[TensorSpec]:
        """Yield tensors outside of layers that this family alone has."""
        yield from ()

    def query_shape(self, config: Any) -> tuple[int, int]:
        """Return the shape [rows, columns] of q_b_proj as it is stored."""
        return config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), config.q_lora_rank

    def kept_values(self, config: Any) -> int:
        """Return how many values a token keeps beside its queries until its layer has attended."""
        return 0

    def module_name(self, stored: str) -> str:
        """Return the name that the model library's modules have for the tensor or product `stored`."""
        return stored

    # ---------------------------------------------------------------- residual

    def streams(self, config: Any) -> int:
        """Return how many residual streams there are."""
        return 1

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

    def expert_limit(self, config: Any) -> float:
        """Return what a routed expert cuts its products of gate, from above, and of up, to either side, to."""
        return inf

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
