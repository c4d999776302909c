"""The model library's module with the weights of a repository, on one device.

The library builds the modules without memory, from config.json; its loader is not used. Each tensor goes to where the
library expects it: the projections of experts into their slices of the library's stacked tensors, everything else
under its own name. Where FP8 is kept, `BlockLinear` and `BlockExperts` take the place of the library's modules, except
for kv_b_proj: its halves are used in absorbed form, in the model's dtype.

The draft layer (MTP module), where asked for, is a layer of the library's own class behind the last of `model.layers`,
with the parts that are a draft layer's alone. The library's forward does not reach it.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from kernels.block_weight import BlockFp8
from protocol.logs import fields, logger
from protocol.start_and_end import tell_step
from worker.families.base import TensorSpec
from worker.families.table import family_of, library_config
from worker.weights.layout import EXPERT, PROJECTIONS, ExpertShare, tensors_of
from worker.weights.matching import TensorMatch, match
from worker.weights.matmul import DECODED, Matmul
from worker.weights.memory import OwnMemory, WeightMemory
from worker.weights.modules import JOINED, BlockExperts, BlockLinear, make_linears, share_scratch
from worker.weights.quantization import Quantization
from worker.weights.reading import DTYPES, LoadProgress, Read, read_all, read_scales
from worker.weights.shards import Shards

PROGRESS_INTERVAL_S: Final = 5.0
KV_B: Final = "kv_b_proj.weight"

log = logger("worker.weights")


def load_model(
    path: str | Path,
    quantization: Quantization | None,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    keeps_fp8: bool = False,
    matmul: Matmul = DECODED,
    experts: ExpertShare | None = None,
    draft_layer: bool = False,
    memory: WeightMemory | None = None,
    keeps_kv_b: bool = True,
) -> Any:
    """The library's causal language model of a checkpoint directory, in `dtype`, without gradients.

    `keeps_fp8`: weights stored in FP8 stay so; else they are decoded. `matmul`: how their products are formed.
    `experts`: those to read and hold, by default all. Of a share the library's modules of experts have stacks and
    `num_experts` of that many, BlockExperts `first` and `total`; which rank has a token's expert the caller decides.
    `draft_layer`: with the draft layer, as `append_draft_layer` has it. `memory`: where tensors lie, by default in this
    process's own; for a filled one no file but config.json is read. Without `keeps_kv_b` kv_b_proj lies elsewhere, for
    its halves to be made of, and has no values where those are there already. Raises ConfigError for files that do not
    make this model, before memory is taken. Host memory beyond the tensors is bounded (reading.py).
    """
    config = library_config(path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    memory = memory or OwnMemory(device)

    def target(fp8: Collection[str]) -> ModelTensors:
        model = empty_model(config, dtype)
        if draft_layer:
            append_draft_layer(model)
        about: Any = {"keeps_kv_b": keeps_kv_b, "fp8": fp8, "matmul": matmul, "experts": experts}
        return ModelTensors(model, memory, torch.device(device), dtype, **about)

    if memory.is_filled:
        specs = list(tensors_of(config, experts, draft_layer=draft_layer))
        tensors = target({spec.name for spec in specs if _is_kept_in_fp8(memory, spec)})
        tensors.place(specs)
    else:
        with Shards.open(path) as shards:
            matches = match(config, shards, quantization, experts, draft_layer=draft_layer)
            tensors = target({it.spec.name for it in matches if keeps_fp8 and it.scale and is_held_in_fp8(it.spec)})
            _read(shards, matches, tensors)
    return completed(tensors.model, device)


def _read(shards: Shards, matches: list[TensorMatch], target: ModelTensors) -> None:
    total = sum(shards.tensors[name].bytes for it in matches for name in (it.spec.name, it.scale) if name)
    began = time.monotonic()
    _say_begun(shards, total)
    read_all(shards, list(target.reads(shards, matches)), LoadProgress(_say_progress(total), PROGRESS_INTERVAL_S))
    log.info("weights loaded", extra=fields(bytes=total, seconds=round(time.monotonic() - began, 1)))


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """The library's modules for `config`, without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def append_draft_layer(model: Any) -> None:
    """Append a draft layer without memory to `model.model.layers`: its names are those of a published repository."""
    config = copy.deepcopy(model.config)
    config.mlp_layer_types, config.indexer_types = ["sparse"], ["full"]  # of layer 0, as which the library makes it
    kind, norm, hidden = type(model.model.layers[0]), type(model.model.norm), config.hidden_size
    with torch.device("meta"):
        layer = kind(config, 0)
        layer.enorm, layer.hnorm = (norm(hidden, eps=config.rms_norm_eps) for _ in range(2))
        layer.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        layer.shared_head = nn.Module()
        layer.shared_head.norm = norm(hidden, eps=config.rms_norm_eps)
    model.model.layers.append(layer)


