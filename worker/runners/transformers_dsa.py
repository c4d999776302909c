"""DeepSeek-V3.2 and GLM-5 from the transformers library, with the KV cache behind swap-in.

Weights, projections, norms, rotary embedding, MLP, experts, router and lm_head are the library's modules, called piece
by piece; nothing in the library is patched. What is replaced is the forward of Attention and Indexer (attention.py).
Any checkpoint directory of the two families loads: config.json, safetensors, a tokenizer if there is one.

Per layer, a decode step is two operations on `compute`: *project* (norm, projections, write row and index key, and on
an anchor layer index_topk and swap_in) and *attend* (gather, attention, output projection, MLP). Layers that share an
anchor's selection get their misses copied on `swap` while earlier layers compute; their *attend* waits for that alone.

Deterministic mode promises that a row's result does not depend on its neighbours nor on its place in a batch of a fixed
size. Measured on AVX-512 with one thread, fp32: `F.linear` and `bmm` over heads keep rows apart at every size tried;
`W @ X.T` does not (5 to 7 rows take another kernel); a loop of `mv` does and is twice as slow; silu and sigmoid differ
in the last bit between the vectorised body and the scalar tail of a flat tensor. So rows are batched, and rows of
zeros are added to the MLP's input until no row lies in a tail. Other processors are not taken on trust: `load` runs
the check of invariance.py and refuses deterministic mode when rows are not apart.

Experts: `batched_mm` in decode has a fixed shape per token; prefill uses `grouped_mm` as the library does by default,
whose shapes depend on the request's own chunk alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from coordinator.config import WorkerSettings
from coordinator.errors import BadInput, ConfigError
from coordinator.messages import ModelInfo
from kernels.index_topk import index_topk
from kernels.layout import Geometry
from kernels.rows import (
    gather_rows,
    read_index_keys,
    read_slab_rows,
    write_index_keys,
    write_new_rows,
    write_prompt_index_keys,
    write_slab_rows,
)
from kernels.state import DeviceState, MissPlan, StepBatch, real_rows
from kernels.swap_in import replay_misses, swap_in
from worker.runners import attention as mla
from worker.runners.base import SamplerState, StepOutputs
from worker.runners.checkpoint import describe_model, geometry_of, read_config
from worker.runners.invariance import require_rows_apart
from worker.runners.sampling import sample

if TYPE_CHECKING:
    from worker.streams import Fence, Streams

#: The rotary function of each family's indexer, by its name in the library's module. Attention interleaves in both.
INDEX_ROPE: Final = {
    "deepseek_v32": "apply_rotary_pos_emb",
    "glm_moe_dsa": "apply_rotary_pos_emb_interleave",
}
#: torch's CPU loops take this many floats at a time (two AVX-512 registers); what is left over takes another path.
VECTOR_FLOATS: Final = 32

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class _Layer:
    number: int
    group: int
    module: mla.Module
    absorbed: mla.Absorbed
    anchor: bool  # runs its own indexer
    followers: tuple[int, ...]  # of an anchor: the layers that share its selection

    @property
    def attention(self) -> mla.Module:
        return self.module.self_attn


@dataclass(eq=False)
class _Scratch:
    """What flows from one operation of a decode step to the next, for one batch size."""

    hidden: Tensor  # [B, 1, hidden]
    cos: Tensor  # [B, 1, d]
    sin: Tensor
    queries: Tensor  # [B, H, r + d]
    topk: Tensor  # int32[B, k]
    out_rows: Tensor  # int32[B, k]: device rows of the current group's selection
    plan: MissPlan  # one serves all groups: compute waits for every replay of a group before the next swap_in


class TransformersRunner:
    """See worker/runners/base.py for the contract. Made by `load_runner` or `load`."""

    def __init__(self, model: Any, info: ModelInfo, geometry: Geometry, *, deterministic_rows: int = 0) -> None:
        """`deterministic_rows` > 0: every batch has that many rows, and rows are kept apart. Raises ConfigError."""
        self.info = info
        self.geometry = geometry
        self.dtype: torch.dtype = model.dtype
        self._model = model
        library = sys.modules[type(model).__module__]
        self._rope: mla.Rope = library.apply_rotary_pos_emb_interleave
        self._index_rope: mla.Rope = getattr(library, INDEX_ROPE[model.config.model_type])
        self._layers = [self._layer(number) for number in range(geometry.layers)]
        self._scratch: dict[int, _Scratch] = {}
        self._row_multiple = _row_multiple(model.config) if deterministic_rows else 1
        if deterministic_rows:
            self._require_rows_apart(deterministic_rows)

    @classmethod
    def load(
        cls, path: str | Path, *, device: str = "cpu", dtype: str = "auto", deterministic_rows: int = 0
    ) -> TransformersRunner:
        """Load a checkpoint directory. Raises ConfigError when it is none of the two families, or cannot be served."""
        config = read_config(path)
        torch_dtype = _torch_dtype(dtype, config)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=AutoConfig.from_pretrained(path), dtype=torch_dtype, attn_implementation="sdpa"
        )
        model = model.to(device).eval().requires_grad_(False)
        geometry = geometry_of(model.config, torch_dtype.itemsize)
        return cls(model, describe_model(path, model.config), geometry, deterministic_rows=deterministic_rows)

    def launch_prefill_chunk(
        self,
        streams: Streams,
        state: DeviceState,
        sampler: SamplerState,
        seat: int,
        tokens: Tensor,
        start: int,
        outputs: StepOutputs | None,
    ) -> None:
        """One operation on `compute`. Raises BadInput for a token outside the vocabulary, before launching."""
        if not len(tokens) or int(tokens.min()) < 0 or int(tokens.max()) >= self.info.vocab_size:
            raise BadInput(
                "token ids must lie in the vocabulary",
                field="prompt",
                value=f"{tokens.tolist()[:8]}...",
                remedy=f"send 1 or more ids from 0 to {self.info.vocab_size - 1}",
            )
        streams.compute.launch(f"prefill {start}", partial(self._prefill, state, sampler, seat, tokens, start, outputs))

    def launch_decode(
        self, streams: Streams, state: DeviceState, sampler: SamplerState, batch: StepBatch, outputs: StepOutputs
    ) -> None:
        """Two operations per layer on `compute`, and one on `swap` for each layer that shares a selection."""
        scratch, compute = self._scratch_for(len(batch.seats)), streams.compute
        prefetched: dict[int, Fence] = {}
        compute.launch("embed", partial(self._embed, scratch, sampler, batch))
        for layer in self._layers:
            compute.launch(f"project {layer.number}", partial(self._project, scratch, state, batch, layer))
            if layer.followers:
                prefetched.update(_launch_replay(streams, state, layer.followers, scratch.plan))
            if layer.number in prefetched:
                compute.wait(prefetched[layer.number])
            compute.launch(f"attend {layer.number}", partial(self._attend, scratch, state, layer))
        compute.launch("sample", partial(self._sample, scratch, sampler, batch, outputs))

    # ---------------------------------------------------------------- operations

    @torch.inference_mode()
    def _prefill(
        self,
        state: DeviceState,
        sampler: SamplerState,
        seat: int,
        tokens: Tensor,
        start: int,
        outputs: StepOutputs | None,
    ) -> None:
        hidden = self._model.model.embed_tokens(tokens[None])
        positions = torch.arange(start, start + len(tokens), device=tokens.device)[None]
        cos, sin = self._model.model.rotary_emb(hidden, positions)
        mask = torch.empty(0)
        for layer in self._layers:
            normed = layer.module.input_layernorm(hidden)
            projected = mla.project(layer.attention, self._rope, normed, cos, sin)
            write_slab_rows(state, layer.number, seat, start, _bytes(projected.rows[0]))
            if layer.anchor:
                mask = self._prompt_mask(state, layer, seat, start, normed, projected, cos, sin)
            rows = read_slab_rows(state, layer.number, seat, start + len(tokens)).view(self.dtype)
            attended = mla.attend_prompt(layer.attention, projected, rows, mask)
            hidden = self._finish_layer(layer, hidden, attended, "grouped_mm")
        if outputs is not None:
            self._first_token(sampler, seat, start + len(tokens), hidden, outputs)

    def _prompt_mask(
        self,
        state: DeviceState,
        layer: _Layer,
        seat: int,
        start: int,
        normed: Tensor,
        projected: mla.Projected,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Write the chunk's index keys; bool[S, T], what each of its queries attends to."""
        indexer = layer.attention.indexer
        index = mla.project_index(indexer, self._index_rope, normed, projected.residual, cos, sin)
        write_prompt_index_keys(state, layer.group, seat, start, _bytes(index.keys[0]))
        keys = read_index_keys(state, layer.group, seat, start + normed.shape[1]).view(self.dtype)
        return mla.select_mask(index, keys, start, self.geometry.topk, indexer.softmax_scale)

    def _first_token(
        self, sampler: SamplerState, seat: int, position: int, hidden: Tensor, outputs: StepOutputs
    ) -> None:
        logits = self._logits(hidden[:, -1:])
        where = torch.tensor([seat], device=hidden.device)
        token = sample(
            logits,
            sampler.temperature[where],
            sampler.top_p[where],
            sampler.seed[where],
            torch.tensor([position], device=hidden.device),
        )
        outputs.tokens[:1] = token
        sampler.last_token[where] = token
        if outputs.logits is not None:
            outputs.logits[:1] = logits

    @torch.inference_mode()
    def _embed(self, scratch: _Scratch, sampler: SamplerState, batch: StepBatch) -> None:
        drawn = sampler.last_token[batch.seats.long().clamp(min=0)]
        tokens = torch.where(batch.inputs >= 0, batch.inputs, drawn).masked_fill(~real_rows(batch), 0)
        scratch.hidden = self._model.model.embed_tokens(tokens.long().unsqueeze(1))
        positions = (batch.lengths.long() - 1).clamp(min=0).unsqueeze(1)
        scratch.cos, scratch.sin = self._model.model.rotary_emb(scratch.hidden, positions)

    @torch.inference_mode()
    def _project(self, scratch: _Scratch, state: DeviceState, batch: StepBatch, layer: _Layer) -> None:
        normed = layer.module.input_layernorm(scratch.hidden)
        projected = mla.project(layer.attention, self._rope, normed, scratch.cos, scratch.sin)
        scratch.queries = mla.absorb_queries(layer.absorbed, projected)
        write_new_rows(state, layer.number, batch, _bytes(projected.rows.squeeze(1)))
        if layer.anchor:
            self._select(scratch, state, batch, layer, normed, projected)

    def _select(
        self,
        scratch: _Scratch,
        state: DeviceState,
        batch: StepBatch,
        layer: _Layer,
        normed: Tensor,
        projected: mla.Projected,
    ) -> None:
        indexer = layer.attention.indexer
        index = mla.project_index(indexer, self._index_rope, normed, projected.residual, scratch.cos, scratch.sin)
        write_index_keys(state, layer.group, batch, _bytes(index.keys.squeeze(1)))
        queries, weights = index.queries.squeeze(1).contiguous(), index.weights.squeeze(1).contiguous()
        index_topk(state, layer.group, queries, weights, batch, indexer.softmax_scale, scratch.topk)
        swap_in(state, layer.group, scratch.topk, batch, scratch.out_rows, scratch.plan)

    @torch.inference_mode()
    def _attend(self, scratch: _Scratch, state: DeviceState, layer: _Layer) -> None:
        rows = gather_rows(state, layer.number, scratch.out_rows).view(self.dtype)
        held = scratch.out_rows >= 0
        attended = mla.attend_rows(layer.absorbed, scratch.queries, rows, held, layer.attention.scaling)
        scratch.hidden = self._finish_layer(layer, scratch.hidden, attended.unsqueeze(1), "batched_mm")

    @torch.inference_mode()
    def _sample(self, scratch: _Scratch, sampler: SamplerState, batch: StepBatch, outputs: StepOutputs) -> None:
        logits = self._logits(scratch.hidden)
        real, seats = real_rows(batch), batch.seats.long().clamp(min=0)
        tokens = sample(
            logits,
            sampler.temperature[seats].masked_fill(~real, 0),
            sampler.top_p[seats],
            sampler.seed[seats],
            batch.lengths.long(),
        )
        outputs.tokens.copy_(tokens.masked_fill(~real, -1))
        sampler.last_token[seats[real]] = tokens[real]
        if outputs.logits is not None:
            outputs.logits.copy_(logits)

    # ---------------------------------------------------------------- parts of operations

    def _finish_layer(self, layer: _Layer, hidden: Tensor, attended: Tensor, experts: str) -> Tensor:
        """Output projection, residuals and MLP: the hidden states [N, S, hidden] after the layer."""
        hidden = hidden + layer.attention.o_proj(attended)
        return hidden + self._mlp(layer.module.mlp, layer.module.post_attention_layernorm(hidden), experts)

    def _mlp(self, mlp: mla.Module, hidden: Tensor, experts: str) -> Tensor:
        rows = len(hidden)
        surplus = -rows % self._row_multiple if experts == "batched_mm" else 0
        if surplus:
            hidden = F.pad(hidden, (0, 0, 0, 0, 0, surplus))
        output: Tensor = _moe(mlp, hidden, experts) if hasattr(mlp, "experts") else mlp(hidden)
        return output[:rows]

    def _logits(self, hidden: Tensor) -> Tensor:
        """float32[B, vocab] of hidden states [B, 1, hidden]."""
        logits: Tensor = self._model.lm_head(self._model.model.norm(hidden))
        return logits.squeeze(1).float()

    # ---------------------------------------------------------------- set-up

    def _layer(self, number: int) -> _Layer:
        group = self.geometry.group_of_layer[number]
        members = self.geometry.layers_of_group(group)
        module = self._model.model.layers[number]
        return _Layer(
            number=number,
            group=group,
            module=module,
            absorbed=mla.Absorbed.of(module.self_attn),
            anchor=members[0] == number,
            followers=members[1:] if members[0] == number else (),
        )

    def _scratch_for(self, rows: int) -> _Scratch:
        if rows not in self._scratch:
            topk, device = self.geometry.topk, self._model.device
            empty = torch.empty(0, device=device)
            self._scratch[rows] = _Scratch(
                hidden=empty,
                cos=empty,
                sin=empty,
                queries=empty,
                topk=torch.full((rows, topk), -1, dtype=torch.int32, device=device),
                out_rows=torch.full((rows, topk), -1, dtype=torch.int32, device=device),
                plan=MissPlan.allocate(rows, topk, device),
            )
        return self._scratch[rows]

    @torch.inference_mode()
    def _require_rows_apart(self, rows: int) -> None:
        """Check one layer of each kind. Raises ConfigError."""
        kinds = {(layer.anchor, hasattr(layer.module.mlp, "experts")): layer for layer in self._layers}
        random_rows = partial(
            torch.randn, rows, 1, self._model.config.hidden_size, dtype=self.dtype, device=self._model.device
        )
        for layer in kinds.values():
            require_rows_apart(partial(self._dense, layer), random_rows)

    def _dense(self, layer: _Layer, hidden: Tensor) -> Tensor:
        """All of a decode step that mixes no tokens, [B, n], for hidden states [B, 1, hidden] at one position."""
        positions = torch.ones(len(hidden), 1, dtype=torch.long, device=hidden.device)
        cos, sin = self._model.model.rotary_emb(hidden, positions)
        normed = layer.module.input_layernorm(hidden)
        projected = mla.project(layer.attention, self._rope, normed, cos, sin)
        queries = mla.absorb_queries(layer.absorbed, projected)
        held = torch.ones(len(hidden), 1, dtype=torch.bool, device=hidden.device)
        attended = mla.attend_rows(layer.absorbed, queries, projected.rows, held, layer.attention.scaling)
        finished = self._finish_layer(layer, hidden, attended.unsqueeze(1), "batched_mm")
        parts = [projected.rows, queries, finished, self._logits(finished)]
        if layer.anchor:
            indexer = layer.attention.indexer
            index = mla.project_index(indexer, self._index_rope, normed, projected.residual, cos, sin)
            parts += [index.queries, index.keys, index.weights]
        return torch.cat([part.flatten(1).float() for part in parts], dim=1)


