"""Multi-head latent attention and the lightning indexer, in the forms that serving needs.

A context is held as one row per token and layer, the *latent* (kv_lora_rank values after kv_a_layernorm) and the
rotated rope key that all heads share, and as one index key per token and index group. The model library computes
attention by expanding every latent into keys and values of all heads, and the top-k as a mask over the whole context.

absorbed   With W_uk, W_uv the key and value halves of kv_b_proj, q.(W_uk c) = (W_uk^T q).c and
           sum p (W_uv c) = W_uv (sum p c): heads attend to latents directly (kernels/attention.py), and only the k rows
           that a query selected are read. Reduction runs over those rows in top-k order, which is ascending position,
           never in slot order: the same bits for any hot size. Decode, and prefill on a GPU, where each prompt token is
           a query with k rows of its own in the slab: memory and work per token stop growing at k.
expanded   the library's own formulas on the same shapes, one block of queries at a time: expanded keys and values, a
           mask, scaled_dot_product_attention. Prefill on a CPU: it gives the library's rows nearly all bit for bit when
           blocks are multiples of 512 (the block in which torch's CPU attention walks the keys), so that prefill adds
           no rounding of its own to near-ties in the indexer's top-k; and absorbing is no faster there below 8k tokens.
           On a GPU it would hold S x T masks and all heads' keys and values of the whole context.

Index scores per head are the largest intermediate of the expanded form: they are formed for SCORE_FLOATS_MAX entries at
a time. That also makes them five times faster than one product over all queries, and changes no bit: each query's
scores are reduced alone.

N batch, S queries, T keys, H heads, r kv_lora_rank, d qk_rope_head_dim, n qk_nope_head_dim, v v_head_dim, k topk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.pointwise import add_rms_norm, can_rotate, rms_norm, rotate
from worker.weights.modules import joined_of, products

#: Index scores per head held at once in prefill: 2 MiB of float32 stays within a core's cache.
SCORE_FLOATS_MAX: Final = 524_288

Rope = Callable[..., tuple[Tensor, Tensor]]  # (q, k, cos, sin, unsqueeze_dim=) -> rotated q, k
Module = Any  # modules of the model library, whose attributes are not typed


class Compressed(NamedTuple):
    """What all projections of N x S tokens in one layer begin with."""

    hidden: Tensor  # [N, S, hidden], normed
    residual: Tensor  # [N, S, q_lora_rank]: what queries are made of
    #: Products of `hidden` that the launch of the residual gave too, where weights are joined: [N, S, r + d] of
    #: kv_a_proj_with_mqa, [N, S, D] of the indexer's wk.
    latent: Tensor | None = None
    index_key: Tensor | None = None


@dataclass(frozen=True)
class Projected:
    """What one layer's projections give for N x S tokens."""

    query_nope: Tensor  # [N, H, S, n]
    query_rope: Tensor  # [N, H, S, d], rotated
    latent: Tensor  # [N, S, r]
    key_rope: Tensor  # [N, S, d], rotated

    @property
    def rows(self) -> Tensor:
        """KV rows [N, S, r + d], contiguous."""
        return torch.cat((self.latent, self.key_rope), dim=-1)

    def of_tokens(self, tokens: slice) -> Projected:
        """The projections of some tokens."""
        queries = self.query_nope[:, :, tokens], self.query_rope[:, :, tokens]
        return Projected(*queries, self.latent[:, tokens], self.key_rope[:, tokens])


@dataclass(frozen=True)
class IndexProjected:
    queries: Tensor  # [N, S, H, D]
    keys: Tensor  # [N, S, D]
    weights: Tensor  # float32 [N, S, H], scaled by H ** -0.5

    def of_tokens(self, tokens: slice) -> IndexProjected:
        """The projections of some tokens."""
        return IndexProjected(self.queries[:, tokens], self.keys[:, tokens], self.weights[:, tokens])


@dataclass(frozen=True)
class Absorbed:
    """The halves of one layer's kv_b_proj, for use on latents."""

    key: Tensor  # [H, n, r]
    value: Tensor  # [H, r, v]

    @classmethod
    def of(cls, attention: Module) -> Absorbed:
        weight = attention.kv_b_proj.weight.view(attention.num_heads, -1, attention.kv_lora_rank)
        key, value = torch.split(weight, [attention.qk_nope_head_dim, attention.v_head_dim], dim=1)
        return cls(key=key.contiguous(), value=value.transpose(1, 2).contiguous())


def normed(norm: Module, values: Tensor) -> Tensor:
    """The library's RMS norm of `values` [..., n]."""
    return rms_norm(values, norm.weight, norm.variance_epsilon) if values.is_cuda else norm(values)


