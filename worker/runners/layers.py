"""The library's model, layer by layer, as functions of tensors: nothing here knows of caches, seats or streams.

Weights, projections, norms, rotary embedding, MLP, experts, router and lm_head are the library's modules, called piece
by piece; nothing in the library is patched. What is replaced is the forward of Attention and Indexer (mla.py),
and on a GPU what lies between products, which is one launch there instead of many: rows and index keys
(kernels/cuda/projected.py), sums and norms (kernels/cuda/pointwise.py), what a router makes of its logits
(kernels/routing.py).

Index keys in fp8 and fp4 are rotated first, and queries with them, by a Hadamard matrix: scores stay what they are but
for rounding, and one scale fits all values of a key. DeepSeek's own code does so; the model library, which keeps
bfloat16, does not.

Deterministic mode promises that a row's result does not depend on its neighbours nor on its place in a batch of a fixed
size. Measured on AVX-512 with one thread, fp32: `F.linear` and `bmm` over heads keep rows apart at every size tried;
`W @ X.T` does not (5 to 7 rows take another kernel); a loop of `mv` does and is twice as slow; silu and sigmoid differ
in the last bit between the vectorised body and the scalar tail of a flat tensor. So rows are batched, and rows of
zeros are added to the MLP's input until no row lies in a tail. Other processors, GPUs too, are not taken on trust: the
check of invariance.py runs at start and refuses deterministic mode when rows are not apart.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.attention import attend_rows
from kernels.expert_choice import ExpertChoice
from kernels.layout import Geometry
from kernels.routing import router_logits
from kernels.row_format import hadamard, index_key_format_of, kv_row_format_of, latent_exponent
from kernels.row_target import RowTarget
from kernels.state import DeviceState
from protocol.config_checks import SEATS_MAX
from protocol.units import pages_for
from worker.device.step_rows import StepRows
from worker.families.base import ATTENTION, HEAD, MLP, VECTOR_FLOATS, Module
from worker.families.table import latent_family_of
from worker.group.exchange import Exchange
from worker.runners import attention as mla
from worker.runners.experts import Over, experts_for, gated_mlp, hold_share, padding, routed
from worker.runners.invariance import not_apart, remedies, rows_apart
from worker.weights.layout import ExpertShare
from worker.weights.memory import OwnMemory, WeightMemory
from worker.weights.model import held_bytes, keeps_exact
from worker.weights.modules import Activations

#: The rotary functions of the library's modules: of halves, and of neighbours.
ROPE: Final = "apply_rotary_pos_emb"
INTERLEAVED: Final = f"{ROPE}_interleave"

Angles = tuple[Tensor, Tensor]  # cos and sin [N, S, d] of some positions


@dataclass(frozen=True)
class Layer:
    number: int
    group: int
    module: Module
    forms: mla.Forms
    absorbed: mla.Absorbed
    choice: ExpertChoice | None  # of a mixture, where kernels choose as its router does
    sinks: Tensor | None  # float32[H]
    anchor: bool  # runs its own indexer
    followers: tuple[int, ...]  # of an anchor: the layers that share its selection

    @property
    def attention(self) -> Module:
        return self.module.self_attn

    @property
    def has_experts(self) -> bool:
        return hasattr(self.module.mlp, "experts")

    def attend(self, state: DeviceState, queries: Tensor, rows: Tensor, latents: Tensor) -> None:
        """Launch attend_rows of `queries` [B, H, r + d] over device `rows` int32[B, k] into `latents` [B, H, r]."""
        attend_rows(state, self.number, queries, rows, self.attention.scaling, latents, self.sinks)


@dataclass(frozen=True)
class Halfway:
    """Hidden states of a layer between its attention and its MLP."""

    hidden: Tensor  # [N, S, C * hidden]
    normed: Activations  # [N, S, hidden]; with rows that pad the MLP's input
    over: Over | None  # of a mixture over ranks


class Layers:
    """The layers of `model` in order, and what comes before and after them. N x S tokens; decode has S = 1.

    `draft` is the draft layer behind them, where `geometry` has one; iteration leaves it out.
    """

    def __init__(
        self,
        model: Any,
        geometry: Geometry,
        *,
        deterministic: bool,
        exchange: Exchange | None = None,
        share: ExpertShare | None = None,
        memory: WeightMemory | None = None,
    ) -> None:
        """`deterministic`: rows of a decode batch are padded so that they are kept apart. `exchange` reaches the ranks
        that hold the other experts, where `model` holds the `share` alone. `memory` is that of its weights."""
        self.model = model
        self._memory = memory or OwnMemory(model.device)
        self._exchange, self._share = exchange, share
        if exchange is not None and share is not None:
            hold_share(model, share)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        config = model.config
        self.family = family = latent_family_of(config)
        self.streams = family.streams(config)  # of the residual
        self._wide_head = keeps_exact(model, "lm_head")  # logits are products in float32
        self.rows = kv_row_format_of(geometry.row_bytes, config.kv_lora_rank, config.qk_rope_head_dim)
        self.keys = index_key_format_of(geometry.index_row_bytes, config.index_head_dim)
        quantised = self.keys.is_quantised
        self._rotation = hadamard(config.index_head_dim, self.dtype, self.device) if quantised else None
        self.index_dtype = self.dtype if quantised else self.keys.dtype  # index_topk wants queries as keys are
        library = sys.modules[type(model).__module__]
        ropes = {paired: INTERLEAVED if paired else ROPE for paired in (True, False)}
        self._rope = mla.Rope(getattr(library, ropes[family.interleaves]), family.interleaves)
        of_index, paired = getattr(library, ropes[family.index_interleaves]), family.index_interleaves
        self._index_rope = mla.Rope(of_index, paired, family.index_rotates_last)
        self.decode_experts, self.prompt_experts = experts_for(self.device, self.dtype)
        self._row_multiple = row_multiple(config) if deterministic and self.device.type == "cpu" else 1
        self._geometry = geometry
        self._held = [self._layer(number) for number in range(geometry.layers)]
        self._layers = self._held[: config.num_hidden_layers]
        self.draft = self._held[-1] if len(self._held) > len(self._layers) else None

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._layers)

    def __getitem__(self, number: int) -> Layer:
        return self._layers[number]

    @property
    def ranks(self) -> int:
        """Ranks that the experts are divided among."""
        return self._exchange.collectives.size if self._exchange is not None else 1

    def embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Angles]:
        """The residual [N, S, C * hidden] of token ids int[N, S], and the angles of their positions int64[N, S]."""
        hidden = self.embed_tokens(tokens)
        return hidden.repeat(1, 1, self.streams), self.angles(hidden, positions)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Hidden states [N, S, hidden] of token ids int[N, S]."""
        hidden: Tensor = self.model.model.embed_tokens(tokens)
        return hidden

    def angles(self, hidden: Tensor, positions: Tensor) -> Angles:
        """Of positions int64[N, S], in the dtype of `hidden`."""
        angles: Angles = self.model.model.rotary_emb(hidden, positions)
        return angles

    def enter(self, layer: Layer, hidden: Tensor) -> Activations:
        """The norm ahead of a layer's projections, of the residual `hidden` [N, S, C * hidden]."""
        connection, member = self.family.connection(layer.module, ATTENTION), layer.attention.q_a_proj
        return mla.normed_rows(layer.module.input_layernorm, hidden, member, self.family, connection)

    def compress(self, layer: Layer, entered: Activations) -> mla.Compressed:
        """Form what all projections of a layer begin with, of `entered` [N, S, hidden]."""
        return mla.compress(layer.attention, entered, self.family)

    def project(
        self, layer: Layer, inputs: mla.Compressed, angles: Angles, target: RowTarget | None = None
    ) -> mla.Projected:
        """The attention's projections. KV rows go to `target` where launches are joined."""
        return mla.project(layer.attention, layer.forms, self._rope, inputs, *angles, target, family=self.family)

    def project_index(
        self, layer: Layer, inputs: mla.Compressed, angles: Angles, target: RowTarget | None = None
    ) -> mla.IndexProjected:
        """Queries, in the dtype that index_topk compares with the keys kept; keys, which go to `target` where launches
        are joined; weights."""
        about = layer.forms, self._index_rope, inputs, *angles, self._rotation, target
        return mla.project_index(layer.attention.indexer, *about)

    def kept(
        self,
        layer: Layer,
        entered: Activations,
        angles: Angles,
        targets: tuple[RowTarget | None, RowTarget | None] = (None, None),
    ) -> tuple[Tensor | None, Tensor | None]:
        """KV rows uint8[N, S, row_bytes] and index keys, encoded, of a layer that attends to nothing; None where they
        go to their targets."""
        to_rows, to_keys = targets
        rows = mla.project_rows(layer.attention, layer.forms, self._rope, entered, *angles, to_rows)
        about = layer.forms, self._index_rope, entered, *angles, self._rotation, to_keys
        return rows, mla.project_index_keys(layer.attention.indexer, *about)

    def finish(
        self,
        layer: Layer,
        hidden: Tensor,
        attended: Tensor,
        experts: str,
        *,
        ending: mla.LayerEnding,
        rows: int = 0,
    ) -> None:
        """Make the residual `hidden` what it is after the layer: `leave_attention`, the MLP and `join` in turn."""
        between = self.leave_attention(layer, hidden, attended, experts, ending=ending, rows=rows)
        parts, shared = self.routed(layer, between, experts), self.shared(layer, between)
        self.join(between, parts, shared, None, into=hidden)

    def leave_attention(
        self,
        layer: Layer,
        hidden: Tensor,
        attended: Tensor,
        experts: str,
        *,
        ending: mla.LayerEnding,
        rows: int = 0,
        real: Tensor | None = None,
    ) -> Halfway:
        """Output projection and residual of `attended` [N, S, H * v] by the `ending` of its projections, and the norm
        ahead of the MLP.

        In a group, `rows` is the size of the round, 0: that of `hidden`; `real` bool[B] tells rows of a decode batch
        from padding.
        """
        surplus = 0 if rows or experts != self.decode_experts else -len(hidden) % self._row_multiple
        over = None
        if layer.has_experts and self._exchange is not None:
            over = self._over(self._exchange, rows or (len(hidden) + surplus) * hidden.shape[1], real)
        also = None if over is None or not hidden.is_cuda else over.own_hidden(hidden)
        attended = attended if ending.gate is None else self.family.gate_attended(attended, ending.gate)
        norm, added = layer.module.post_attention_layernorm, layer.attention.o_proj(attended)
        mlp = layer.module.mlp
        first = mlp.shared_experts.gate_proj if layer.has_experts else mlp.gate_proj
        about: Any = {"shares": ending.shares, "connection": self.family.connection(layer.module, MLP)}
        hidden, normed = mla.join_normed(
            norm, hidden, _part(added), also=also, member=first, family=self.family, **about
        )
        assert normed is not None
        if surplus:
            normed = Activations(F.pad(normed.values, (0, 0, 0, 0, 0, surplus)), shares=normed.shares)
        return Halfway(hidden, normed, over)

    def shared(self, layer: Layer, between: Halfway) -> Tensor | None:
        """Output [N, S, hidden] of the shared experts of a mixture; None without experts."""
        return gated_mlp(layer.module.mlp.shared_experts, between.normed) if layer.has_experts else None

    def routed(self, layer: Layer, between: Halfway, experts: str) -> Tensor:
        """Parts [R, N * S, hidden] of the sum that routed experts add, or an MLP without experts."""
        if layer.has_experts:
            return routed(layer.module.mlp, between.normed.values, experts, between.over, layer.choice)
        return _part(gated_mlp(layer.module.mlp, between.normed))

    def join(
        self,
        between: Halfway,
        parts: Tensor,
        shared: Tensor | None,
        following: Layer | Module | None,
        *,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Activations | None]:
        """The residual [N, S, C * hidden] after the layer, `into` where it is given, and the norm of it that enters
        the layer `following`, or the norm `following` ahead of the head."""
        rows = len(between.hidden)
        shared = None if shared is None else shared[:rows]
        parts, member = parts[:, : rows * between.hidden.shape[1]], None
        connection = self.family.connection(self.model.model, HEAD)
        if isinstance(following, Layer):
            connection = self.family.connection(following.module, ATTENTION)
            following, member = following.module.input_layernorm, following.attention.q_a_proj
        about: Any = {"member": member, "into": into, "family": self.family}
        about |= {"shares": between.normed.shares, "connection": connection}
        return mla.join_normed(following, between.hidden, parts, shared, **about)

    def pad(self, layer: Layer, rows: int) -> None:
        """Take part in the MLP of `layer`, in a round of `rows`, without a prompt."""
        if self._exchange is not None and layer.has_experts:
            over = self._over(self._exchange, rows)
            padding(layer.module.mlp, self.model.config.hidden_size, self.dtype, self.prompt_experts, over)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[B, vocab] of the residual [B, 1, C * hidden]."""
        return self.head(self.final(hidden))

    def final(self, hidden: Tensor) -> Tensor:
        """The model's final norm of the residual [N, S, C * hidden]."""
        connection = self.family.connection(self.model.model, HEAD)
        return mla.normed_rows(self.model.model.norm, hidden, None, self.family, connection).values

    def head(self, normed: Tensor) -> Tensor:
        """float32[B, vocab] of normed states [B, 1, hidden]."""
        logits: Tensor
        if self._wide_head:
            rows, weight = normed.squeeze(1), self.model.lm_head.weight
            logits = router_logits(rows, weight) if rows.is_cuda else F.linear(rows.float(), weight.float())
        else:
            logits = self.model.lm_head(normed).squeeze(1).float()
        return logits

    def release_expanded(self) -> None:
        """Give up every kv_b_proj: only prefill in expanded form uses more of it than its absorbed halves."""
        for layer in self._held:
            layer.attention.kv_b_proj = None

    def weights_bytes(self) -> dict[str, int]:
        """Bytes of all weights by dtype, the absorbed halves of kv_b_proj included."""
        held = held_bytes(self.model)
        for layer in self._held:
            for half in (layer.absorbed.key, layer.absorbed.value):
                name = str(half.dtype).removeprefix("torch.")
                held[name] = held.get(name, 0) + half.numel() * half.element_size()
        return held

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile what layers launch on a GPU, whatever their batch."""
        if self.device.type != "cuda":
            return
        zeros = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        hidden, angles = self.embed(zeros, zeros)
        inputs = self.compress(self._layers[0], self.enter(self._layers[0], hidden))
        ending = self.project(self._layers[0], inputs, angles).ending
        self.project_index(self._layers[0], inputs, angles)
        attended = hidden.new_zeros(1, 1, self._layers[0].attention.o_proj.in_features)
        for layer in {layer.has_experts: layer for layer in self._held}.values():
            self._finish_step(layer, hidden, attended, ending)

    @torch.inference_mode()
    def require_rows_apart(self, seats: int, step_rows: StepRows) -> None:
        """Check one layer of each kind with the batches of steps of `seats`. Raises ConfigError with what was found to
        help."""

        def apart(seats: int) -> bool:
            if seats * step_rows.rows > SEATS_MAX:
                return False  # more rows than a step takes
            return all(self._are_rows_apart(rows) for rows in step_rows.batch_rows(seats))

        with nullcontext() if self._exchange is None else self._exchange.standing_for_all():
            if not apart(seats):
                raise not_apart(remedies(apart, seats, uses_threads=self.device.type == "cpu"))

    def _are_rows_apart(self, rows: int) -> bool:
        if self._exchange is not None and rows > self._exchange.rows_max:
            return False  # a batch that is tried as a remedy, and has no room in an exchange
        kinds = {(layer.anchor, layer.has_experts): layer for layer in self._held}
        hidden = self.streams * self.model.config.hidden_size
        random_rows = partial(torch.randn, rows, 1, hidden, dtype=self.dtype, device=self.device)
        state = self._state_of_rows(rows)
        return all(rows_apart(partial(self._dense, layer, state), random_rows) for layer in kinds.values())

    def _over(self, exchange: Exchange, rows: int, real: Tensor | None = None) -> Over:
        assert self._share is not None
        if real is not None and len(real) < rows:
            real = F.pad(real, (0, rows - len(real)))
        return Over(exchange, self._share, rows, real)

    def _layer(self, number: int) -> Layer:
        group = self._geometry.group_of_layer[number]
        members = self._geometry.layers_of_group(group)
        module = self.model.model.layers[number]
        attention, scale = module.self_attn, 1.0
        if self.rows.kind == "fp4":
            scale = 2.0 ** -latent_exponent(attention.kv_a_layernorm.weight)
        return Layer(
            number=number,
            group=group,
            module=module,
            forms=mla.Forms(self.rows, self.keys, scale),
            absorbed=mla.Absorbed.of(attention, f"model.layers.{number}.self_attn", self._memory, scale),
            choice=self.family.choice(module.mlp.gate) if hasattr(module.mlp, "experts") else None,
            sinks=self.family.sinks(attention),
            anchor=members[0] == number,
            followers=members[1:] if members[0] == number else (),
        )

    def _dense(self, layer: Layer, state: DeviceState, hidden: Tensor) -> Tensor:
        """All of a decode step that mixes no tokens, [B, n], for the residual [B, 1, C * hidden] at one position."""
        rows = len(hidden)
        angles = self.model.model.rotary_emb(hidden, torch.ones(rows, 1, dtype=torch.long, device=hidden.device))
        inputs = self.compress(layer, self.enter(layer, hidden))
        projected = self.project(layer, inputs, angles)
        queries = mla.absorb_queries(layer.absorbed, projected)
        assert projected.rows is not None
        state.rows[0, :rows] = projected.rows.squeeze(1)
        own = torch.arange(rows, dtype=torch.int32, device=hidden.device).unsqueeze(1)
        latents = queries.new_empty(*queries.shape[:2], self.rows.scaled)
        replace(layer, number=0).attend(state, queries, own, latents)
        attended = mla.expand_values(layer.absorbed, latents)
        finished, normed = self._finish_step(layer, hidden, attended.unsqueeze(1), projected.ending)
        parts = [self.rows.decode(projected.rows), queries, finished, self.head(normed)]
        if layer.anchor:
            index = self.project_index(layer, inputs, angles)
            assert index.keys is not None
            parts += [index.queries, self.keys.decode(index.keys), index.weights]
        return torch.cat([part.flatten(1).float() for part in parts], dim=1)

    def _finish_step(
        self, layer: Layer, hidden: Tensor, attended: Tensor, ending: mla.LayerEnding
    ) -> tuple[Tensor, Tensor]:
        """`finish` as a decode step has it, with the model's norm of the result."""
        between = self.leave_attention(layer, hidden, attended, self.decode_experts, ending=ending)
        parts, shared = self.routed(layer, between, self.decode_experts), self.shared(layer, between)
        finished, normed = self.join(between, parts, shared, self.model.model.norm)
        assert normed is not None
        return finished, normed.values

    def _state_of_rows(self, rows: int) -> DeviceState:
        """A state of one layer that holds one KV row for each row of a batch."""
        geometry = Geometry(1, self._geometry.row_bytes, (0,), self._geometry.index_row_bytes, self._geometry.topk)
        one = dict.fromkeys(("seats", "index_pages", "max_pages", "max_chunks", "slab_pages", "tail_slots"), 1)
        host = torch.zeros(1, geometry.page_bytes, dtype=torch.uint8)
        return DeviceState.allocate(geometry, chunks=pages_for(rows), host=host, device=self.device, **one)


def _part(output: Tensor) -> Tensor:
    """`output` [N, S, n] as the one part [1, N * S, n] of a sum."""
    return output.reshape(1, -1, output.shape[-1])


def row_multiple(config: Any) -> int:
    """Rows whose flat activations fill whole vectors, so that no row lies in a tail (see the top of this file)."""
    shared = config.moe_intermediate_size * config.n_shared_experts
    widths = gcd(config.intermediate_size, shared, config.n_routed_experts)
    return VECTOR_FLOATS // gcd(VECTOR_FLOATS, widths)
