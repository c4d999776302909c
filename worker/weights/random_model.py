"""The model library's module with random weights, made on its device: for benchmarks, which need its cost.

No file is read and nothing passes through host memory: a rank's 100 GB of DeepSeek-V3.2 take seconds. The distributions
are those of synth.py; a seed gives the same weights on one device alone.
"""

from __future__ import annotations

import math
from math import prod
from typing import Any

import torch
from torch import Tensor

from kernels.block_weight import BlockFp8
from worker.families.base import TensorSpec
from worker.weights.layout import ExpertShare, tensors_of
from worker.weights.matmul import DECODED, Matmul
from worker.weights.memory import OwnMemory
from worker.weights.model import ModelTensors, append_draft_layer, completed, empty_model, is_held_in_fp8
from worker.weights.synth import QUANTILE_GAIN, normal_quantiles


@torch.no_grad()
def random_model(
    config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    fp8: bool,
    matmul: Matmul = DECODED,
    experts: ExpertShare | None = None,
    draft_layer: bool = False,
    seed: int = 0,
) -> Any:
    """The library's causal language model of `config` in `dtype`, without gradients. `fp8`: weights that FP8
    repositories convert are block-FP8, kv_b_proj apart, with products by `matmul`. `experts`: the share to hold, by
    default all. `draft_layer`: with the draft layer.

    Raises ConfigError for a config that lacks dimensions.
    """
    model = empty_model(config, dtype)
    if draft_layer:
        append_draft_layer(model)
    specs = list(tensors_of(config, experts, draft_layer=draft_layer))
    held = {spec.name for spec in specs if fp8 and is_held_in_fp8(spec)}
    memory, place = OwnMemory(device), torch.device(device)
    tensors = ModelTensors(model, memory, place, dtype, fp8=held, matmul=matmul, experts=experts)
    draw = _Draw(torch.device(device), seed)
    for spec in specs:
        if spec.name in held:
            draw.blocks(spec, tensors.blocks(spec))
        else:
            draw.plain(spec, tensors.plain(spec))
    return completed(model, device)


class _Draw:
    def __init__(self, device: torch.device, seed: int) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._quantiles = normal_quantiles().to(device)

    def plain(self, spec: TensorSpec, out: Tensor) -> None:
        if len(spec.shape) == 1:
            out.fill_(1.0 if spec.name.endswith("norm.weight") else 0.0)
        else:
            out.normal_(0, 1 / math.sqrt(spec.shape[1]), generator=self._generator)

    def blocks(self, spec: TensorSpec, out: BlockFp8) -> None:
        codes = out.values.view(torch.uint8)
        numbers = torch.randint(0, 256, (prod(spec.shape),), generator=self._generator, device=codes.device)
        codes.copy_(self._quantiles[numbers].view(codes.shape))
        out.scales.uniform_(0.75, 1.5, generator=self._generator).mul_(1 / (QUANTILE_GAIN * math.sqrt(spec.shape[1])))
