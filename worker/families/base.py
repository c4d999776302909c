"""A model family: the facts and hooks in which one differs from another.

`Family` has what sizes, loaders, checks and commands ask of each. Families with multi-head latent attention are
LatentFamily (worker/families/latent.py), with the hooks of its runner. Every hook's default is the form of
DeepSeek-V3.2.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from protocol.units import PAGE_TOKENS

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.layout import Geometry
    from kernels.row_bytes import KvKinds

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


def product_tensors(prefix: str, rows: int, columns: int, has_bias: bool = False) -> Iterator[TensorSpec]:
    """Yield the tensors of the product `prefix`, which FP8 repositories convert."""
    yield TensorSpec(f"{prefix}.weight", (rows, columns), converts=True)
    if has_bias:
        yield TensorSpec(f"{prefix}.bias", (rows,))


class TokenBytes(NamedTuple):
    """Bytes that one token of a prompt takes on a GPU beside its hidden states, norms and experts."""

    kept: int  # from layer to layer
    unit: int  # while its block is in a layer
    selecting: int
    attending: int
    row: int  # its KV and index key


class Unfit(NamedTuple):
    """A field of config.json whose value is not served, and what is."""

    name: str
    value: object
    served: str


def in_whole_vectors(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Return function(values) for an elementwise `function`, with the same bits whatever rows are beside a row of
    `values` [..., n]: on a CPU no row lies in the tail of a vector loop (worker/runners/layers.py)."""
    width = values.shape[-1]
    if values.is_cuda or not width % VECTOR_FLOATS:
        return function(values)
    from torch.nn.functional import pad

    return function(pad(values, (0, -width % VECTOR_FLOATS)))[..., :width]


@dataclass(frozen=True, kw_only=True, eq=False)
class Family(ABC):
    """Facts of a family, and hooks of its config.json, weights and sizes."""

    model_type: str  # in config.json
    name: str  # of the family in commands, and of its first published model
    config_class: str  # in the model library
    #: Changes of the config class's defaults that make each published model, by its name.
    models: Mapping[str, Mapping[str, Any]]
    #: Fields of config.json beside those of all families that are read, and values of others that are computed.
    read: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    layer_kinds: tuple[str, ...]  # that each entry of `layer_types` may have
    #: Sizes that shapes of weights follow from, and those that bytes of a row do, beside those of all families.
    sizes: tuple[str, ...]
    row_sizes: tuple[str, ...]
    #: Sizes among the fields that are read, which must be there; and numbers, which are above 0.
    widths: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    dense_layers: int = 3  # first_k_dense_replace of a config.json that leaves it out
    on_gpu: bool = True  # there are kernels for a GPU
    quantizes: bool = True  # repositories in block-FP8 are served
    keeps_kv_exact: bool = False  # KV is kept in the dtype in which the model is computed alone
    stacks_experts: bool = False  # repositories that are not quantized store a layer's experts in two tensors
    drafts: bool = True  # the draft layer of a repository, if there is one, is known
    unread: tuple[str, ...] = ()  # begin names of stored tensors that are left unread
    #: A config.json without one of SHARING leaves it to the config class which layers select; else all do.
    shares_by_default: bool = False
    #: Format of calls and reasoning, a row in hisparse/http/models/formats/known.py, and a small template in that form.
    chat: str
    template: str
    tiny: Mapping[str, Any] = field(default_factory=dict)  # changes of a tiny checkpoint's config
    topk_least: int = 1  # tokens that a tiny checkpoint selects at least
    hot_multiple: int = PAGE_TOKENS  # of tokens: sizes of hot buffers that suit every checkpoint

    # ---------------------------------------------------------------- config

    @property
    def shares(self) -> bool:
        """Return whether layers may use the selection of another."""
        return "indexer_types" in self.read

    def config(self, **fields: Any) -> Any:
        """Return the model library's config object."""
        import transformers

        return getattr(transformers, self.config_class)(**fields)

    def fields(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a parsed config.json by the names that all families have, none in a part of its own."""
        return dict(config)

    def of_library(self, config: Any) -> Any:
        """Return the part of the library's object of config.json that models are made of, with these names."""
        return config

    def published(self, config: Any) -> dict[str, Any]:
        """Return the config.json of a config object of `config` or `of_library`."""
        found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
        return found

    def unfit(self, config: Mapping[str, Any]) -> Unfit | None:
        """Return what `fields` hold that no list of values can tell."""
        return None

    def shared_selections(self, layers: int, every: int) -> dict[str, Any]:
        """Return fields by which every `every`-th layer selects, where the family has layers that do not."""
        kinds = ["shared" if number % every else "full" for number in range(layers)]
        return {"indexer_types": kinds} if self.shares else {}

    def selects(self, config: Any, layer: int) -> bool:
        """Return whether `layer` selects for itself and has an indexer's weights, as the draft layer does."""
        kinds = getattr(config, "indexer_types", None)
        return not kinds or layer >= config.num_hidden_layers or kinds[layer] == "full"

    # ---------------------------------------------------------------- memory

    @abstractmethod
    def geometry(self, config: Any, kinds: KvKinds, *, draft_layer: bool) -> Geometry:
        """Return the shape of rows whose KV is kept in `kinds`. Raises ConfigError where that cannot be."""

    @abstractmethod
    def token_bytes(self, config: Any, value: int) -> TokenBytes:
        """Return what prompts take in passes whose values have `value` bytes."""

    def streams(self, config: Any) -> int:
        """Return how many residual streams there are."""
        return 1

    # ---------------------------------------------------------------- weights

    def norm_tensors(self, config: Any, prefix: str, ahead_of: str) -> Iterator[TensorSpec]:
        """Yield the tensors of a layer's norm `prefix` ahead of ATTENTION, MLP or EXPERTS."""
        yield TensorSpec(f"{prefix}.weight", (config.hidden_size,))

    @abstractmethod
    def attention_tensors(self, config: Any, prefix: str, *, selects: bool) -> Iterator[TensorSpec]:
        """Yield the tensors of attention `prefix`, with those of its indexer if the layer `selects`."""

    def layer_tensors(self, config: Any, prefix: str) -> Iterator[TensorSpec]:
        """Yield tensors that layers `prefix` of this family alone have."""
        yield from ()

    def model_tensors(self, config: Any) -> Iterator[TensorSpec]:
        """Yield tensors outside of layers that this family alone has."""
        yield from ()

    def mlp_widths(self, config: Any) -> tuple[int, int]:
        """Return the inner sizes of a dense layer's MLP, and of a layer's shared experts together."""
        return config.intermediate_size, config.moe_intermediate_size * config.n_shared_experts

    def stored_name(self, name: str) -> str:
        """Return the name in a repository of the tensor that most families store as `name`."""
        return name

    def module_name(self, stored: str) -> str:
        """Return the name that the model library's modules have for the tensor or product `stored`."""
        return stored

    def joined(self, stored: str) -> tuple[str, int] | None:
        """Return the name of a tensor of twice as many rows, in which the library's modules hold the tensor `stored`,
        and which half that is; None where they hold the tensor by itself."""
        return None

    def expert_limit(self, config: Any) -> float:
        """Return what a routed expert cuts its products of gate, from above, and of up, to either side, to."""
        return inf