def load_runner(settings: WorkerSettings) -> TransformersRunner:
    """The runner a worker's settings ask for. Raises ConfigError."""
    return TransformersRunner.load(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        deterministic_rows=settings.seats if settings.deterministic else 0,
    )


def _launch_replay(
    streams: Streams, state: DeviceState, followers: tuple[int, ...], plan: MissPlan
) -> dict[int, Fence]:
    """Repeat the anchor's miss plan for each follower on `swap`; the fence after which each may gather its rows."""
    streams.swap.wait(streams.compute.record("plan_ready"))
    prefetched = {}
    for layer in followers:
        streams.swap.launch(f"replay {layer}", partial(replay_misses, state, layer, plan))
        prefetched[layer] = streams.swap.record("prefetched")
    return prefetched


def _moe(moe: mla.Module, hidden: Tensor, experts: str) -> Tensor:
    """The library's mixture of experts, with the experts' products formed as `experts` names."""
    forward: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS[experts]
    flat = hidden.view(-1, hidden.shape[-1])
    _, weights, chosen = moe.gate(hidden)
    shared: Tensor = moe.shared_experts(hidden)
    return forward(moe.experts, flat, chosen, weights).view(hidden.shape) + shared


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def _row_multiple(config: Any) -> int:
    """Rows whose flat activations fill whole vectors, so that no row lies in a tail (see the top of this file)."""
    shared = config.moe_intermediate_size * config.n_shared_experts
    widths = gcd(config.intermediate_size, shared, config.n_routed_experts)
    return VECTOR_FLOATS // gcd(VECTOR_FLOATS, widths)


def _torch_dtype(name: str, config: dict[str, Any]) -> torch.dtype:
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    chosen = stored if name == "auto" else name
    if chosen not in DTYPES:
        raise ConfigError(
            "cannot be served", field="worker.dtype", value=chosen, remedy=f"use one of {', '.join(DTYPES)}"
        )
    return DTYPES[chosen]
