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
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.cuda.pointwise import join_norm, rms_norm
from kernels.cuda.projected import can_join, index_rows, kv_rows
from kernels.cuda.quantize import Codes, quantize
from kernels.encode import encode
from kernels.routing import add_parts
from kernels.row_format import RowFormat
from kernels.row_target import Angles, RowTarget
from worker.families.base import Module
from worker.families.latent import LatentFamily
from worker.weights.memory import WeightMemory
from worker.weights.modules import Activations, joined_of, make_codes_for, product, products

#: Index scores per head held at once in prefill: 2 MiB of float32 stays within a core's cache.
SCORE_FLOATS_MAX: Final = 524_288


@dataclass(frozen=True)
class Rope:
    """The library's rotary function of a layout of pairs: (q, k, cos, sin, unsqueeze_dim=) -> rotated q, k."""

    library: Callable[..., tuple[Tensor, Tensor]]
    interleaved: bool
    last: bool = False  # of a vector, the last values; else the first

    def __call__(
        self, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Rotate as many values of each vector as angles have; the others stay as they are."""
        width, size = queries.shape[-1], cos.shape[-1]
        if width == size:
            return self.library(queries, keys, cos, sin, unsqueeze_dim=unsqueeze_dim)
        cut = width - size if self.last else size
        turned, kept = (slice(cut, None), slice(cut)) if self.last else (slice(cut), slice(cut, None))
        pair = self.library(queries[..., turned], keys[..., turned], cos, sin, unsqueeze_dim=unsqueeze_dim)
        parts = [(one, whole[..., kept]) for one, whole in zip(pair, (queries, keys), strict=True)]
        first, second = (torch.cat(one[::-1] if self.last else one, -1) for one in parts)
        return first, second

    def angles(self, cos: Tensor, sin: Tensor) -> Angles:
        """`cos` and `sin` [N, S, d], by row."""
        return Angles(cos.flatten(0, 1), sin.flatten(0, 1), self.interleaved, self.last)


class Forms(NamedTuple):
    """Formats of a layer's KV rows and index keys."""

    rows: RowFormat
    keys: RowFormat
    #: What latents are multiplied by before they are kept, a power of two (kernels.row_format.latent_exponent).
    latent_scale: float = 1.0


class Compressed(NamedTuple):
    """What all projections of N x S tokens in one layer begin with."""

    hidden: Activations  # [N, S, hidden], normed
    residual: Activations  # [N, S, q_lora_rank]: what the indexer's queries are made of
    queried: Activations  # [N, S, ...]: what attention's queries are made of; `residual` in most families
    #: Products of `hidden` that the launch of the residual gave too, where weights are joined: [N, S, r + d] of
    #: kv_a_proj_with_mqa, [N, S, D] of the indexer's wk.
    latent: Tensor | None = None
    index_key: Tensor | None = None


class LayerEnding(NamedTuple):
    """Gate and shares, which the end of a layer's attention takes of its beginning."""

    gate: Tensor | None = None  # [N, S, H * v]: as the family's `gate_attended` takes it
    shares: Tensor | None = None  # float32[N, S, C]: as its `write_residual` takes them


@dataclass(frozen=True)
class Projected:
    """What one layer's projections give for N x S tokens."""

    query_nope: Tensor  # [N, H, S, n]
    query_rope: Tensor  # [N, H, S, d], rotated
    rows: Tensor | None  # uint8[N, S, row_bytes]; None: they went to their target
    #: On a GPU: the queries against rows that `query_rope` lies in, [N * S, H, r + d], whose first r values are to be
    #: written.
    queries: Tensor | None = None
    ending: LayerEnding = field(default_factory=LayerEnding)

    def of_tokens(self, tokens: slice) -> Projected:
        """The queries of some tokens."""
        return Projected(self.query_nope[:, :, tokens], self.query_rope[:, :, tokens], None)


@dataclass(frozen=True)
class IndexProjected:
    queries: Tensor  # [N, S, H, D]
    keys: Tensor | None  # uint8[N, S, key_bytes]; None: they went to their target
    weights: Tensor  # float32 [N, S, H], scaled by H ** -0.5

    def of_tokens(self, tokens: slice) -> IndexProjected:
        """Queries and weights of some tokens."""
        return IndexProjected(self.queries[:, tokens], None, self.weights[:, tokens])


@dataclass(frozen=True)
class Absorbed:
    """The halves of one layer's kv_b_proj, for use on latents as they are kept."""

    key: Tensor  # [H, n, r]
    value: Tensor  # [H, r, v]
    latent_scale: float  # that of Forms: products are divided by it

    @classmethod
    def of(cls, attention: Module, name: str, memory: WeightMemory, latent_scale: float) -> Absorbed:
        """The halves of the attention module `name`, in `memory`."""
        weight = attention.kv_b_proj.weight.view(attention.num_heads, -1, attention.kv_lora_rank)
        key, value = torch.split(weight, [attention.qk_nope_head_dim, attention.v_head_dim], dim=1)
        halves = []
        for half, values in (("key", key), ("value", value.transpose(1, 2))):
            halves.append(memory.empty(f"{name}.absorbed_{half}", tuple(values.shape), values.dtype))
            if not memory.is_filled:
                halves[-1].copy_(values.detach())
        return cls(halves[0], halves[1], latent_scale)


def normed(norm: Module, values: Tensor) -> Tensor:
    """The library's RMS norm of `values` [..., n]."""
    return rms_norm(values, norm.weight, norm.variance_epsilon) if values.is_cuda else norm(values)


def normed_rows(
    norm: Module, values: Tensor, member: Module | None, family: LatentFamily, connection: Module | None = None
) -> Activations:
    """A norm of the library's, which may have more than its RMS norm, for products with `member` and others; of what a
    `connection` reads of the residual `values`, where it is given."""
    if connection is not None:
        values, shares = family.read_residual(connection, values)
        return normed_rows(norm, values, member, family)._replace(shares=shares)
    rms = family.rms_of(norm)
    if rms is not norm:
        return Activations(family.gate_norm(norm, normed(rms, values)))
    if not values.is_cuda:
        return Activations(norm(values))
    codes = make_codes_for(member, values.shape[:-1].numel())
    return Activations(rms_norm(values, norm.weight, norm.variance_epsilon, codes), codes)


def join_normed(
    norm: Module | None,
    values: Tensor,
    parts: Tensor,
    added: Tensor | None = None,
    also: Tensor | Codes | None = None,
    member: Module | None = None,
    into: Tensor | None = None,
    *,
    family: LatentFamily,
    shares: Tensor | None = None,
    connection: Module | None = None,
) -> tuple[Tensor, Activations | None]:
    """values [N, S, n] + (sum of parts [R, N * S, n] + added), rounded after each, `into` where it is given, and the
    library's norm of that, for products with `member` and others; it goes to `also` [N * S, n] too.

    With `shares` float32[N, S, C], `values` [N, S, C * n] are residual streams, to which the family's `write_residual`
    adds, and `connection` reads what the norm takes.
    """
    if shares is not None:
        return _join_streams(norm, values, parts, added, also, member, into, family, shares, connection)
    rms = None if norm is None else family.rms_of(norm)
    if rms is not norm:
        total, found = join_normed(rms, values, parts, added, into=into, family=family)
        assert found is not None
        gated = family.gate_norm(norm, found.values)
        if also is not None:
            _copy_rows(gated.flatten(0, -2), also)
        return total, Activations(gated)
    if values.is_cuda:
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
        codes = make_codes_for(member, values.shape[:-1].numel())
        total, normed_values = join_norm(values, parts, added, weight, eps, also, codes, into)
        return total, None if normed_values is None else Activations(normed_values, codes)
    total = torch.add(values, _sum(values, parts, added), out=into)
    return total, None if norm is None else Activations(norm(total))


def _join_streams(
    norm: Module | None,
    values: Tensor,
    parts: Tensor,
    added: Tensor | None,
    also: Tensor | Codes | None,
    member: Module | None,
    into: Tensor | None,
    family: LatentFamily,
    shares: Tensor,
    connection: Module | None,
) -> tuple[Tensor, Activations | None]:
    total = family.write_residual(values, _sum(values, parts, added), shares)
    total = total if into is None else into.copy_(total)
    if norm is None:
        return total, None
    found = normed_rows(norm, total, member, family, connection)
    if also is not None:
        _copy_rows(found.values.flatten(0, -2), also)
    return total, found


def _sum(values: Tensor, parts: Tensor, added: Tensor | None) -> Tensor:
    """Return [N, S, n]: the sum of parts [R, N * S, n], and `added`, in the dtype of `values` [N, S, ...]."""
    whole = parts[0] if len(parts) == 1 else add_parts(parts, values.dtype)
    whole = whole.view(*values.shape[:-1], -1)
    return whole if added is None else whole + added


def _copy_rows(rows: Tensor, target: Tensor | Codes) -> None:
    """Write `rows` [M, n] to rows that lie apart, quantized where they are Codes."""
    if isinstance(target, Codes):
        found = quantize(rows, powers=target.powers)
        target.values.copy_(found.values)
        target.scales.copy_(found.scales)
    else:
        target.copy_(rows)


def compress(attention: Module, hidden: Activations, family: LatentFamily) -> Compressed:
    """Of normed hidden states [N, S, hidden]."""
    members = [attention.q_a_proj, attention.kv_a_proj_with_mqa]
    if attention.indexer is not None:
        members.append(attention.indexer.wk)
    is_joined = joined_of(members) is not None
    down, *others = products(hidden, *members) if is_joined else [product(hidden, attention.q_a_proj)]
    if not family.reads_compressed:
        residual = normed_rows(attention.q_a_layernorm, down, family.query_projection(attention), family)
        return Compressed(hidden, residual, residual, *others)
    residual = normed_rows(attention.q_a_layernorm, down, getattr(attention.indexer, "wq_b", None), family)
    return Compressed(hidden, residual, Activations(family.query_input(residual.values, down)), *others)


def project(
    attention: Module,
    forms: Forms,
    rope: Rope,
    inputs: Compressed,
    cos: Tensor,
    sin: Tensor,
    target: RowTarget | None = None,
    *,
    family: LatentFamily,
) -> Projected:
    """Queries and KV rows of N x S tokens at the positions of cos, sin [N, S, d]. Rows go to `target` where launches
    are joined."""
    batch, tokens, _ = inputs.hidden.values.shape
    queries, gate = family.split_queries(attention, product(inputs.queried, family.query_projection(attention)))
    gated = family.gate_projection(attention)
    ending = LayerEnding(gate if gated is None else product(inputs.hidden, gated), inputs.hidden.shares)
    nope, rotary = queries.split([attention.qk_nope_head_dim, attention.qk_rope_head_dim], dim=-1)
    down = product(inputs.hidden, attention.kv_a_proj_with_mqa) if inputs.latent is None else inputs.latent
    if not can_join(forms.rows, cos):
        rows, rotary = _rows(attention, forms, rope, down, cos, sin, rotary.transpose(1, 2))
        return Projected(nope.transpose(1, 2), rotary, rows, ending=ending)
    heads, (latent, rope_dim) = queries.shape[2], (forms.rows.scaled, forms.rows.plain)
    whole = queries.new_empty(batch * tokens, heads, latent + rope_dim)
    turned = whole[..., latent:]
    kept = _join_rows(attention, forms, rope, down, cos, sin, target, (rotary.flatten(0, 1), turned))
    return Projected(nope.transpose(1, 2), turned.view(rotary.shape).transpose(1, 2), kept, whole, ending)


def project_rows(
    attention: Module,
    forms: Forms,
    rope: Rope,
    hidden: Activations,
    cos: Tensor,
    sin: Tensor,
    target: RowTarget | None = None,
) -> Tensor | None:
    """KV rows as `project` has them, without queries."""
    down = product(hidden, attention.kv_a_proj_with_mqa)
    if can_join(forms.rows, cos):
        return _join_rows(attention, forms, rope, down, cos, sin, target)
    return _rows(attention, forms, rope, down, cos, sin)[0]


def _rows(
    attention: Module, forms: Forms, rope: Rope, down: Tensor, cos: Tensor, sin: Tensor, queries: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """By the library: KV rows of `down` [N, S, r + d], and `queries` [N, H, S, d] rotated."""
    latent, key = down.split([attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
    key = key.unsqueeze(1)
    turned, key = rope(key if queries is None else queries, key, cos, sin)
    latent = _scaled(normed(attention.kv_a_layernorm, latent), forms.latent_scale)
    return encode(forms.rows, torch.cat((latent, key.squeeze(1)), dim=-1)), turned


def _join_rows(
    attention: Module,
    forms: Forms,
    rope: Rope,
    down: Tensor,
    cos: Tensor,
    sin: Tensor,
    target: RowTarget | None,
    queries: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Form KV rows of `down`, in one launch or in fp4 two, and return them where they do not go to `target`. The first
    of `queries` is rotated into the second."""
    rows, norm = None, attention.kv_a_layernorm
    if target is None:
        rows = _bytes(down, forms.rows)
        target = RowTarget(rows)
    kv_rows(
        forms.rows,
        down.flatten(0, 1),
        norm.weight,
        norm.variance_epsilon,
        rope.angles(cos, sin),
        target,
        *(queries or ()),
        latent_scale=forms.latent_scale,
    )
    return rows


def project_index(
    indexer: Module,
    forms: Forms,
    rope: Rope,
    inputs: Compressed,
    cos: Tensor,
    sin: Tensor,
    rotation: Tensor | None = None,
    target: RowTarget | None = None,
) -> IndexProjected:
    """The indexer's queries, keys and head weights of the same tokens. `rope` is the family's own for the indexer. Keys
    go to `target` where launches are joined.

    `rotation` [D, D], orthogonal and symmetric, turns queries and keys alike.
    """
    hidden, residual, down = inputs.hidden, inputs.residual, inputs.index_key
    batch, tokens, _ = hidden.values.shape
    queries = product(residual, indexer.wq_b).view(batch, tokens, indexer.n_heads, indexer.head_dim)
    down = product(hidden, indexer.wk) if down is None else down
    weights, scale = indexer.weights_proj(hidden.values.to(indexer.weights_proj.weight.dtype)), indexer.n_heads**-0.5
    if can_join(forms.keys, cos):
        queries, keys, weights = _join_index(
            indexer, forms, rope, down, cos, sin, rotation, target, (queries, weights, scale)
        )
        return IndexProjected(queries, keys, weights)
    queries, keys = rope(queries, _normed_key(indexer, down).unsqueeze(2), cos, sin, unsqueeze_dim=2)
    keys = keys.squeeze(2)
    if rotation is not None:
        queries, keys = F.linear(queries, rotation), F.linear(keys, rotation)
    kept = queries if forms.keys.is_quantised else queries.to(forms.keys.dtype)  # index_topk wants them as keys are
    return IndexProjected(kept, encode(forms.keys, keys), weights.float() * scale)


def project_index_keys(
    indexer: Module,
    forms: Forms,
    rope: Rope,
    hidden: Activations,
    cos: Tensor,
    sin: Tensor,
    rotation: Tensor | None = None,
    target: RowTarget | None = None,
) -> Tensor | None:
    """The indexer's keys uint8[N, S, key_bytes], as `project_index` has them, without queries."""
    down = product(hidden, indexer.wk)
    if can_join(forms.keys, cos):
        return _join_index(indexer, forms, rope, down, cos, sin, rotation, target)[1]
    keys = _normed_key(indexer, down).unsqueeze(2)
    turned = rope(keys, keys, cos, sin, unsqueeze_dim=2)[0].squeeze(2)
    return encode(forms.keys, turned if rotation is None else F.linear(turned, rotation))


def _normed_key(indexer: Module, down: Tensor) -> Tensor:
    """Norm index keys by the library, whose norm may be float32."""
    found: Tensor = indexer.k_norm(down.to(indexer.k_norm.weight.dtype))
    return found.to(down.dtype)


def _join_index(
    indexer: Module,
    forms: Forms,
    rope: Rope,
    down: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotation: Tensor | None,
    target: RowTarget | None,
    queries: tuple[Tensor, Tensor, float] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Form queries and weights of heads, of `queries` and weights [N, S, H, ..] and a scale, and keys of `down`, in one
    launch or in fp4 two. Keys are returned where they do not go to `target`."""
    keys, norm = None, indexer.k_norm
    if target is None:
        keys = _bytes(down, forms.keys)
        target = RowTarget(keys)
    given = () if queries is None else (queries[0].flatten(0, 1), queries[1].flatten(0, 1), queries[2])
    found, weights = index_rows(
        forms.keys,
        down.flatten(0, 1),
        (norm.weight, norm.bias, norm.eps),
        rope.angles(cos, sin),
        rotation,
        target,
        *given,
    )
    return found.unflatten(0, down.shape[:2]), keys, weights.unflatten(0, down.shape[:2])


def _scaled(values: Tensor, scale: float) -> Tensor:
    return values if scale == 1.0 else values * scale


def _bytes(values: Tensor, form: RowFormat) -> Tensor:
    """Memory for encoded rows of `values` [N, S, ...]."""
    return torch.empty(*values.shape[:-1], form.row_bytes, dtype=torch.uint8, device=values.device)


def absorb_queries(absorbed: Absorbed, projected: Projected) -> Tensor:
    """Queries of N x S tokens against rows: [N * S, H, r + d], contiguous."""
    nope, whole, latent = projected.query_nope.transpose(0, 1).flatten(1, 2), projected.queries, absorbed.key.shape[2]
    if whole is None:
        rope = projected.query_rope.transpose(1, 2).flatten(0, 1)
        if not nope.is_cuda:
            products = _scaled(torch.bmm(nope, absorbed.key), 1 / absorbed.latent_scale)
            return torch.cat((products.transpose(0, 1), rope), dim=-1)
        whole = nope.new_empty(*rope.shape[:2], latent + rope.shape[2])
        whole[..., latent:] = rope
    _multiply(nope, absorbed.key, 1 / absorbed.latent_scale, whole[..., :latent].transpose(0, 1))
    return whole


def expand_values(absorbed: Absorbed, latents: Tensor) -> Tensor:
    """Attention output [B, H * v] of attended latents [B, H, r]."""
    if not latents.is_cuda:
        values = torch.bmm(latents.transpose(0, 1), absorbed.value)
        return _scaled(values, 1 / absorbed.latent_scale).transpose(0, 1).flatten(1)
    values = latents.new_empty(*latents.shape[:2], absorbed.value.shape[2])
    _multiply(latents.transpose(0, 1), absorbed.value, 1 / absorbed.latent_scale, values.transpose(0, 1))
    return values.flatten(1)


def _multiply(first: Tensor, second: Tensor, scale: float, out: Tensor) -> None:
    """Make `out` the products of matrices times `scale`, in one launch."""
    torch.baddbmm(out, first, second, beta=0, alpha=scale, out=out)


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


def attend_prompt(
    attention: Module,
    projected: Projected,
    rows: Tensor,
    mask: Tensor,
    latent_scale: float = 1.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention output [1, S, H * v] of one request's queries over its `rows` [T, r + d] under `mask` bool[S, T]. Their
    latents are multiplied by `latent_scale`. `sinks` float32[H] are as in kernels/attention.py."""
    latent, rotary = torch.split(rows[None, None], [attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
    keys, values = attention.expand_kv(_scaled(latent, 1 / latent_scale), rotary)
    queries = torch.cat((projected.query_nope, projected.query_rope), dim=-1)
    width = values.shape[-1]
    if sinks is not None:
        queries, keys, values, mask = _with_sinks(queries, keys, values, mask, sinks / attention.scaling)
    output = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask[None, None], scale=attention.scaling)
    return output[..., :width].transpose(1, 2).flatten(2)


def _with_sinks(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values and mask with one value more, which is 1 in queries and 0 in rows, and one row more,
    in which it is the sink of a head and all else is 0. Each query sees that row."""
    queries = F.pad(queries, (0, 1), value=1.0)
    keys, values = (F.pad(one, (0, 1, 0, 1)) for one in (keys, values))
    keys[:, :, -1, -1] = sinks.to(keys.dtype)
    return queries, keys, values, F.pad(mask, (0, 1), value=True)