def completed(model: Any, device: torch.device | str) -> Any:
    """`model` ready to compute on `device`, once all its tensors are there."""
    share_scratch(model)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    return model.eval().requires_grad_(False)


class ModelTensors:
    """Gives the modules of `model` their memory, tensor by tensor. `fp8` names those that stay FP8."""

    def __init__(
        self,
        model: nn.Module,
        memory: WeightMemory,
        device: torch.device,
        dtype: torch.dtype,
        *,
        keeps_kv_b: bool = True,
        fp8: Collection[str],
        matmul: Matmul,
        experts: ExpertShare | None,
    ) -> None:
        self.model, self._memory, self._device, self._dtype = model, memory, device, dtype
        self._family = family_of(model.config)
        self._keeps_kv_b = keeps_kv_b
        self._fp8, self._matmul = fp8, matmul
        config: Any = model.config
        self._share = experts or ExpertShare(0, config.n_routed_experts)
        self._linears: dict[str, BlockLinear] = {}
        self._blocks: dict[str, BlockExperts] = {}
        self._stacks: dict[str, tuple[Tensor, Tensor]] = {}
        self._joint: dict[str, Tensor] = {}  # what the library holds in one tensor, and repositories in two

    def reads(self, shards: Shards, matches: list[TensorMatch]) -> Iterator[Read]:
        """Memory for all tensors of `matches`, and what is to be read into it."""
        for it in matches:
            scales, name = read_scales(shards, it.scale) if it.scale else None, it.spec.name
            if scales is not None and name in self._fp8:
                weight = self.blocks(it.spec)
                weight.scales.copy_(scales)
                yield Read(name, weight.values)
            else:
                is_rounded = DTYPES[shards.tensors[name].tensor.dtype] != self._dtype
                yield Read(name, self.plain(it.spec, exact=is_rounded and keeps_exact(self.model, name)), scales)

    def place(self, specs: Iterable[TensorSpec]) -> None:
        """Give the modules memory that is filled."""
        for spec in specs:
            if spec.name in self._fp8:
                self.blocks(spec)
            else:
                is_exact = self._memory.dtype_of(spec.name) == torch.float32 and keeps_exact(self.model, spec.name)
                self.plain(spec, exact=is_exact)

    def blocks(self, spec: TensorSpec) -> BlockFp8:
        """Memory for a weight that stays FP8."""
        found = EXPERT.match(spec.name)
        return self._expert_blocks(*found.groups()) if found else self._linear(spec)

    def plain(self, spec: TensorSpec, *, exact: bool = False) -> Tensor:
        """Memory for a tensor in the model's dtype, or in float32 where the model keeps it so, or `exact` asks."""
        found = EXPERT.match(spec.name)
        return self._expert(*found.groups()) if found else self._module_tensor(spec, exact)

    def _module_tensor(self, spec: TensorSpec, exact: bool) -> Tensor:
        if (joined := self._family.joined(spec.name)) is not None:
            (name, half), (rows, *rest) = joined, spec.shape
            if name not in self._joint:
                self._joint[name] = self._module_tensor(spec._replace(name=name, shape=(2 * rows, *rest)), exact)
            return self._joint[name][half * rows :][:rows]
        dtype = torch.float32 if spec.keeps_float32 or exact else self._dtype
        if spec.name.endswith(KV_B) and not self._keeps_kv_b:
            device = "meta" if self._memory.is_filled else self._device
            tensor = torch.empty(spec.shape, dtype=dtype, device=device)
        else:
            tensor = self._memory.empty(spec.name, spec.shape, dtype)
        module, leaf = self._module_of(spec.name)
        if leaf in module._parameters:
            setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
        else:
            setattr(module, leaf, tensor)
        return tensor

    def _linear(self, spec: TensorSpec) -> BlockFp8:
        name = spec.name.removesuffix(".weight")
        if name not in self._linears:
            names = self._joined(name)
            shapes = {one: tuple(self._library(one).weight.shape) for one in names}
            made = make_linears(shapes, self._memory, self._matmul)
            for one, linear in zip(names, made, strict=True):
                module, leaf = self._module_of(one)
                setattr(module, leaf, linear)
                self._linears[one] = linear
        return self._linears[name].block_weight

    def _joined(self, name: str) -> list[str]:
        """Names of the products that may be joined with `name`, itself among them, in their order."""
        for members in JOINED:
            for member in members:
                if name.endswith(f".{member}"):
                    prefix = name.removesuffix(member)
                    found = [f"{prefix}{one}" for one in members if f"{prefix}{one}.weight" in self._fp8]
                    if all(self._library(one).bias is None for one in found):
                        return found
        return [name]

    def _library(self, name: str) -> Any:
        module, leaf = self._module_of(name)
        return getattr(module, leaf)

    def _expert(self, prefix: str, number: str, projection: str) -> Tensor:
        """The slice of the library's stacks: gate and up side by side in one, down in another."""
        if prefix not in self._stacks:
            module: Any = self.model.get_submodule(self._family.module_name(prefix))
            pair = [
                self._memory.empty(f"{prefix}.{name}", (self._share.count, *stack.shape[1:]), self._dtype)
                for name, stack in (("gate_up_proj", module.gate_up_proj), ("down_proj", module.down_proj))
            ]
            module.gate_up_proj, module.down_proj = (nn.Parameter(it, requires_grad=False) for it in pair)
            module.num_experts = self._share.count
            self._stacks[prefix] = (pair[0], pair[1])
        gate_up, down = (stack[int(number) - self._share.first] for stack in self._stacks[prefix])
        inner = gate_up.shape[0] // 2
        parts = {"gate_proj": gate_up[:inner], "up_proj": gate_up[inner:], "down_proj": down}
        return parts[PROJECTIONS.get(projection, projection)]

    def _expert_blocks(self, prefix: str, number: str, projection: str) -> BlockFp8:
        if prefix not in self._blocks:
            config: Any = self.model.config
            sizes = self._share.count, config.moe_intermediate_size, config.hidden_size
            blocks = BlockExperts(prefix, sizes, self._memory, self._matmul)
            blocks.place(self._share.first, config.n_routed_experts, family_of(config).expert_limit(config))
            parent, _, name = prefix.rpartition(".")
            setattr(self.model.get_submodule(parent), name, blocks)
            self._blocks[prefix] = blocks
        return self._blocks[prefix].weight(projection.removesuffix("_proj"), int(number) - self._share.first)

    def _module_of(self, name: str) -> tuple[nn.Module, str]:
        """Return the library's module that holds the stored tensor or product `name`, and what it is called there."""
        parent, _, leaf = self._family.module_name(name).rpartition(".")
        return self.model.get_submodule(parent), leaf