def add_normed(norm: Module, values: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """values + added, and the norm of that."""
    if values.is_cuda:
        return add_rms_norm(values, added, norm.weight, norm.variance_epsilon)
    total = values + added
    return total, norm(total)


def rope_of(library: Rope, *, interleaved: bool) -> Rope:
    """The library's rotary function of that layout; values beyond the angles' d stay as they are."""

    def rope(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        size = cos.shape[-1]
        if queries.is_cuda and can_rotate(size):
            return rotate(queries, keys, cos, sin, heads_dim=unsqueeze_dim, interleaved=interleaved)
        turned = library(queries[..., :size], keys[..., :size], cos, sin, unsqueeze_dim=unsqueeze_dim)
        if queries.shape[-1] == size:
            return turned
        return torch.cat((turned[0], queries[..., size:]), -1), torch.cat((turned[1], keys[..., size:]), -1)

    return rope


def compress(attention: Module, hidden: Tensor) -> Compressed:
    """Of normed hidden states [N, S, hidden]."""
    members = [attention.q_a_proj, attention.kv_a_proj_with_mqa]
    if attention.indexer is not None:
        members.append(attention.indexer.wk)
    if joined_of(members) is not None:
        residual, *others = products(hidden, *members)
        return Compressed(hidden, normed(attention.q_a_layernorm, residual), *others)
    return Compressed(hidden, normed(attention.q_a_layernorm, attention.q_a_proj(hidden)))


def project(attention: Module, rope: Rope, inputs: Compressed, cos: Tensor, sin: Tensor) -> Projected:
    """Queries and KV rows of N x S tokens at the positions of cos, sin [N, S, d]."""
    batch, tokens, _ = inputs.hidden.shape
    queries = attention.q_b_proj(inputs.residual).view(batch, tokens, -1, attention.qk_head_dim).transpose(1, 2)
    nope, rotary = queries.split([attention.qk_nope_head_dim, attention.qk_rope_head_dim], dim=-1)
    down = attention.kv_a_proj_with_mqa(inputs.hidden) if inputs.latent is None else inputs.latent
    latent, key = down.split([attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
    rotary, key = rope(rotary, key.view(batch, 1, tokens, -1), cos, sin)
    return Projected(nope, rotary, normed(attention.kv_a_layernorm, latent), key.squeeze(1))


def project_rows(attention: Module, rope: Rope, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """KV rows [N, S, r + d], contiguous, as `project` has them, without queries."""
    batch, tokens, _ = hidden.shape
    sizes = attention.kv_lora_rank, attention.qk_rope_head_dim
    latent, key = attention.kv_a_proj_with_mqa(hidden).split(sizes, dim=-1)
    key = key.view(batch, 1, tokens, -1)
    turned, _ = rope(key, key, cos, sin)
    return torch.cat((normed(attention.kv_a_layernorm, latent), turned.squeeze(1)), dim=-1)


def project_index(
    indexer: Module,
    rope: Rope,
    inputs: Compressed,
    cos: Tensor,
    sin: Tensor,
    rotation: Tensor | None = None,
) -> IndexProjected:
    """The indexer's queries, keys and head weights of the same tokens. `rope` is the family's own for the indexer.

    `rotation` [D, D], orthogonal, turns queries and keys alike.
    """
    hidden, residual, _, keys = inputs
    batch, tokens, _ = hidden.shape
    queries = indexer.wq_b(residual).view(batch, tokens, indexer.n_heads, indexer.head_dim)
    keys = indexer.k_norm(indexer.wk(hidden) if keys is None else keys).unsqueeze(2)
    queries, keys = rope(queries, keys, cos, sin, unsqueeze_dim=2)
    keys = keys.squeeze(2)
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float() * (indexer.n_heads**-0.5)
    if rotation is not None:
        queries, keys = F.linear(queries, rotation), F.linear(keys, rotation)
    return IndexProjected(queries, keys, weights)


def project_index_keys(
    indexer: Module, rope: Rope, hidden: Tensor, cos: Tensor, sin: Tensor, rotation: Tensor | None = None
) -> Tensor:
    """The indexer's keys [N, S, D], as `project_index` has them, without queries."""
    keys = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    turned = rope(keys, keys, cos, sin, unsqueeze_dim=2)[0].squeeze(2)
    return turned if rotation is None else F.linear(turned, rotation)


def absorb_queries(absorbed: Absorbed, projected: Projected) -> Tensor:
    """Queries of N x S tokens against rows: [N * S, H, r + d], contiguous."""
    nope, rope = projected.query_nope.transpose(0, 1).flatten(1, 2), projected.query_rope.transpose(1, 2).flatten(0, 1)
    if not nope.is_cuda:
        return torch.cat((torch.bmm(nope, absorbed.key).transpose(0, 1), rope), dim=-1)
    latent = absorbed.key.shape[2]
    queries = nope.new_empty(*rope.shape[:2], latent + rope.shape[2])
    torch.bmm(nope, absorbed.key, out=queries[..., :latent].transpose(0, 1))
    queries[..., latent:] = rope
    return queries


def expand_values(absorbed: Absorbed, latents: Tensor) -> Tensor:
    """Attention output [B, H * v] of attended latents [B, H, r]."""
    if not latents.is_cuda:
        return torch.bmm(latents.transpose(0, 1), absorbed.value).transpose(0, 1).flatten(1)
    values = latents.new_empty(*latents.shape[:2], absorbed.value.shape[2])
    torch.bmm(latents.transpose(0, 1), absorbed.value, out=values.transpose(0, 1))
    return values.flatten(1)


def select_mask(index: IndexProjected, keys: Tensor, start: int, topk: int, scale: float) -> Tensor:
    """bool[S, T]: the keys [T, D] that each query of one request, at positions start..start+S-1, attends to.

    Causal, T = start + S, and limited to the `topk` highest scores, in the order of kernels/index_topk.py: ties to the
    lowest position, NaN below everything. Raises nothing.
    """
    queries, weights = index.queries[0], index.weights[0]
    tokens, heads, _ = queries.shape
    mask = torch.ones(tokens, len(keys), dtype=torch.bool, device=keys.device)
    mask[:, start:].tril_()
    block = max(1, SCORE_FLOATS_MAX // (heads * len(keys)))
    for first in range(0, tokens, block):
        part = slice(first, min(first + block, tokens))
        if start + part.stop <= topk:
            continue  # each has `topk` positions at most
        scores = _index_scores(queries[part], weights[part], keys, scale)
        mask[part].logical_and_(_highest(scores.masked_fill_(~mask[part], -torch.inf), topk, mask[part]))
    return mask


def _highest(scores: Tensor, k: int, allowed: Tensor) -> Tensor:
    """bool[S, T], at most k in each row of scores float32[S, T], which are -inf where not `allowed`: the highest, ties
    to the lowest position, NaN below everything.

    torch.topk breaks ties arbitrarily, so that only the k-th score is taken of it; rows with more that are equal to
    that one are rare, and counted through. It ranks NaN above all: then integers are ranked that compare as they
    should.
    """
    k = min(k, scores.shape[1])
    highest = scores.topk(k, sorted=False).values
    if highest.isnan().any():
        ranked = _order_keys(scores.masked_fill(~allowed, torch.nan))
        highest = ranked.topk(k, sorted=False).values
    else:
        ranked = scores
    last = highest.amin(1, keepdim=True)
    chosen = ranked >= last
    tied = (chosen.count_nonzero(1) > k).nonzero().flatten()
    if tied.numel():
        above, equal = ranked[tied] > last[tied], ranked[tied] == last[tied]
        left = k - above.count_nonzero(1)
        chosen[tied] = above | (equal & (equal.cumsum(1) <= left.unsqueeze(1)))
    return chosen


def _order_keys(scores: Tensor) -> Tensor:
    """int32 that compare as the float32 scores do, both zeros equal, with NaN below everything."""
    bits = (scores + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill(scores.isnan(), torch.iinfo(torch.int32).min)


def _index_scores(queries: Tensor, weights: Tensor, keys: Tensor, scale: float) -> Tensor:
    """float32[S, T] = sum over heads of weights * relu(queries . keys * scale)."""
    per_head = torch.mm(queries.flatten(0, 1).float(), keys.float().t()).mul_(scale).relu_()
    return torch.bmm(weights.unsqueeze(1), per_head.view(*weights.shape, -1)).squeeze(1)


def attend_prompt(attention: Module, projected: Projected, rows: Tensor, mask: Tensor) -> Tensor:
    """Attention output [1, S, H * v] of one request's queries over its `rows` [T, r + d] under `mask` bool[S, T]."""
    latent, rotary = torch.split(rows[None, None], [attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
    keys, values = attention.expand_kv(latent, rotary)
    queries = torch.cat((projected.query_nope, projected.query_rope), dim=-1)
    output = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask[None, None], scale=attention.scaling)
    return output.transpose(1, 2).flatten(2)
