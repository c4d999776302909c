"""DeepSeek-V3.2 and GLM-5 from the transformers library, with the KV cache behind swap-in.

Weights, projections, norms, rotary embedding, MLP, experts, router and lm_head are the library's modules, called piece
by piece; nothing in the library is patched. What is replaced is the forward of Attention and Indexer (attention.py).
Any checkpoint directory of the two families loads: config.json, safetensors, a tokenizer if there is one.

Per layer, a decode step is two operations on `compute`: *project* (norm, projections, write row and index key, and on
an anchor layer index_topk and swap_in) and *attend* (attention over rows, output projection, MLP). Layers that share an
anchor's selection get their misses copied on `swap` while earlier layers compute; their *attend* waits for that alone.
No operation of a step waits for the device or takes a shape from data: on a GPU it can be captured in a graph. What
flows from one operation to the next lies in a _Scratch; in a graph, the library's intermediates lie in its pool.

Rows and index keys are kept in a format of kernels/row_format.py (worker.kv_dtype), by default the model's own. Index
keys in fp8 are rotated first, and queries with them, by a Hadamard matrix: scores stay what they are but for rounding,
and one scale fits all values of a key. DeepSeek's own code does so; the model library, which keeps bfloat16, does not.

Deterministic mode promises that a row's result does not depend on its neighbours nor on its place in a batch of a fixed
size. Measured on AVX-512 with one thread, fp32: `F.linear` and `bmm` over heads keep rows apart at every size tried;
`W @ X.T` does not (5 to 7 rows take another kernel); a loop of `mv` does and is twice as slow; silu and sigmoid differ
in the last bit between the vectorised body and the scalar tail of a flat tensor. So rows are batched, and rows of
zeros are added to the MLP's input until no row lies in a tail. Other processors, GPUs too, are not taken on trust: the
check of invariance.py runs at start and refuses deterministic mode when rows are not apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from coordinator.config import WorkerSettings
from coordinator.errors import ConfigError
from coordinator.messages import ModelInfo
from kernels.attention import attend_rows, prepare_attention
from kernels.index_topk import index_topk, prepare_index
from kernels.layout import Geometry, pages_for
from kernels.prompt_topk import prepare_prompt
from kernels.row_format import hadamard, index_key_format_of, kv_row_format_of
from kernels.rows import write_index_keys, write_new_rows, write_prompt_index_keys, write_slab_rows
from kernels.state import DeviceState, MissPlan, StepBatch, real_rows
from kernels.swap_in import replay_misses, swap_in
from worker.runners import attention as mla
from worker.runners.base import SamplerState, StepOutputs
from worker.runners.checkpoint import describe_model, geometry_of, read_config
from worker.runners.experts import experts_for, mixture
from worker.runners.invariance import require_rows_apart
from worker.runners.prompt import Expanded, Gathered, PromptAttention
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

#: Called with group, batch and its top-k int32[B, k], which it may overwrite, before swap_in reads it.
AfterIndexTopk = Callable[[int, StepBatch, Tensor], None]

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
    latents: Tensor  # [B, H, r]
    topk: Tensor  # int32[B, k]
    out_rows: Tensor  # int32[B, k]: device rows of the current group's selection
    plan: MissPlan  # one serves all groups: compute waits for every replay of a group before the next swap_in

    @property
    def angles(self) -> tuple[Tensor, Tensor]:
        return self.cos, self.sin


class TransformersRunner:
    """See worker/runners/base.py for the contract. Made by `load_runner` or `load`."""

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        geometry: Geometry,
        *,
        deterministic_rows: int = 0,
        gathered_prefill: bool | None = None,
        after_index_topk: AfterIndexTopk | None = None,
    ) -> None:
        """`deterministic_rows` > 0: every batch has that many rows, and rows are kept apart. Raises ConfigError.

        `gathered_prefill` chooses the form of prefill, by default the device's; `after_index_topk` sees, and may
        replace, what the indexer selected in decode steps.
        """
        self.info = info
        self.geometry = geometry
        self.dtype: torch.dtype = model.dtype
        self.after_index_topk = after_index_topk
        self._model = model
        config, device = model.config, model.device
        self._rows = kv_row_format_of(geometry.row_bytes, config.kv_lora_rank, config.qk_rope_head_dim)
        self._keys = index_key_format_of(geometry.index_row_bytes, config.index_head_dim)
        scaled = self._keys.kind == "fp8"
        self._rotation = hadamard(config.index_head_dim, self.dtype, device) if scaled else None
        self._index_dtype = self.dtype if scaled else DTYPES[self._keys.kind]  # index_topk wants queries as keys are
        library = sys.modules[type(model).__module__]
        self._rope: mla.Rope = library.apply_rotary_pos_emb_interleave
        self._index_rope: mla.Rope = getattr(library, INDEX_ROPE[config.model_type])
        self._layers = [self._layer(number) for number in range(geometry.layers)]
        self._scratch: dict[int, _Scratch] = {}
        self._prepared: DeviceState | None = None
        self._decode_experts, self._prompt_experts = experts_for(device, self.dtype)
        gathered = device.type == "cuda" if gathered_prefill is None else gathered_prefill
        self._prompt: PromptAttention = (
            Gathered(geometry.topk) if gathered else Expanded(self._rows, self._keys, self.dtype, geometry.topk)
        )
        self._row_multiple = _row_multiple(config) if deterministic_rows and device.type == "cpu" else 1
        if deterministic_rows:
            self._require_rows_apart(deterministic_rows)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        deterministic_rows: int = 0,
    ) -> TransformersRunner:
        """Load a checkpoint directory. Raises ConfigError when it is none of the two families, or cannot be served."""
        config = read_config(path)
        torch_dtype = _torch_dtype(dtype, config)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=AutoConfig.from_pretrained(path), dtype=torch_dtype, attn_implementation="sdpa"
        )
        model = model.to(device).eval().requires_grad_(False)
        geometry = geometry_of(model.config, _dtype_name(torch_dtype) if kv_dtype == "auto" else kv_dtype)
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
        """One operation on `compute`."""
        streams.compute.launch(f"prefill {start}", partial(self._prefill, state, sampler, seat, tokens, start, outputs))

    def launch_decode(
        self, streams: Streams, state: DeviceState, sampler: SamplerState, batch: StepBatch, outputs: StepOutputs
    ) -> None:
        """Two operations per layer on `compute`, and one on `swap` for each layer that shares a selection.

        The first step for a state compiles and allocates what steps and prompt chunks of any size will need.
        """
        self._prepare(state)
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
        selection = torch.empty(0)
        for layer in self._layers:
            normed = layer.module.input_layernorm(hidden)
            projected = mla.project(layer.attention, self._rope, normed, cos, sin)
            write_slab_rows(state, layer.number, seat, start, self._rows.encode(projected.rows[0]))
            if layer.anchor:
                index = self._project_index(layer, normed, projected, cos, sin)
                write_prompt_index_keys(state, layer.group, seat, start, self._keys.encode(index.keys[0]))
                scale = layer.attention.indexer.softmax_scale
                selection = self._prompt.select(state, layer.group, seat, start, index, scale)
            attended = self._prompt.attend(
                state, layer.number, layer.attention, layer.absorbed, seat, projected, selection
            )
            hidden = self._finish_layer(layer, hidden, attended, self._prompt_experts)
        if outputs is not None:
            self._first_token(sampler, seat, start + len(tokens), hidden, outputs)

    def _first_token(
        self, sampler: SamplerState, seat: int, position: int, hidden: Tensor, outputs: StepOutputs
    ) -> None:
        logits, own = self._logits(hidden[:, -1:]), slice(seat, seat + 1)
        positions = torch.full((1,), position, device=hidden.device)
        token = sample(logits, sampler.temperature[own], sampler.top_p[own], sampler.seed[own], positions)
        outputs.tokens[:1] = token
        sampler.last_token[own] = token
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
        write_new_rows(state, layer.number, batch, self._rows.encode(projected.rows.squeeze(1)))
        if layer.anchor:
            self._select(scratch, state, batch, layer, self._project_index(layer, normed, projected, *scratch.angles))

    def _select(
        self, scratch: _Scratch, state: DeviceState, batch: StepBatch, layer: _Layer, index: mla.IndexProjected
    ) -> None:
        write_index_keys(state, layer.group, batch, self._keys.encode(index.keys.squeeze(1)))
        queries, weights = index.queries.squeeze(1).contiguous(), index.weights.squeeze(1).contiguous()
        index_topk(state, layer.group, queries, weights, batch, layer.attention.indexer.softmax_scale, scratch.topk)
        if self.after_index_topk is not None:
            self.after_index_topk(layer.group, batch, scratch.topk)
        swap_in(state, layer.group, scratch.topk, batch, scratch.out_rows, scratch.plan)

    @torch.inference_mode()
    def _attend(self, scratch: _Scratch, state: DeviceState, layer: _Layer) -> None:
        scaling = layer.attention.scaling
        attend_rows(state, layer.number, scratch.queries, scratch.out_rows, scaling, scratch.latents)
        attended = mla.expand_values(layer.absorbed, scratch.latents)
        scratch.hidden = self._finish_layer(layer, scratch.hidden, attended.unsqueeze(1), self._decode_experts)

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
        _keep_drawn(sampler.last_token, seats, tokens, real)
        if outputs.logits is not None:
            outputs.logits.copy_(logits)

    # ---------------------------------------------------------------- parts of operations

    def _project_index(
        self, layer: _Layer, normed: Tensor, projected: mla.Projected, cos: Tensor, sin: Tensor
    ) -> mla.IndexProjected:
        """Queries, in the dtype that index_topk compares with the keys kept; keys, not encoded yet; weights."""
        indexer = layer.attention.indexer
        index = mla.project_index(indexer, self._index_rope, normed, projected.residual, cos, sin, self._rotation)
        return replace(index, queries=index.queries.to(self._index_dtype))

    def _finish_layer(self, layer: _Layer, hidden: Tensor, attended: Tensor, experts: str) -> Tensor:
        """Output projection, residuals and MLP: the hidden states [N, S, hidden] after the layer."""
        hidden = hidden + layer.attention.o_proj(attended)
        return hidden + self._mlp(layer.module.mlp, layer.module.post_attention_layernorm(hidden), experts)

    def _mlp(self, mlp: mla.Module, hidden: Tensor, experts: str) -> Tensor:
        rows = len(hidden)
        surplus = -rows % self._row_multiple if experts == self._decode_experts else 0
        if surplus:
            hidden = F.pad(hidden, (0, 0, 0, 0, 0, surplus))
        output: Tensor = mixture(mlp, hidden, experts) if hasattr(mlp, "experts") else mlp(hidden)
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

    def _prepare(self, state: DeviceState) -> None:
        if self._prepared is state:
            return
        config = self._model.config
        prepare_attention(state, config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim, self.dtype)
        prepare_index(state, config.index_n_heads, config.index_head_dim, self._index_dtype)
        prepare_prompt(state, config.index_n_heads, config.index_head_dim, self._index_dtype)
        self._prepared = state

    def _scratch_for(self, rows: int) -> _Scratch:
        if rows not in self._scratch:
            topk, config, device = self.geometry.topk, self._model.config, self._model.device
            empty = torch.empty(0, device=device)
            shape = (rows, config.num_attention_heads, config.kv_lora_rank)
            self._scratch[rows] = _Scratch(
                hidden=empty,
                cos=empty,
                sin=empty,
                queries=empty,
                latents=torch.empty(shape, dtype=self.dtype, device=device),
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
        state = self._state_of_rows(rows)
        for layer in kinds.values():
            require_rows_apart(partial(self._dense, layer, state), random_rows)

    def _dense(self, layer: _Layer, state: DeviceState, hidden: Tensor) -> Tensor:
        """All of a decode step that mixes no tokens, [B, n], for hidden states [B, 1, hidden] at one position."""
        rows = len(hidden)
        positions = torch.ones(rows, 1, dtype=torch.long, device=hidden.device)
        cos, sin = self._model.model.rotary_emb(hidden, positions)
        normed = layer.module.input_layernorm(hidden)
        projected = mla.project(layer.attention, self._rope, normed, cos, sin)
        queries = mla.absorb_queries(layer.absorbed, projected)
        state.rows[0, :rows] = self._rows.encode(projected.rows.squeeze(1))
        own = torch.arange(rows, dtype=torch.int32, device=hidden.device).unsqueeze(1)
        latents = self._scratch_for(rows).latents
        attend_rows(state, 0, queries, own, layer.attention.scaling, latents)
        attended = mla.expand_values(layer.absorbed, latents)
        finished = self._finish_layer(layer, hidden, attended.unsqueeze(1), self._decode_experts)
        parts = [projected.rows, queries, finished, self._logits(finished)]
        if layer.anchor:
            index = self._project_index(layer, normed, projected, cos, sin)
            parts += [index.queries, self._keys.decode(self._keys.encode(index.keys)), index.weights]
        return torch.cat([part.flatten(1).float() for part in parts], dim=1)

    def _state_of_rows(self, rows: int) -> DeviceState:
        """A state of one layer that holds one KV row for each row of a batch."""
        geometry = Geometry(1, self.geometry.row_bytes, (0,), self.geometry.index_row_bytes, self.geometry.topk)
        one = dict.fromkeys(("seats", "index_pages", "max_pages", "max_chunks", "max_slab_pages", "tail_slots"), 1)
        host = torch.zeros(1, geometry.page_bytes, dtype=torch.uint8)
        device = self._model.device
        return DeviceState.allocate(geometry, chunks=pages_for(rows), host=host, device=device, **one)


def load_runner(settings: WorkerSettings) -> TransformersRunner:
    """The runner a worker's settings ask for. Raises ConfigError."""
    return TransformersRunner.load(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
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


def _keep_drawn(last_token: Tensor, seats: Tensor, tokens: Tensor, real: Tensor) -> None:
    """last_token[seats] = tokens where `real` bool[B]; a seat is in one real row at most. No shape depends on data."""
    numbers = torch.arange(len(last_token), device=seats.device)
    owned = (numbers.unsqueeze(1) == seats) & real
    drawn = torch.where(owned, tokens, 0).sum(1, dtype=torch.int32)
    last_token.copy_(torch.where(owned.any(1), drawn, last_token))


def _row_multiple(config: Any) -> int:
    """Rows whose flat activations fill whole vectors, so that no row lies in a tail (see the top of this file)."""
    shared = config.moe_intermediate_size * config.n_shared_experts
    widths = gcd(config.intermediate_size, shared, config.n_routed_experts)
    return VECTOR_FLOATS // gcd(VECTOR_FLOATS, widths)


def _dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def _torch_dtype(name: str, config: dict[str, Any]) -> torch.dtype:
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    chosen = stored if name == "auto" else name
    if chosen not in DTYPES:
        raise ConfigError(
            "cannot be served", field="worker.dtype", value=chosen, remedy=f"use one of {', '.join(DTYPES)}"
        )
    return DTYPES[chosen]
