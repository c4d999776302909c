"""Models whose KV heads select blocks of tokens (MiniMax-M3), with the KV cache behind swap-in.

Per layer, queries, keys and values are grouped-query attention's; K and V of a KV head are two planes of its rows. The
first layers are dense: all of their rows stay on the device, and steps read all. In the others each KV head selects
blocks by index keys that the heads share (kernels/block_topk.py), and the pages of these blocks are swapped in for that
head alone.

What a layer computes is in block_layers.py. A step on a CPU reads how many rows each request has, so that nothing here
can be captured in a graph.

Prompts attend as the library does, with masks over all rows in the slab, block of queries by block of queries.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.block_attention import attend_dense, attend_pages
from kernels.block_topk import block_topk
from kernels.layout import Geometry
from kernels.reference.block_topk import block_scores, top_blocks, write_pages
from kernels.rows import (
    read_index_keys,
    read_slab_rows,
    write_index_keys,
    write_new_rows,
    write_prompt_index_keys,
    write_slab_rows,
)
from kernels.state import DeviceState, MissPlan, StepBatch, real_rows
from kernels.swap_in import swap_in
from protocol.config_checks import WEIGHT_ONLY
from protocol.errors import ConfigError, InternalError, Unavailable
from protocol.messages import ModelInfo
from protocol.tokenizer_files import read_tokenizer
from worker.group.exchange import Collectives, Exchange
from worker.runners.adjust import Adjust
from worker.runners.base import (
    PromptPart,
    PromptPass,
    SamplerState,
    StepOutputs,
    UnitWritten,
    form_block_tokens,
    no_listener,
)
from worker.runners.block_layers import Angles, BlockLayers
from worker.runners.checkpoint import (
    describe_model,
    geometry_of,
    kv_kinds,
    library_refusals,
    read_config,
    require_kinds,
)
from worker.runners.drawing import draw_first, draw_step, fed_tokens
from worker.runners.held_weights import dtype_name, exchange_of, finish_loading, kept_memory, share_of, torch_dtype_of
from worker.weights.layout import ExpertShare
from worker.weights.matmul import DECODED, resolve_matmul
from worker.weights.model import held_bytes, load_model
from worker.weights.safetensors_header import FIELD

if TYPE_CHECKING:
    from worker.streams import Streams


@dataclass(eq=False)
class BlockPass(PromptPass):
    """A pass of P tokens on its way through the layers. The operation that enters it makes the tensors."""

    hidden: Tensor = field(init=False)  # [1, P, hidden]
    angles: Angles = field(init=False)  # [1, P, d]
    warm_start: dict[int, Tensor] = field(init=False, default_factory=dict)  # int32[A, k] of parts that end


@dataclass(eq=False)
class _Unit:
    """Rows first..stop-1 of a pass on their way through one layer."""

    prompts: BlockPass
    first: int
    stop: int
    pieces: list[tuple[int, PromptPart]]
    queries: Tensor = field(init=False)  # [1, B, H, D]
    taken: dict[int, Tensor] = field(init=False, default_factory=dict)  # bool[K, S, blocks] of each piece

    @property
    def rows(self) -> slice:
        return slice(self.first, self.stop)

    def place(self, piece: PromptPart) -> slice:
        """Return the rows of a piece in the unit."""
        return slice(piece.first - self.first, piece.end - self.first)


@dataclass(eq=False)
class _StepScratch:
    """Tensors that flow from one operation of a decode step to the next, for one batch size."""

    topk: Tensor  # int32[K, B, k]: pages
    out_rows: Tensor  # int32[K, B, k]: their device rows
    plan: MissPlan
    hidden: Tensor = field(init=False)  # [B, 1, hidden]
    angles: Angles = field(init=False)  # [B, 1, d]
    queries: Tensor = field(init=False)  # [B, H, D]


class BlockSparseRunner:
    """See worker/runners/base.py for the contract. Of a library's `model` on a CPU. Ranks of a group split no pass."""

    splits_passes = False

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        geometry: Geometry,
        *,
        deterministic_seats: int = 0,
        share: ExpertShare | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """`deterministic_seats` > 0: every step has that many rows, which are kept apart. Raises ConfigError.

        A `model` with the routed experts of `share` alone needs the `exchange` with the ranks that hold the others.
        """
        self.info = info
        self.geometry = geometry
        self.dtype: torch.dtype = model.dtype
        self.matmul = DECODED
        self.weights_seconds: dict[str, float] = {}  # for how long they were loaded, by where they were found
        self.weights_are_kept = False  # by a keeper, for the next worker
        self._layers = layers = BlockLayers(model, geometry, share=share, exchange=exchange)
        config = model.config
        self._blocks: int = config.index_topk_blocks
        self._block_tokens: int = config.index_block_size
        self._local: int = config.index_local_blocks
        self._block_tokens_max = form_block_tokens(gathered=False, deterministic=deterministic_seats > 0)
        if exchange is not None:
            self._block_tokens_max = min(self._block_tokens_max, exchange.rows_max)
        self._scratch: dict[int, _StepScratch] = {}
        if deterministic_seats:
            layers.require_rows_apart(deterministic_seats)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        row_dtype: str = "auto",
        index_dtype: str = "auto",
        deterministic_seats: int = 0,
        matmul: str = WEIGHT_ONLY,
        collectives: Collectives | None = None,
        rows_max: int = 0,
        draft_tokens: int = 0,
        keeper: Path | None = None,
        only_attach: bool = False,
    ) -> BlockSparseRunner:
        """Load a checkpoint directory, as TransformersRunner.load does. Raises ConfigError for what this runner does
        not serve: a GPU, drafts, products of quantized rows."""
        began = time.monotonic()
        config, tokenizer = read_config(path, with_weights=False), read_tokenizer(path)
        _require_served(config, device, draft_tokens)
        torch_dtype = torch_dtype_of(dtype, config)
        products = resolve_matmul(
            matmul, device=torch.device(device), dtype=torch_dtype, quantization=None, deterministic=False
        )
        with library_refusals(path, FIELD):
            share = share_of(path, collectives)
            memory = kept_memory(
                keeper,
                path,
                device,
                torch_dtype,
                products,
                keeps_fp8=False,
                share=share,
                draft_layer=False,
                only_attach=only_attach,
            )
            if memory is None and only_attach:
                raise Unavailable(
                    "no weights that can be mapped", field="keeper", value=keeper, remedy="see the line before"
                )
            about: Any = {
                "dtype": torch_dtype,
                "device": device,
                "matmul": products,
                "experts": share,
                "memory": memory,
            }
            model = load_model(path, None, **about)
        kinds = kv_kinds(dtype_name(torch_dtype), kv_dtype, row_dtype, index_dtype)
        require_kinds(model.config, kinds, dtype_name(torch_dtype))
        info, geometry = describe_model(path, model.config, tokenizer), geometry_of(model.config, kinds)
        exchange = None
        if collectives is not None:
            exchange = exchange_of(model, collectives, rows_max, torch_dtype, deterministic=deterministic_seats > 0)
        runner = cls(model, info, geometry, deterministic_seats=deterministic_seats, share=share, exchange=exchange)
        finish_loading(runner, memory, path, began)
        return runner

    @property
    def block_tokens_max(self) -> int:
        """Rows of the largest unit."""
        return self._block_tokens_max

    def prompt_bytes(self, pass_tokens: int) -> int:
        """Return 0: the budget of a CPU's device memory has no scratch memory in it."""
        return 0

    def weights_bytes(self) -> dict[str, int]:
        """Return bytes of the weights as they are held, by dtype."""
        return held_bytes(self._layers.model)

    # ---------------------------------------------------------------- launches

    def begin_pass(
        self, streams: Streams, state: DeviceState, parts: Sequence[PromptPart], tokens: Tensor
    ) -> BlockPass:
        """One operation on `compute`."""
        prompts = BlockPass(tuple(parts))
        streams.compute.launch("prompt embed", partial(self._embed_prompts, prompts, tokens))
        return prompts

    def launch_unit(
        self,
        streams: Streams,
        state: DeviceState,
        prompts: PromptPass,
        layer: int,
        first: int,
        stop: int,
        written: UnitWritten = no_listener,
        rows: int = 0,
    ) -> None:
        """Two operations on `compute`; the block is written behind the first one."""
        own = _own(prompts)
        unit = _Unit(own, first, stop, list(own.pieces(first, stop)))
        streams.compute.launch(f"prompt project {layer}", partial(self._project_unit, unit, state, layer))
        written()
        streams.compute.launch(f"prompt attend {layer}", partial(self._attend_unit, unit, state, layer, rows))

    def launch_padding(self, streams: Streams, layer: int, rows: int) -> None:
        """One operation on `compute`."""
        streams.compute.launch(f"prompt pad {layer}", partial(self._pad, layer, rows))

    def launch_first_token(
        self,
        streams: Streams,
        sampler: SamplerState,
        prompts: PromptPass,
        number: int,
        outputs: StepOutputs,
        adjust: Adjust | None,
    ) -> None:
        """One operation on `compute`."""
        work = partial(self._first_token, _own(prompts), number, sampler, outputs, adjust)
        streams.compute.launch("first token", work)

    def launch_forward(self, streams: Streams, state: DeviceState, sampler: SamplerState, batch: StepBatch) -> None:
        """Two operations per layer on `compute`, and of each KV head that selects a swap-in on `swap`."""
        scratch, compute, swap = self._scratch_for(len(batch.seats)), streams.compute, streams.swap
        compute.launch("embed", partial(self._embed, scratch, sampler, batch))
        for layer, group in enumerate(self.geometry.group_of_layer):
            compute.launch(f"project {layer}", partial(self._project, scratch, state, batch, layer))
            if layer >= self.geometry.dense:
                swap.wait(compute.record("selected"))
                for head in range(self.geometry.heads):
                    selected = scratch.topk[head], batch, scratch.out_rows[head], scratch.plan
                    work = partial(swap_in, state, group * self.geometry.heads + head, *selected)
                    swap.launch(f"swap in {layer}", streams.of_layer(layer, work))
                compute.wait(swap.record("swapped_in"))
            compute.launch(f"attend {layer}", partial(self._attend, scratch, state, batch, layer))

    def launch_sample(
        self, streams: Streams, sampler: SamplerState, batch: StepBatch, outputs: StepOutputs, adjust: Adjust | None
    ) -> None:
        """One operation on `compute`."""
        scratch = self._scratch_for(len(batch.seats))
        streams.compute.launch("sample", partial(self._sample, scratch, sampler, batch, outputs, adjust))

    # ---------------------------------------------------------------- a decode step

    @torch.inference_mode()
    def _embed(self, scratch: _StepScratch, sampler: SamplerState, batch: StepBatch) -> None:
        tokens, positions = fed_tokens(sampler, batch, real_rows(batch))
        scratch.hidden, scratch.angles = self._layers.enter(tokens.unsqueeze(1), positions.unsqueeze(1))

    @torch.inference_mode()
    def _project(self, scratch: _StepScratch, state: DeviceState, batch: StepBatch, layer: int) -> None:
        module, group = self._layers[layer], self.geometry.group_of_layer[layer]
        entered = module.input_layernorm(scratch.hidden)
        projected = self._layers.project(module.self_attn, entered, scratch.angles)
        scratch.queries = projected.queries.squeeze(1).contiguous()
        for plane, values in enumerate(self._layers.planes(projected)):
            write_new_rows(state, layer, batch, values.squeeze(1).contiguous().view(torch.uint8), plane)
        if layer < self.geometry.dense:
            return
        index = self._layers.index(module.self_attn.indexer, entered, scratch.angles)
        write_index_keys(state, group, batch, index.keys.squeeze(1).contiguous().view(torch.uint8))
        queries = index.queries.squeeze(1).contiguous()
        block_topk(state, group, queries, batch, scratch.topk, block_tokens=self._block_tokens, local=self._local)

    @torch.inference_mode()
    def _attend(self, scratch: _StepScratch, state: DeviceState, batch: StepBatch, layer: int) -> None:
        attention = self._layers[layer].self_attn
        attended = torch.empty_like(scratch.queries)
        if layer < self.geometry.dense:
            attend_dense(state, layer, scratch.queries, batch, attention.scaling, attended)
        else:
            about = scratch.topk, scratch.out_rows, batch, attention.scaling
            attend_pages(state, layer, scratch.queries, *about, attended)
        over, attended = self._layers.over(len(attended), real_rows(batch)), attended.flatten(1).unsqueeze(1)
        scratch.hidden = self._layers.leave(layer, scratch.hidden, attended, self._layers.decode_experts, over)

    @torch.inference_mode()
    def _sample(
        self,
        scratch: _StepScratch,
        sampler: SamplerState,
        batch: StepBatch,
        outputs: StepOutputs,
        adjust: Adjust | None,
    ) -> None:
        draw_step(self._layers.logits(scratch.hidden), sampler, batch, outputs, adjust)

    # ---------------------------------------------------------------- prompts

    @torch.inference_mode()
    def _embed_prompts(self, prompts: BlockPass, tokens: Tensor) -> None:
        positions = torch.cat([torch.arange(part.start, part.stop) for part in prompts.parts])
        prompts.hidden, prompts.angles = self._layers.enter(tokens.clone()[None], positions[None])
        shape = self.geometry.selections, self.geometry.topk
        prompts.warm_start = {
            number: torch.full(shape, -1, dtype=torch.int32) for number, part in enumerate(prompts.parts) if part.ends
        }

    @torch.inference_mode()
    def _project_unit(self, unit: _Unit, state: DeviceState, layer: int) -> None:
        module, group = self._layers[layer], self.geometry.group_of_layer[layer]
        entered = module.input_layernorm(unit.prompts.hidden[:, unit.rows])
        cos, sin = unit.prompts.angles
        angles = cos[:, unit.rows], sin[:, unit.rows]
        projected = self._layers.project(module.self_attn, entered, angles)
        unit.queries = projected.queries
        index = None if layer < self.geometry.dense else self._layers.index(module.self_attn.indexer, entered, angles)
        for number, piece in unit.pieces:
            place = unit.place(piece)
            for plane, values in enumerate(self._layers.planes(projected)):
                rows = values[0, place].contiguous().view(torch.uint8)
                write_slab_rows(state, layer, piece.seat, piece.start, rows, plane)
            if index is not None:
                keys = index.keys[0, place].contiguous().view(torch.uint8)
                write_prompt_index_keys(state, group, piece.seat, piece.start, keys)
                self._select(unit, state, group, number, piece, index.queries[0, place])

    def _select(
        self, unit: _Unit, state: DeviceState, group: int, number: int, piece: PromptPart, queries: Tensor
    ) -> None:
        """Select blocks of each token of a piece, of `queries` [S, K, d], and keep what the last of a prompt does."""
        keys = read_index_keys(state, group, piece.seat, piece.stop).view(self.dtype)
        positions = torch.arange(piece.start, piece.stop)
        scores = block_scores(queries.transpose(0, 1), keys, positions, self._block_tokens)
        unit.taken[number] = top_blocks(scores, positions // self._block_tokens, self._blocks, self._local)
        if piece.ends:
            first = group * self.geometry.heads
            own = unit.prompts.warm_start[number][first : first + self.geometry.heads]
            write_pages(unit.taken[number][:, -1], piece.stop, self._block_tokens, own)

    @torch.inference_mode()
    def _attend_unit(self, unit: _Unit, state: DeviceState, layer: int, rows: int) -> None:
        attended = torch.zeros_like(unit.queries)
        for number, piece in unit.pieces:
            place, positions = unit.place(piece), torch.arange(piece.start, piece.stop)
            reached = (torch.arange(piece.stop) <= positions.unsqueeze(1)).expand(self.geometry.heads, -1, -1)
            if number in unit.taken:
                tokens = unit.taken[number].repeat_interleave(self._block_tokens, dim=-1)
                reached = reached & tokens[..., : piece.stop]
            attended[0, place] = self._attended(state, layer, piece, unit.queries[0, place], reached)
        hidden = unit.prompts.hidden[:, unit.rows]
        over = self._layers.over(rows or hidden.shape[1])
        hidden.copy_(self._layers.leave(layer, hidden, attended.flatten(2), self._layers.prompt_experts, over))

    def _attended(self, state: DeviceState, layer: int, piece: PromptPart, queries: Tensor, reached: Tensor) -> Tensor:
        """Return attention [S, H, D] of `queries` [S, H, D] over the rows of `layer` where `reached` bool[K, S, T]."""
        g, out = self.geometry, torch.empty_like(queries)
        each, scaling = queries.shape[1] // g.heads, self._layers[layer].self_attn.scaling
        for head in range(g.heads):
            key, value = (
                read_slab_rows(state, layer, piece.seat, piece.stop, plane).view(self.dtype).unsqueeze(0)
                for plane in g.planes_of(head)
            )
            own = slice(head * each, (head + 1) * each)
            found = torch.nn.functional.scaled_dot_product_attention(
                queries[:, own].transpose(0, 1),
                key.expand(each, -1, -1),
                value.expand(each, -1, -1),
                attn_mask=reached[head],
                scale=scaling,
            )
            out[:, own] = found.transpose(0, 1)
        return out

    @torch.inference_mode()
    def _pad(self, layer: int, rows: int) -> None:
        self._layers.pad(layer, rows)

    @torch.inference_mode()
    def _first_token(
        self, prompts: BlockPass, number: int, sampler: SamplerState, outputs: StepOutputs, adjust: Adjust | None
    ) -> None:
        part = prompts.parts[number]
        if outputs.warm_start is not None:
            outputs.warm_start.copy_(prompts.warm_start[number])
        logits = self._layers.logits(prompts.hidden[:, part.end - 1 : part.end])
        draw_first(logits, part.seat, part.stop, sampler, outputs, adjust)

    def _scratch_for(self, rows: int) -> _StepScratch:
        if rows not in self._scratch:
            shape = self.geometry.heads, rows, self.geometry.topk
            topk, out_rows = torch.full((2, *shape), -1, dtype=torch.int32)
            self._scratch[rows] = _StepScratch(topk, out_rows, MissPlan.allocate(rows, self.geometry.topk))
        return self._scratch[rows]


def _require_served(config: Mapping[str, Any], device: str, drafts: int) -> None:
    """Raise ConfigError naming the first setting that this runner does not serve."""
    kind = config["model_type"]
    for is_asked, field_name, value, remedy in (
        (device != "cpu", "worker.device", device, "use cpu"),
        (drafts > 0, "worker.draft_tokens", drafts, "use 0"),
    ):
        if is_asked:
            raise ConfigError(f"not served yet for {kind}", field=field_name, value=value, remedy=remedy)


def _own(prompts: PromptPass) -> BlockPass:
    """Return a pass that this kind of runner began. Raises InternalError for any other."""
    if not isinstance(prompts, BlockPass):
        raise InternalError("another runner began this pass")
    return prompts
