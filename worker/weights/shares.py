"""What one rank of a group holds on a GPU, by the size of the group: weights and the memory of its exchange. Pure.

Routed experts are divided among the ranks; attention, indexers, dense layers, shared experts and embeddings are held by
each. So a rank of a twice as large group holds more than half as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from worker.weights.layout import ExpertShare, exchange_bytes, weights_bytes


class RankBytes(NamedTuple):
    """Bytes on the GPU of one rank: weights by dtype, and buffers of the exchange."""

    weights: Mapping[str, int]
    exchange: int

    @property
    def total(self) -> int:
        return sum(self.weights.values()) + self.exchange


def rank_bytes(
    config: Any,
    dtype: str,
    block: tuple[int, int] | None,
    group_size: int,
    rows: int,
    *,
    deterministic: bool = False,
    draft_layer: bool = False,
) -> RankBytes:
    """Of any rank of a group of `group_size`, whose rounds have at most `rows` rows of each rank.

    `block` and `draft_layer` as in `weights_bytes`. Raises ConfigError where experts cannot be divided evenly.
    """
    share = ExpertShare.of(0, group_size, config.n_routed_experts)
    return RankBytes(
        weights_bytes(config, dtype, block, on_gpu=True, experts=share, draft_layer=draft_layer),
        exchange_bytes(config, dtype, group_size, rows, deterministic=deterministic),
    )


def fitting_group_size(
    config: Any,
    dtype: str,
    block: tuple[int, int] | None,
    sizes: Iterable[int],
    rows: int,
    device_bytes: int,
    *,
    deterministic: bool = False,
    draft_layer: bool = False,
) -> int:
    """The first of `sizes` whose ranks each leave some of `device_bytes`; 0: none does."""
    return next(
        (
            size
            for size in sizes
            if rank_bytes(config, dtype, block, size, rows, deterministic=deterministic, draft_layer=draft_layer).total
            < device_bytes
        ),
        0,
    )
