"""Models of the transformers library, with the KV cache behind swap-in.

Any checkpoint directory of a served family (worker/families/) loads: config.json, safetensors, a tokenizer if there is
one. What a layer computes is in layers.py; this is where it meets the KV cache.

Per layer, a block of a prompt pass is two operations on `compute`: *project* (norm, projections, write rows and index
keys, and on an anchor layer the top-k) and *attend* (attention over rows, output projection, MLP, and in a decode step
the norm ahead of the next layer). A decode step has *compress* ahead of them (the products that all others begin with),
and on an anchor layer *select* (what the indexer needs of the projections, index key, index_topk), so that the
selection is swapped in on `swap` beside *project*; *attend* waits for it (swapping.py).
No operation of a step waits for the device or takes a shape from data: on a GPU it can be captured in a graph. What
flows from one operation to the next lies in a _RunnerScratch; in a graph, the library's intermediates lie in its pool.

Rows and index keys are kept in a format of kernels/row_format.py (worker.kv_dtype), by default the model's own.

With a draft layer (drafting.py) the runner is a DraftRunner: that layer's operations come behind the model's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch
from torch import Tensor

from kernels.attention import prepare_attention
from kernels.encode import prepare_encode
from kernels.index_topk import index_topk, prepare_index
from kernels.layout import Geometry
from kernels.prompt_topk import prepare_prompt
from kernels.rows import (
    new_keys,
    new_rows,
    write_index_keys,
    write_new_rows,
    write_prompt_index_keys,
    write_slab_rows,
)
from kernels.state import DeviceState, MissPlan, StepBatch, real_rows
from protocol.config_checks import WEIGHT_ONLY
from protocol.errors import BadInput, InternalError, Unavailable
from protocol.logs import fields, logger
from protocol.messages import ModelInfo
from protocol.tokenizer_files import read_tokenizer
from worker.device.gpu_memory import free_device_bytes
from worker.device.passes import PassUnit
from worker.device.sizing import require_weights_fit
from worker.device.step_rows import StepRows
from worker.families.base import Module
from worker.families.table import latent_family_of, library_config
from worker.group.exchange import Collectives, Exchange
from worker.runners import attention as mla
from worker.runners.adjust import Adjust
from worker.runners.base import (
    DraftRows,
    PromptPart,
    PromptPass,
    SamplerState,
    StepOutputs,
    UnitWritten,
    form_block_tokens,
    no_listener,
)
from worker.runners.checkpoint import (
    describe_model,
    geometry_of,
    kv_kinds,
    library_refusals,
    read_config,
)
from worker.runners.drafting import Drafting
from worker.runners.drawing import draw_first, draw_step, fed_tokens
from worker.runners.held_weights import dtype_name, exchange_of, finish_loading, kept_memory, share_of, torch_dtype_of
from worker.runners.layers import Angles, Halfway, Layer, Layers
from worker.runners.prompt import Expanded, Gathered, ModelPass, PromptAttention, PromptBlock
from worker.runners.splitting import Splitting
from worker.runners.swapping import launch_beside, launch_selection
from worker.weights.layout import ExpertShare, exchange_bytes, prompt_scratch_bytes, weights_bytes
from worker.weights.matmul import DECODED, Matmul, resolve_matmul
from worker.weights.memory import WeightMemory
from worker.weights.model import load_model
from worker.weights.modules import (
    Activations,
    prepare_products,
    prepare_quantized_products,
)
from worker.weights.quantization import read_quantization
from worker.weights.safetensors_header import FIELD

if TYPE_CHECKING:
    from worker.streams import Fence, Streams

#: Called with group, batch and its top-k int32[B, k], which it may overwrite, before swap_in reads it.
AfterIndexTopk = Callable[[int, StepBatch, Tensor], None]

log = logger("worker.runners")

#: Rows for which products with FP8 weights are compiled: decode batches and prompt blocks fall between these.
PREPARED_ROWS: Final = [1 << power for power in range(13)]


@dataclass(eq=False)
class _RunnerScratch:
    """Tensors that flow from one operation of a decode step to the next, for one batch size. What another stream reads
    stays until the next layer's takes its place."""

    hidden: Tensor  # [B, 1, C * hidden]: the residual
    entered: Activations  # [B, 1, hidden]: the norm of `hidden` that follows, of the next layer or of the model
    final: Tensor  # [B, 1, hidden]: behind the model's norm, at one address for every graph
    final_angles: Angles  # those of the step, likewise; empty without a draft layer
    real: Tensor  # bool[B]
    angles: Angles  # [B, 1, d]
    queries: Tensor  # [B, H, r + d]
    ending: mla.LayerEnding  # of a layer's projections
    latents: Tensor  # [B, H, r]
    compressed: mla.Compressed | None  # of a layer, for its *select* and *project*
    between: Halfway | None  # of a layer, for its MLP
    shared: Tensor | None  # [B, 1, hidden]: what its shared experts add
    parts: Tensor  # [R, B, hidden]: of what the rest of its MLP adds
    topk: Tensor  # int32[B, k]
    out_rows: Tensor  # int32[B, k]: device rows of the current group's selection
    drafted: Tensor  # [B, 1, hidden]: the draft layer's output, likewise; empty without one
    plan: MissPlan  # one serves all groups (swapping.py)


