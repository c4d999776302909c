"""What a decode step of one rank of a group must at least take, part by part, and what links between GPUs add. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kernels.expert_choice import state_bytes
from kernels.layout import Geometry
from worker.weights.layout import exchanged_row_bytes, has_experts, has_indexer

BF16_BYTES = 2
BLOCK_SCALE_BYTES = 4 / (128 * 128)


class Part(NamedTuple):
    """Bytes that a part of a step reads and writes in device memory, and its multiply-adds, twice each."""

    bytes: float
    operations: float


@dataclass(frozen=True)
class Links:
    """A model of the exchange among `ranks` GPUs of one node: each collective takes `latency_us`, and the bytes that a
    rank receives at `bytes_per_us`. The defaults are NVLink 4's 450 GB/s a direction at three quarters, and a latency
    that small NCCL collectives of eight GPUs usually show; neither was measured here. A value of a row on its way to
    experts has `row_value_bytes`, 1 of a quantized one; on its way back two."""

    ranks: int
    latency_us: float = 12.0
    bytes_per_us: float = 337_500.0
    row_value_bytes: int = BF16_BYTES

    def step_ms(self, config: Any, rows: int) -> float:
        """Of all collectives of a decode step of `rows` rows a rank: an all-gather and an all-to-all a mixture."""
        mixtures = sum(has_experts(config, layer) for layer in range(config.num_hidden_layers))
        return mixtures * self.mixture_ms(config, rows)

    def mixture_ms(self, config: Any, rows: int) -> float:
        """Of the collectives of one mixture."""
        if self.ranks == 1:
            return 0.0
        state = state_bytes(config.hidden_size, self.row_value_bytes)
        gathered = exchanged_row_bytes(state, config.num_experts_per_tok)
        received = (self.ranks - 1) * rows * (gathered + config.hidden_size * BF16_BYTES)
        return float((2 * self.latency_us + received / self.bytes_per_us) / 1e3)


def parts_of(config: Any, geometry: Geometry, *, rows: int, of: int, context: int) -> Mapping[str, Part]:
    """The parts of a decode step of `rows` rows of `context` tokens each, on one rank `of` a group whose ranks have as
    many rows. Weights are block-FP8 where repositories convert them, else bfloat16; each is read once."""
    layers = config.num_hidden_layers
    hidden, heads, latent, rope = (
        config.hidden_size,
        config.num_attention_heads,
        config.kv_lora_rank,
        config.qk_rope_head_dim,
    )
    mixtures = sum(has_experts(config, layer) for layer in range(layers))
    anchors = sum(has_indexer(config, layer) for layer in range(layers))
    query = heads * (config.qk_nope_head_dim + rope)
    projected = (
        config.q_lora_rank * hidden
        + query * config.q_lora_rank
        + (latent + rope) * hidden
        + hidden * heads * config.v_head_dim
    )
    absorbed = heads * latent * (config.qk_nope_head_dim + config.v_head_dim)
    indexer = config.index_n_heads * config.index_head_dim * config.q_lora_rank + config.index_head_dim * hidden
    shared = 3 * hidden * config.moe_intermediate_size * config.n_shared_experts
    expert = 3 * hidden * config.moe_intermediate_size
    held, choices = config.n_routed_experts // of, rows * of * config.num_experts_per_tok
    touched = held * (1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** (rows * of))
    scored = config.index_n_heads * config.index_head_dim
    return {
        "projections": _sum(layers, _fp8(projected, rows), _plain(absorbed, rows)),
        "indexer": _sum(anchors, _fp8(indexer, rows), _plain(config.index_n_heads * hidden, rows)),
        "dense": _sum(layers - mixtures, _fp8(3 * hidden * config.intermediate_size, rows)),
        "shared": _sum(mixtures, _fp8(shared, rows), _plain(config.n_routed_experts * hidden, rows)),
        "experts": _sum(mixtures, Part(_fp8_bytes(touched * expert), 2 * expert * choices / of)),
        "head": _plain(config.vocab_size * hidden, rows),
        "index": _sum(anchors, Part(rows * context * geometry.index_row_bytes, 2 * scored * rows * context)),
        "attention": _sum(
            layers,
            Part(rows * geometry.topk * geometry.row_bytes, 2 * rows * geometry.topk * heads * (2 * latent + rope)),
        ),
    }


def floor_ms(parts: Mapping[str, Part], copy_bytes_per_us: float, operations_per_us: float) -> dict[str, float]:
    """Of each part the larger of its bytes at the rate of a copy and its operations at the rate of products."""
    return {
        name: max(part.bytes / copy_bytes_per_us, part.operations / operations_per_us) / 1e3
        for name, part in parts.items()
    }


def _sum(times: int, *parts: Part) -> Part:
    return Part(times * sum(part.bytes for part in parts), times * sum(part.operations for part in parts))


def _fp8(weights: int, rows: int) -> Part:
    return Part(_fp8_bytes(weights), 2 * weights * rows)


def _fp8_bytes(weights: float) -> float:
    return weights * (1 + BLOCK_SCALE_BYTES)


def _plain(weights: int, rows: int) -> Part:
    return Part(weights * BF16_BYTES, 2 * weights * rows)
