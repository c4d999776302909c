"""Bytes of one rank of a group on a GPU, by the size of the group: weights, its exchange, prompt passes. Pure.

Routed experts are divided among the ranks; attention, indexers, dense layers, shared experts and embeddings are held by
each. So a rank of a twice as large group holds more than half as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from worker.weights.layout import ExpertShare, exchange_bytes, prompt_scratch_bytes, weights_bytes


class RankBytes(NamedTuple):
    """Bytes on the GPU of one rank: weights by dtype, buffers of the exchange, and what open prompt passes take."""

    weights: Mapping[str, int]
    exchange: int
    prompts: int

    @property
    def total(self) -> int:
        return sum(self.weights.values()) + self.exchange + self.prompts


def rank_bytes(
    config: Any,
    dtype: str,
    block: tuple[int, int] | None,
    group_size: int,
    rows: int,
    *,
    pass_tokens: int = 0,
    deterministic: bool = False,
    draft_layer: bool = False,
) -> RankBytes:
    """Return the bytes of any rank of a group of `group_size`, whose rounds have at most `rows` rows of each rank.
    `pass_tokens` of a prompt pass; 0: none is counted.

    `block` and `draft_layer` as in `weights_bytes`. Raises ConfigError where experts cannot be divided evenly.
    """
    share = ExpertShare.of(0, group_size, config.n_routed_experts)
    return RankBytes(
        weights_bytes(config, dtype, block, on_gpu=True, experts=share, draft_layer=draft_layer),
        exchange_bytes(config, dtype, group_size, rows, deterministic=deterministic),
        prompt_scratch_bytes(config, rows, pass_tokens, dtype=dtype, ranks=group_size) if pass_tokens else 0,
    )


def fitting_group_size(
    config: Any,
    dtype: str,
    block: tuple[int, int] | None,
    sizes: Sequence[int],
    rows: int,
    device_bytes: int,
    *,
    pass_tokens: int = 0,
    deterministic: bool = False,
    draft_layer: bool = False,
) -> int:
    """The first of `sizes` whose ranks each leave some of `device_bytes`; 0: none does."""
    kind = {"deterministic": deterministic, "draft_layer": draft_layer}
    held = (rank_bytes(config, dtype, block, size, rows, pass_tokens=pass_tokens, **kind).total for size in sizes)
    return next((size for size, total in zip(sizes, held, strict=True) if total < device_bytes), 0)
