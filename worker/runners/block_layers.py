"""The library's model of MiniMax-M3, layer by layer, as functions of tensors: nothing here knows of caches or streams.

Projections, norms, rotary embedding, MLP, experts, router and lm_head are the library's modules.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kernels.layout import Geometry
from kernels.reference.block_attention import attend
from kernels.routing import add_parts
from protocol.config_checks import SEATS_MAX
from protocol.units import PAGE_TOKENS
from worker.families.base import Module
from worker.group.exchange import Exchange
from worker.runners.experts import Over, experts_for, hold_share, padding, routed
from worker.runners.invariance import not_apart, remedies, rows_apart
from worker.weights.layout import ExpertShare

#: The rotary function of the library's module.
ROPE: Final = "apply_rotary_pos_emb"

Angles = tuple[Tensor, Tensor]  # cos and sin [N, S, d] of some positions


class Heads(NamedTuple):
    """Output of one layer's projections for N x S tokens. D head_dim, H query heads, K KV heads."""

    queries: Tensor  # [N, S, H, D]
    keys: Tensor  # [N, S, K, D]
    values: Tensor  # [N, S, K, D]


class IndexHeads(NamedTuple):
    """Output of the indexer's projections. d its head_dim."""

    queries: Tensor  # [N, S, K, d]
    keys: Tensor  # [N, S, d]


class BlockLayers:
    """The layers of `model`, and what comes before and after them. N x S tokens; decode has S = 1."""

    def __init__(
        self, model: Any, geometry: Geometry, *, share: ExpertShare | None = None, exchange: Exchange | None = None
    ) -> None:
        """`exchange` reaches the ranks that hold the other experts, where `model` holds the `share` alone."""
        self.model = model
        self.dtype: torch.dtype = model.dtype
        self._geometry = geometry
        self._share, self._exchange = share, exchange
        if share is not None and exchange is not None:
            hold_share(model, share)
        self._rope = getattr(sys.modules[type(model).__module__], ROPE)
        self.decode_experts, self.prompt_experts = experts_for(model.device, model.dtype)

    def __getitem__(self, number: int) -> Module:
        return self.model.model.layers[number]

    def enter(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Angles]:
        """Return hidden states [N, S, hidden] of token ids, and the angles of their positions."""
        hidden = self.model.model.embed_tokens(tokens)
        return hidden, self.model.model.rotary_emb(hidden, positions)

    def project(self, attention: Module, entered: Tensor, angles: Angles) -> Heads:
        """Return queries, keys and values of normed states [N, S, hidden]."""
        shape = (*entered.shape[:-1], -1, attention.head_dim)
        queries = attention.q_norm(attention.q_proj(entered).view(shape))
        keys = attention.k_norm(attention.k_proj(entered).view(shape))
        queries, keys = self._rope(queries, keys, *angles, unsqueeze_dim=2)
        return Heads(queries, keys, attention.v_proj(entered).view(shape))

    def index(self, indexer: Module, entered: Tensor, angles: Angles) -> IndexHeads:
        """Return the indexer's queries and keys of normed states [N, S, hidden]."""
        shape, size = (*entered.shape[:-1], -1, indexer.head_dim), indexer.head_dim
        queries = indexer.q_norm(indexer.q_proj(entered).view(shape))
        keys = indexer.k_norm(indexer.k_proj(entered).view(shape))
        cos, sin = (angle[..., :size] for angle in angles)
        queries, keys = self._rope(queries, keys, cos, sin, unsqueeze_dim=2)
        return IndexHeads(queries, keys.squeeze(2))

    def planes(self, projected: Heads) -> list[Tensor]:
        """Return K and V [N, S, D] of each head, in the order of the planes of a row."""
        return [of[:, :, head] for head in range(self._geometry.heads) for of in (projected.keys, projected.values)]

    def over(self, rows: int, real: Tensor | None = None) -> Over | None:
        """Return where experts are, for a round of `rows`; None where this process holds all of them. `real` bool[B]
        tells rows of a decode batch from padding."""
        if self._exchange is None or self._share is None:
            return None
        return Over(self._exchange, self._share, rows, real)

    def leave(self, layer: int, hidden: Tensor, attended: Tensor, experts: str, over: Over | None) -> Tensor:
        """Return hidden states behind a layer, of `attended` [N, S, H * D]."""
        module = self[layer]
        hidden = hidden + module.self_attn.o_proj(attended)
        normed, mlp = module.post_attention_layernorm(hidden), module.mlp
        added: Tensor
        if hasattr(mlp, "experts"):
            parts = routed(mlp, normed, experts, over)
            chosen = (parts[0] if over is None else add_parts(parts, self.dtype)).view_as(normed)
            added = chosen * mlp.routed_scaling_factor + mlp.shared_experts(normed)
        else:
            added = mlp(normed)
        return hidden + added

    def pad(self, layer: int, rows: int) -> None:
        """Take part in the experts of `layer`, in a round of `rows`, without a prompt."""
        mlp, over = self[layer].mlp, self.over(rows)
        if over is not None and hasattr(mlp, "experts"):
            padding(mlp, self.model.config.hidden_size, self.dtype, self.prompt_experts, over)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32[B, vocab] of hidden states [B, 1, hidden]."""
        logits: Tensor = self.model.lm_head(self.model.model.norm(hidden)).squeeze(1).float()
        return logits

    @torch.inference_mode()
    def require_rows_apart(self, seats: int) -> None:
        """Check a layer of each kind with steps of `seats`. Raises ConfigError with what was found to help."""
        dense, layers = self._geometry.dense, [*enumerate(self.model.model.layers)]
        kinds = {(number < dense, hasattr(layer.mlp, "experts")): number for number, layer in layers}

        def apart(rows: int) -> bool:
            random_rows = partial(torch.randn, rows, 1, self.model.config.hidden_size, dtype=self.dtype)
            most = SEATS_MAX if self._exchange is None else min(SEATS_MAX, self._exchange.rows_max)
            return rows <= most and all(rows_apart(partial(self._alone, it), random_rows) for it in kinds.values())

        with nullcontext() if self._exchange is None else self._exchange.standing_for_all():
            if not apart(seats):
                raise not_apart(remedies(apart, seats, uses_threads=True))

    def _alone(self, layer: int, hidden: Tensor) -> Tensor:
        """Return all that a layer makes of hidden states [B, 1, hidden] at one position, [B, n]; each row attends to
        its own K and V, of as many places as a page has."""
        module, positions = self[layer], torch.ones(len(hidden), 1, dtype=torch.long)
        entered, angles = module.input_layernorm(hidden), self.model.model.rotary_emb(hidden, positions)
        projected = self.project(module.self_attn, entered, angles)
        queries, held = projected.queries.squeeze(1), torch.ones(len(hidden), PAGE_TOKENS, dtype=torch.bool)
        heads = []
        for head, own in enumerate(queries.chunk(self._geometry.heads, dim=1)):
            key, value = (of[:, :, head].repeat(1, PAGE_TOKENS, 1) for of in (projected.keys, projected.values))
            heads.append(attend(own, key, value, held, module.self_attn.scaling))
        attended = torch.cat(heads, dim=1).to(self.dtype).flatten(1).unsqueeze(1)
        left = self.leave(layer, hidden, attended, self.decode_experts, self.over(len(hidden)))
        parts = [*projected, left, self.logits(left)]
        if layer >= self._geometry.dense:
            parts += self.index(module.self_attn.indexer, entered, angles)
        return torch.cat([part.flatten(1).float() for part in parts], dim=1)
