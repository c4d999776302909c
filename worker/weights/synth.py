"""Repositories in the published layout with random weights: real shapes, any number of layers and experts.

Weights are normal with variance 1 / fan-in, norms are ones: hidden states stay of the same size through any number of
layers. In FP8, values are quantiles of the normal distribution and scales differ from block to block by up to a factor
of two. The same seed writes the same bytes.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kernels.block_weight import BLOCK
from protocol.errors import ConfigError
from worker.families.base import TensorSpec
from worker.families.table import family_named
from worker.weights.layout import scale_shape, stored_tensors
from worker.weights.writing import SHARD_BYTES, write_repository

#: e4m3 values that normal quantiles become before their scale: the largest of 256 quantiles, 2.9, is 371.
QUANTILE_GAIN: Final = 128.0


def write_synthetic(
    path: str | Path,
    family: str,
    *,
    layers: int,
    experts: int = 0,
    fp8: bool = True,
    powers_of_two: bool = False,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write a repository of `layers` layers and the draft layer, if the family's is known, `experts` routed experts (0:
    as published); returns its tensors' bytes. Embedding and head are not written twice, as some publish them.

    Raises ConfigError for a family that is not served, or sizes that its configuration refuses.
    """
    config = published_config(family, layers=layers, experts=experts)
    about = family_named(family).published(config)
    source = _Random(seed, powers_of_two=powers_of_two)
    return write_repository(
        Path(path),
        about,
        stored_tensors(config, fp8=fp8),
        source,
        fp8=fp8,
        powers_of_two=powers_of_two,
        shard_bytes=shard_bytes,
    )


def published_config(name: str, *, layers: int = 0, experts: int = 0) -> Any:
    """The library's configuration of the published model `name`, with other numbers of layers and experts (0: as
    published).

    Raises ConfigError.
    """
    family = family_named(name)
    default = family.config(**family.models[name])
    wanted = {"num_hidden_layers": layers, "n_routed_experts": experts, "num_nextn_predict_layers": 1}
    chosen = {field: value for field, value in wanted.items() if value}
    if experts:
        routed = getattr(default, "n_group", None) or 1
        groups, least = math.gcd(routed, experts), default.num_experts_per_tok
        if experts // groups < 2 or experts < least:
            raise ConfigError(
                f"a token chooses {least} experts, from groups of at least two",
                field="experts",
                value=experts,
                remedy=f"use a multiple of {2 * routed}, at least {least}",
            )
        if getattr(default, "n_group", None):
            chosen |= {"n_group": groups, "topk_group": min(groups, default.topk_group)}
    return family.config(**(dict(family.models[name]) | chosen))


class _Random:
    """See worker/weights/writing.py: `TensorSource`. Each piece is drawn from its name and place."""

    def __init__(self, seed: int, *, powers_of_two: bool) -> None:
        self._seed, self._powers_of_two = seed, powers_of_two
        self._quantiles = normal_quantiles()

    def plain(self, spec: TensorSpec, first: int, count: int) -> Tensor:
        if len(spec.shape) == 1:
            is_norm = spec.name.endswith("norm.weight")
            return torch.ones(spec.shape) if is_norm else torch.zeros(spec.shape)
        draws = torch.randn(count, *spec.shape[1:], generator=self._generator(spec, first))
        return draws / math.sqrt(spec.shape[-1])

    def values(self, spec: TensorSpec, first: int, count: int) -> Tensor:
        shape, generator = (count, spec.shape[1]), self._generator(spec, first)
        drawn = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return self._quantiles[drawn.int()].view(torch.float8_e4m3fn)

    def scales(self, spec: TensorSpec, first: int, count: int) -> Tensor:
        shape = scale_shape((count, spec.shape[1]), (BLOCK, BLOCK))
        spread = torch.rand(shape, generator=self._generator(spec, first, "scales"))
        usual = 1 / (QUANTILE_GAIN * math.sqrt(spec.shape[1]))
        if self._powers_of_two:
            return torch.exp2(torch.round(math.log2(usual) + 2 * spread - 1))
        return usual * (0.75 + 0.75 * spread)

    def _generator(self, spec: TensorSpec, first: int, what: str = "") -> torch.Generator:
        digest = hashlib.blake2b(f"{self._seed} {spec.name} {first} {what}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def normal_quantiles() -> Tensor:
    """uint8[256]: codes of e4m3 values that are the quantiles of a normal distribution, times QUANTILE_GAIN."""
    middles = (torch.arange(256, dtype=torch.float64) + 0.5) / 256
    normal = torch.erfinv(2 * middles - 1) * math.sqrt(2)
    return (normal * QUANTILE_GAIN).float().to(torch.float8_e4m3fn).view(torch.uint8)