def keeps_exact(model: Any, name: str) -> bool:
    """Return whether the library computes with the stored values of tensor `name`, whatever the model's dtype.

    Releases of the library differ here alone: transformers 5.23 rounds a router's weight to the model's dtype, 5.24
    keeps the weight in float32. Products of stored bfloat16 are the same either way, so only a weight that would be
    rounded is held in float32.
    """
    module = family_of(model.config).module_name(name)
    return any(re.search(pattern, module) for pattern in model._keep_in_fp32_modules_strict)


def _is_kept_in_fp8(memory: WeightMemory, spec: TensorSpec) -> bool:
    """Return whether filled `memory` has a tensor in FP8: there is none in its plain form."""
    found = EXPERT.match(spec.name)
    return is_held_in_fp8(spec) and memory.dtype_of(f"{found[1]}.gate_up_proj" if found else spec.name) is None


def is_held_in_fp8(spec: TensorSpec) -> bool:
    """Whether a module with FP8 weights can hold it: kv_b_proj is used in halves, in the model's dtype."""
    return spec.converts and not spec.name.endswith(KV_B)


def held_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of what `model` read from its checkpoint, by dtype; memory that two names share counts once."""
    tensors = [*model.state_dict().values(), *_block_tensors(model)]
    found: dict[str, int] = {}
    for tensor in {it.data_ptr(): it for it in tensors}.values():
        name = str(tensor.dtype).removeprefix("torch.")
        found[name] = found.get(name, 0) + tensor.element_size() * prod(tensor.shape)
    return found


def _block_tensors(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, BlockExperts):
            weights = module.weights
        else:  # a joined product is a module of its own
            weights = [module.block_weight] if isinstance(module, BlockLinear) and module.joined is None else []
        for weight in weights:
            yield from (weight.values, weight.scales)


def _say_begun(shards: Shards, total: int) -> None:
    tell_step("weights", 0.0)
    log.info("loading weights", extra=fields(path=str(shards.path), shards=len(shards.files), bytes=total))


def _say_progress(total: int) -> Callable[[int, float], None]:
    def say(read_bytes: int, bytes_per_s: float) -> None:
        tell_step("weights", read_bytes / max(1, total))
        left_s = (total - read_bytes) / max(1.0, bytes_per_s)
        log.info(
            "loading weights",
            extra=fields(
                read_bytes=read_bytes,
                bytes=total,
                gb_per_s=round(bytes_per_s / 1e9, 2),
                seconds_left=round(left_s),
            ),
        )

    return say