class TransformersRunner:
    """See worker/runners/base.py for the contract. Made by `load_runner` or `load`."""

    splits_passes = True

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        geometry: Geometry,
        *,
        deterministic_seats: int = 0,
        draft_tokens: int = 0,
        gathered_prefill: bool | None = None,
        after_index_topk: AfterIndexTopk | None = None,
        share: ExpertShare | None = None,
        exchange: Exchange | None = None,
        matmul: Matmul = DECODED,
        memory: WeightMemory | None = None,
    ) -> None:
        """`deterministic_seats` > 0: every step has that many seats, of 1 + `draft_tokens` rows each, and rows are kept
        apart. Raises ConfigError.

        `gathered_prefill` chooses the form of prefill, by default the device's; `after_index_topk` sees, and may
        replace, what the indexer selected in decode steps. A `model` with the routed experts of `share` alone needs the
        `exchange` with the ranks that hold the others. `matmul`: how the FP8 products of `model` are formed. `memory`:
        that of its weights.
        """
        self.info = info
        self.geometry = geometry
        self.dtype: torch.dtype = model.dtype
        self.after_index_topk = after_index_topk
        self.matmul = matmul
        self.weights_seconds: dict[str, float] = {}  # for how long they were loaded, by where they were found
        self.weights_are_kept = False  # by a keeper, for the next worker
        self._layers = layers = Layers(
            model, geometry, deterministic=deterministic_seats > 0, exchange=exchange, share=share, memory=memory
        )
        gathered = layers.device.type == "cuda" if gathered_prefill is None else gathered_prefill
        self._prompt: PromptAttention = (
            Gathered(geometry.topk) if gathered else Expanded(layers.rows, layers.keys, self.dtype, geometry.topk)
        )
        self._drafting = Drafting(layers, self._prompt) if layers.draft is not None else None
        self._splitting = (
            Splitting(layers, self._prompt, exchange.collectives, info.layers) if exchange is not None else None
        )
        self._gathered = gathered
        self._block_tokens_max = form_block_tokens(gathered=gathered, deterministic=deterministic_seats > 0)
        if exchange is not None:
            self._block_tokens_max = min(self._block_tokens_max, exchange.rows_max)
        self._scratch: dict[int, _RunnerScratch] = {}
        self._prepared: ref[DeviceState] | None = None  # weakly: gigabytes, and their owner's
        self._prepare_quantized()
        if deterministic_seats:
            layers.require_rows_apart(deterministic_seats, StepRows(draft_tokens))

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
        keeps_fp8: bool | None = None,
        matmul: str = WEIGHT_ONLY,
        collectives: Collectives | None = None,
        rows_max: int = 0,
        draft_tokens: int = 0,
        keeper: Path | None = None,
        only_attach: bool = False,
    ) -> TransformersRunner:
        """Load a checkpoint directory. Raises ConfigError when it is of no served family, or cannot be served.

        `keeps_fp8`: weights stored in FP8 stay so in device memory, by default on a GPU; else they are decoded.
        `matmul`: worker.matmul, how FP8 products are formed; the runner's own says what that comes to. `collectives` of
        a group, of which this rank holds a share of the experts; `rows_max` is its largest round. `draft_tokens` above
        0: with the draft layer, a DraftRunner. `keeper`: socket of the keeper that is to hold the weights, which are
        mapped where it holds them already. Raises TableDiffersError where it held other tensors; then it holds none.
        `only_attach`: weights are read from nowhere else, and nothing is asked of the keeper but what it holds. Raises
        Unavailable where it does not hold them.
        """
        began = time.monotonic()
        config, draft_layer = read_config(path, with_weights=False), draft_tokens > 0
        latent_family_of(SimpleNamespace(**config))
        tokenizer = read_tokenizer(path)
        torch_dtype = torch_dtype_of(dtype, config)
        keeps = torch.device(device).type == "cuda" if keeps_fp8 is None else keeps_fp8
        quantization = read_quantization(config, Path(path) / "config.json")
        products = resolve_matmul(
            matmul,
            device=torch.device(device),
            dtype=torch_dtype,
            quantization=quantization if keeps else None,
            deterministic=deterministic_seats > 0,
        )
        with library_refusals(path, FIELD):
            share = share_of(path, collectives)
            memory = kept_memory(
                keeper,
                path,
                device,
                torch_dtype,
                products,
                keeps_fp8=keeps,
                share=share,
                draft_layer=draft_layer,
                only_attach=only_attach,
            )
            if memory is None and only_attach:
                raise Unavailable(
                    "no weights that can be mapped", field="keeper", value=keeper, remedy="see the line before"
                )
            if torch.device(device).type == "cuda":
                block, about = quantization.block if quantization else None, library_config(path)
                name, ranks = dtype_name(torch_dtype), collectives.size if collectives is not None else 1
                held = weights_bytes(about, name, block, on_gpu=True, experts=share, draft_layer=draft_layer)
                require_weights_fit(
                    {} if memory is not None and memory.is_filled else held,
                    free_device_bytes(device),
                    "worker.device",
                    device,
                    exchange_bytes=exchange_bytes(
                        about,
                        name,
                        ranks,
                        rows_max,
                        deterministic=deterministic_seats > 0,
                        quantized=products.quantizes_rows,
                    ),
                    is_kept=memory is not None and not memory.is_filled,
                )
            model = load_model(
                path,
                quantization,
                dtype=torch_dtype,
                device=device,
                keeps_fp8=keeps,
                matmul=products,
                experts=share,
                draft_layer=draft_layer,
                memory=memory,
                keeps_kv_b=torch.device(device).type != "cuda",
            )
        kinds = kv_kinds(dtype_name(torch_dtype), kv_dtype, row_dtype, index_dtype)
        geometry = geometry_of(model.config, kinds, draft_layer=draft_layer)
        exchange = None
        if collectives is not None:
            exchange = exchange_of(model, collectives, rows_max, torch_dtype, deterministic=deterministic_seats > 0)
        info = describe_model(path, model.config, tokenizer)
        runner = cls(
            model,
            info,
            geometry,
            deterministic_seats=deterministic_seats,
            draft_tokens=draft_tokens,
            share=share,
            exchange=exchange,
            matmul=products,
            memory=memory,
        )
        runner.release_unused()
        finish_loading(runner, memory, path, began)
        return runner

    def release_unused(self) -> None:
        """Give up weights of the model that this runner does not use: kv_b_proj, where prompts gather their rows."""
        if self._gathered:
            self._layers.release_expanded()

    def weights_bytes(self) -> dict[str, int]:
        """Bytes of the weights as they are held, by dtype."""
        return self._layers.weights_bytes()

    @property
    def block_tokens_max(self) -> int:
        """Rows of the largest unit, by the form of prefill and the room of a group's round."""
        return self._block_tokens_max

    def prompt_bytes(self, pass_tokens: int) -> int:
        """See worker/weights/layout.py: computed."""
        config, name = self._layers.model.config, dtype_name(self.dtype)
        ranks = self._layers.ranks
        return prompt_scratch_bytes(config, self.block_tokens_max, pass_tokens, dtype=name, ranks=ranks)

    def begin_pass(
        self, streams: Streams, state: DeviceState, parts: Sequence[PromptPart], tokens: Tensor
    ) -> ModelPass:
        """One operation on `compute`."""
        prompts = ModelPass(tuple(parts))
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
        compute, block, model_layer = streams.compute, PromptBlock.of(_own(prompts), first, stop), self._layers[layer]
        compute.launch(f"prompt project {layer}", partial(self._project_block, block, state, model_layer))
        written()
        compute.launch(f"prompt attend {layer}", partial(self._attend_block, block, state, model_layer, rows))

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

    def launch_prompt_drafts(
        self,
        streams: Streams,
        state: DeviceState,
        sampler: SamplerState,
        prompts: PromptPass,
        number: int,
        outputs: StepOutputs | None = None,
        following: Tensor | None = None,
    ) -> None:
        """One operation on `compute`. Raises InternalError without a draft layer."""
        if self._drafting is None:
            raise InternalError("this runner was loaded without the draft layer")
        if outputs is None and following is None:
            raise BadInput(
                "the draft layer needs the token behind a part",
                field="following",
                value=following,
                remedy="pass it, or outputs",
            )
        warm_start = None if outputs is None else outputs.warm_start
        work = partial(self._write_draft_rows, _own(prompts), number, state, sampler, following, warm_start)
        streams.compute.launch("prompt draft layer", partial(work, self._drafting))

    def launch_padding(self, streams: Streams, layer: int, rows: int) -> None:
        """One operation on `compute`."""
        streams.compute.launch(f"prompt pad {layer}", partial(self._pad, self._layers[layer], rows))

    def launch_split(
        self,
        streams: Streams,
        state: DeviceState,
        prompts: PromptPass,
        unit: PassUnit,
        owner: int,
        written: UnitWritten = no_listener,
    ) -> None:
        """Two operations on `compute`, as of a unit. Raises InternalError outside of a group."""
        if self._splitting is None:
            raise InternalError("this runner has no other ranks")
        compute, layer, split = streams.compute, self._layers[unit.layer], self._splitting
        part = split.unit(_own(prompts), unit, owner)
        compute.launch(f"prompt project {unit.layer}", partial(split.project, part, state, layer))
        written()
        compute.launch(f"prompt attend {unit.layer}", partial(split.attend, part, state, layer))

    def launch_forward(self, streams: Streams, state: DeviceState, sampler: SamplerState, batch: StepBatch) -> None:
        """Five operations per layer on `compute`, a selection, a swap-in or a replay, and shared experts (swapping.py).

        The first step for a state compiles and allocates what steps and prompt blocks of any size will need.
        """
        self._prepare(state)
        scratch, compute = self._scratch_for(len(batch.seats)), streams.compute
        loaded: dict[int, Fence] = {}
        compute.launch("embed", partial(self._embed, scratch, sampler, batch))
        layers = [*self._layers]
        for layer, behind in zip_longest(layers, layers[1:]):
            following = self._layers.model.model.norm if behind is None else behind
            loaded = self._launch_layer(streams, scratch, state, batch, layer, loaded, following)
        compute.launch("keep hidden", partial(self._keep_hidden, scratch))

    def launch_sample(
        self, streams: Streams, sampler: SamplerState, batch: StepBatch, outputs: StepOutputs, adjust: Adjust | None
    ) -> None:
        """One operation on `compute`."""
        scratch = self._scratch_for(len(batch.seats))
        streams.compute.launch("sample", partial(self._sample, scratch, sampler, batch, outputs, adjust))

    def launch_draft(
        self, streams: Streams, state: DeviceState, sampler: SamplerState, batch: StepBatch, draft: DraftRows
    ) -> None:
        """The operations of a layer, and one on `compute` at either end. Raises InternalError without a draft layer."""
        if self._drafting is None:
            raise InternalError("this runner was loaded without the draft layer")
        self._prepare(state)
        scratch, compute = self._scratch_for(len(batch.seats)), streams.compute
        source = scratch if draft.source is None else self._scratch_for(draft.source_rows)
        compute.launch("enter draft", partial(self._enter_draft, self._drafting, scratch, source, batch, draft))
        leave = self._drafting.layer.module.shared_head.norm
        self._launch_layer(streams, scratch, state, batch, self._drafting.layer, {}, leave)
        compute.launch("draft", partial(self._draft, self._drafting, scratch, sampler, batch, draft))

    def launch_draft_rows(self, streams: Streams, state: DeviceState, batch: StepBatch, draft: DraftRows) -> None:
        """Two operations on `compute`. Raises InternalError without a draft layer."""
        if self._drafting is None:
            raise InternalError("this runner was loaded without the draft layer")
        self._prepare(state)
        scratch, compute = self._scratch_for(len(batch.seats)), streams.compute
        compute.launch("enter draft", partial(self._enter_draft, self._drafting, scratch, scratch, batch, draft))
        compute.launch("write draft rows", partial(self._write_step_rows, self._drafting, scratch, state, batch))

    def _launch_layer(
        self,
        streams: Streams,
        scratch: _RunnerScratch,
        state: DeviceState,
        batch: StepBatch,
        layer: Layer,
        loaded: dict[int, Fence],
        following: Layer | Module,
    ) -> dict[int, Fence]:
        """One layer of a decode step, and the norm of its output that `following` asks for. `loaded`, and what returns:
        the swap-ins on `swap` of the layer's group."""
        compute = streams.compute
        compute.launch(f"compress {layer.number}", partial(self._compress, scratch, layer))
        if layer.anchor:
            select = partial(self._select, scratch, state, batch, layer)
            selection = scratch.topk, batch, scratch.out_rows, scratch.plan
            loaded = launch_selection(streams, state, layer.group, select, *selection)
        compute.launch(f"project {layer.number}", partial(self._project, scratch, state, batch, layer))
        if layer.number in loaded:
            compute.wait(loaded[layer.number])
        compute.launch(f"attend {layer.number}", partial(self._attend, scratch, state, layer))
        share = partial(self._share, scratch, layer)
        ready = launch_beside(streams, f"share {layer.number}", share) if layer.has_experts else None
        compute.launch(f"experts {layer.number}", partial(self._experts, scratch, layer))
        if ready is not None:
            compute.wait(ready)
        compute.launch(f"join {layer.number}", partial(self._join, scratch, following))
        return loaded

    # ---------------------------------------------------------------- operations

    @torch.inference_mode()
    def _embed_prompts(self, prompts: ModelPass, tokens: Tensor) -> None:
        device, parts = self._layers.device, prompts.parts
        positions = torch.cat([torch.arange(part.start, part.stop, device=device) for part in parts])
        prompts.tokens = tokens.to(device, non_blocking=True, copy=True)
        prompts.hidden, prompts.angles = self._layers.embed(prompts.tokens[None], positions[None])
        prompts.selection = self._prompt.begin(parts, device)
        shape = len(prompts.ending), self.geometry.groups, self.geometry.topk
        prompts.warm_start = torch.full(shape, -1, dtype=torch.int32, device=device)

    @torch.inference_mode()
    def _project_block(self, block: PromptBlock, state: DeviceState, layer: Layer) -> None:
        layers, prompts = self._layers, block.prompts
        cos, sin = prompts.angles
        entered, angles = layers.enter(layer, prompts.hidden[:, block.rows]), (cos[:, block.rows], sin[:, block.rows])
        inputs = layers.compress(layer, entered)
        projected = layers.project(layer, inputs, angles)
        assert projected.rows is not None
        for _, piece in block.pieces:
            write_slab_rows(state, layer.number, piece.seat, piece.start, projected.rows[0, block.place(piece)])
        block.projected = replace(projected, rows=None)
        if layer.anchor and block.pieces:
            self._select_block(block, state, layer, layers.project_index(layer, inputs, angles))

    def _select_block(self, block: PromptBlock, state: DeviceState, layer: Layer, index: mla.IndexProjected) -> None:
        assert index.keys is not None
        for _, piece in block.pieces:
            write_prompt_index_keys(state, layer.group, piece.seat, piece.start, index.keys[0, block.place(piece)])
        self._prompt.select(state, layer.group, block, index, layer.attention.indexer.softmax_scale)

    @torch.inference_mode()
    def _attend_block(self, block: PromptBlock, state: DeviceState, layer: Layer, rows: int) -> None:
        hidden, experts, ending = block.prompts.hidden[:, block.rows], self._layers.prompt_experts, block.ending
        attended = self._prompt.attend(state, layer, block)
        self._layers.finish(layer, hidden, attended, experts, ending=ending, rows=rows)

    @torch.inference_mode()
    def _write_draft_rows(
        self,
        prompts: ModelPass,
        number: int,
        state: DeviceState,
        sampler: SamplerState,
        following: Tensor | None,
        warm_start: Tensor | None,
        drafting: Drafting,
    ) -> None:
        """Write the draft layer's rows of a part, in blocks as the model's layers take."""
        part = prompts.parts[number]
        behind = sampler.last_token[part.seat : part.seat + 1].long() if following is None else following
        shifted, size = torch.cat((prompts.tokens[part.first + 1 : part.end], behind)), self.block_tokens_max
        for first in range(part.first, part.end, size):
            stop = min(first + size, part.end)
            drafting.write_prompt(
                state,
                part.seat,
                part.start + first - part.first,
                shifted[first - part.first : stop - part.first],
                self._layers.final(prompts.hidden[:, first:stop]),
                warm_start[drafting.layer.group] if warm_start is not None and stop == part.end else None,
            )

    @torch.inference_mode()
    def _pad(self, layer: Layer, rows: int) -> None:
        self._layers.pad(layer, rows)

    @torch.inference_mode()
    def _first_token(
        self, prompts: ModelPass, number: int, sampler: SamplerState, outputs: StepOutputs, adjust: Adjust | None
    ) -> None:
        part = prompts.parts[number]
        if outputs.warm_start is not None:
            groups = self.geometry.groups if self._drafting is None else self._drafting.layer.group
            outputs.warm_start[:groups] = prompts.warm_start_of(number)[:groups]
        logits = self._layers.logits(prompts.hidden[:, part.end - 1 : part.end])
        draw_first(logits, part.seat, part.stop, sampler, outputs, adjust)

    @torch.inference_mode()
    def _embed(self, scratch: _RunnerScratch, sampler: SamplerState, batch: StepBatch) -> None:
        scratch.real = real_rows(batch)
        tokens, positions = fed_tokens(sampler, batch, scratch.real)
        scratch.hidden, scratch.angles = self._layers.embed(tokens.unsqueeze(1), positions.unsqueeze(1))
        scratch.entered = self._layers.enter(self._layers[0], scratch.hidden)

    @torch.inference_mode()
    def _compress(self, scratch: _RunnerScratch, layer: Layer) -> None:
        scratch.compressed = self._layers.compress(layer, scratch.entered)

    @torch.inference_mode()
    def _project(self, scratch: _RunnerScratch, state: DeviceState, batch: StepBatch, layer: Layer) -> None:
        layers, inputs = self._layers, scratch.compressed
        assert inputs is not None
        projected = layers.project(layer, inputs, scratch.angles, new_rows(state, layer.number, batch))
        scratch.queries, scratch.ending = mla.absorb_queries(layer.absorbed, projected), projected.ending
        if projected.rows is not None:
            write_new_rows(state, layer.number, batch, projected.rows.squeeze(1))

    @torch.inference_mode()
    def _select(self, scratch: _RunnerScratch, state: DeviceState, batch: StepBatch, layer: Layer) -> None:
        inputs = scratch.compressed
        assert inputs is not None
        index = self._layers.project_index(layer, inputs, scratch.angles, new_keys(state, layer.group, batch))
        if index.keys is not None:
            write_index_keys(state, layer.group, batch, index.keys.squeeze(1))
        queries, weights = index.queries.squeeze(1).contiguous(), index.weights.squeeze(1).contiguous()
        index_topk(state, layer.group, queries, weights, batch, layer.attention.indexer.softmax_scale, scratch.topk)
        if self.after_index_topk is not None:
            self.after_index_topk(layer.group, batch, scratch.topk)

    @torch.inference_mode()
    def _attend(self, scratch: _RunnerScratch, state: DeviceState, layer: Layer) -> None:
        layer.attend(state, scratch.queries, scratch.out_rows, scratch.latents)
        attended = mla.expand_values(layer.absorbed, scratch.latents).unsqueeze(1)
        scratch.between = self._layers.leave_attention(
            layer,
            scratch.hidden,
            attended,
            self._layers.decode_experts,
            ending=scratch.ending,
            real=scratch.real,
        )

    @torch.inference_mode()
    def _share(self, scratch: _RunnerScratch, layer: Layer) -> None:
        assert scratch.between is not None
        scratch.shared = self._layers.shared(layer, scratch.between)

    @torch.inference_mode()
    def _experts(self, scratch: _RunnerScratch, layer: Layer) -> None:
        assert scratch.between is not None
        scratch.parts = self._layers.routed(layer, scratch.between, self._layers.decode_experts)

    @torch.inference_mode()
    def _join(self, scratch: _RunnerScratch, following: Layer | Module) -> None:
        assert scratch.between is not None
        scratch.hidden, entered = self._layers.join(scratch.between, scratch.parts, scratch.shared, following)
        assert entered is not None
        scratch.entered, scratch.shared = entered, None

    @torch.inference_mode()
    def _enter_draft(
        self,
        drafting: Drafting,
        scratch: _RunnerScratch,
        source: _RunnerScratch,
        batch: StepBatch,
        draft: DraftRows,
    ) -> None:
        scratch.real = real_rows(batch)
        if draft.source is None:
            hidden, scratch.angles = scratch.final, scratch.final_angles
        else:
            hidden = source.drafted[draft.source.long().clamp(min=0)]
            positions = (batch.lengths.long() - 1).clamp(min=0)
            scratch.angles = self._layers.angles(hidden, positions.unsqueeze(1))
        scratch.hidden = drafting.enter_step(draft, scratch.real, hidden)
        scratch.entered = self._layers.enter(drafting.layer, scratch.hidden)

    @torch.inference_mode()
    def _write_step_rows(
        self, drafting: Drafting, scratch: _RunnerScratch, state: DeviceState, batch: StepBatch
    ) -> None:
        drafting.write_step(state, batch, scratch.entered, scratch.angles)

    @torch.inference_mode()
    def _draft(
        self, drafting: Drafting, scratch: _RunnerScratch, sampler: SamplerState, batch: StepBatch, draft: DraftRows
    ) -> None:
        scratch.drafted.copy_(scratch.entered.values)
        drafting.draw(scratch.drafted, sampler, batch, draft)

    @torch.inference_mode()
    def _keep_hidden(self, scratch: _RunnerScratch) -> None:
        scratch.final.copy_(scratch.entered.values)
        if self._drafting is not None:
            for kept, angles in zip(scratch.final_angles, scratch.angles, strict=True):
                kept.copy_(angles)

    @torch.inference_mode()
    def _sample(
        self,
        scratch: _RunnerScratch,
        sampler: SamplerState,
        batch: StepBatch,
        outputs: StepOutputs,
        adjust: Adjust | None,
    ) -> None:
        draw_step(self._layers.head(scratch.final), sampler, batch, outputs, adjust)

    # ---------------------------------------------------------------- set-up

    def _prepare_quantized(self) -> None:
        """Compile w8a8 products while the device has room: before memory of requests is taken."""
        if not self.matmul.quantizes_rows or self._layers.device.type != "cuda":
            return
        began, model = time.monotonic(), self._layers.model
        with torch.cuda.device(self._layers.device):
            choices = model.config.num_experts_per_tok
            formed = prepare_quantized_products(model, self._block_tokens_max, choices, self._apart())
            torch.cuda.synchronize()
        torch.cuda.empty_cache()
        took_s = round(time.monotonic() - began, 1)
        log.info("products compiled", extra=fields(matmul=self.matmul.name, products=formed, seconds=took_s))

    def _prepare(self, state: DeviceState) -> None:
        if self._prepared is not None and self._prepared() is state:
            return
        self._layers.warm_up()
        config, rows, dtype = self._layers.model.config, self._layers.rows, self._layers.index_dtype
        shape = config.num_attention_heads, rows.scaled, rows.plain
        prepare_attention(state, *shape, self.dtype, sinks=self._layers[0].sinks is not None)
        for form in (rows, self._layers.keys):
            prepare_encode(form, self.dtype, self._layers.device)
        prepare_index(state, config.index_n_heads, config.index_head_dim, dtype)
        prepare_prompt(state, config.index_n_heads, config.index_head_dim, dtype)
        prepare_products(self._layers.model, PREPARED_ROWS, config.num_experts_per_tok, self._apart())
        self._prepared = ref(state)

    def _apart(self) -> Sequence[Module]:
        """Modules whose products are formed by themselves though their weights are joined: a draft layer's rows and
        index keys come without queries."""
        if self._drafting is None:
            return ()
        attention = self._drafting.layer.attention
        return attention.kv_a_proj_with_mqa, attention.indexer.wk

    def _scratch_for(self, rows: int) -> _RunnerScratch:
        if rows not in self._scratch:
            topk, device = self.geometry.topk, self._layers.device
            empty = torch.empty(0, device=device)
            shape = (rows, self._layers.model.config.num_attention_heads, self._layers.rows.scaled)
            hidden = self._layers.model.config.hidden_size
            final = torch.zeros(rows, 1, hidden, dtype=self.dtype, device=device)
            turned = final.new_zeros(rows, 1, self._layers.model.config.qk_rope_head_dim)
            has_drafts = self._drafting is not None
            self._scratch[rows] = _RunnerScratch(
                hidden=empty,
                entered=Activations(empty),
                final=final,
                final_angles=(turned, torch.zeros_like(turned)) if has_drafts else (empty, empty),
                real=empty,
                angles=(empty, empty),
                queries=empty,
                ending=mla.LayerEnding(),
                latents=torch.empty(shape, dtype=self.dtype, device=device),
                compressed=None,
                between=None,
                shared=None,
                parts=empty,
                topk=torch.full((rows, topk), -1, dtype=torch.int32, device=device),
                out_rows=torch.full((rows, topk), -1, dtype=torch.int32, device=device),
                drafted=torch.zeros_like(final) if has_drafts else empty,
                plan=MissPlan.allocate(rows, topk, device),
            )
        return self._scratch[rows]


def _own(prompts: PromptPass) -> ModelPass:
    """A pass that this kind of runner began. Raises InternalError for any other."""
    if not isinstance(prompts, ModelPass):
        raise InternalError("another runner began this pass")
    return prompts
