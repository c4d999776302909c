"""Products with block-FP8 weights on CUDA: the contracts of kernels/block_fp8.py, for bfloat16 activations.

Products of large weights on Hopper, dense and by experts, go to block_linear.py, by the tables of block_plans.py; the
others to Triton. There a product's tiles follow from its count of tokens alone, a bucket of the tables below; the
splits of K from its shape and the number of multiprocessors. Figures behind both: benchmarks/RESULTS.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import inf
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kernels.block_weight import BLOCK, BlockFp8
from kernels.cuda import block_linear
from kernels.cuda.block_plans import (
    CROSSOVER_TOKENS,
    UNBOUNDED,
    ExpertPlans,
    crossover_of,
    expert_plans_of,
    expert_tiles,
    plan_of,
)
from kernels.cuda.triton_units import launch_options, power_of_two, triton_unit
from protocol.errors import BadInput

#: Compute capability that converts e4m3 in hardware; below it, kernels shift bits.
FP8_SINCE: Final = (8, 9)


class Tiles(NamedTuple):
    n: int  # rows of weights
    tokens: int
    warps: int
    stages: int
    resident: int  # programs that a multiprocessor holds at once
    registers: int | None = None  # of a thread, at most


#: By the largest count of tokens: tiles of dense products.
LINEAR_TILES: Final = {
    16: Tiles(32, 16, 2, 4, 4),
    32: Tiles(64, 32, 4, 3, 1, 104),
    64: Tiles(64, 64, 4, 3, 1, 128),
    UNBOUNDED: Tiles(64, 128, 4, 3, 1),
}
#: Of dense products of few tokens with weights of LARGE_VALUES or more.
LARGE_LINEAR_TILES: Final = {16: Tiles(64, 16, 2, 4, 3)} | {most: LINEAR_TILES[most] for most in (32, 64, UNBOUNDED)}
LARGE_VALUES: Final = 30_000_000
#: By the largest expected count of tokens of one expert: tiles of gate and up, and of down.
EXPERT_TILES: Final = {
    8: (Tiles(32, 16, 2, 4, 4), Tiles(64, 16, 2, 4, 4)),
    24: (Tiles(64, 32, 2, 2, 4), Tiles(128, 32, 2, 3, 4)),
    UNBOUNDED: (Tiles(64, 64, 4, 3, 2), Tiles(256, 64, 8, 3, 1)),
}
#: Tokens of one piece of a prompt: bounds what its experts' rows take.
PIECE_TOKENS: Final = 4096
#: Values of one matrix and of all rows of a product: kernels count them in 32 bits.
VALUES_MAX: Final = 2**31 - 1
SPLITS_MAX: Final = 16
BLOCKS_PER_SPLIT_MIN: Final = 4
ADD_BLOCK: Final = 256
WIDTH_BLOCK: Final = 1024
GATHER_BLOCK: Final = 512
DECODE_ROWS: Final = 32
#: Assignments that `route` reads at once: few, many.
ROUTE_CHUNKS: Final = (1024, 4096)
WARPS: Final = 4


def decode_blocks(weight: BlockFp8, out: Tensor) -> None:
    """As kernels.block_fp8.decode_blocks."""
    *_, n, k = out.shape
    if not out.numel():
        return
    matrices = out.numel() // (n * k)
    blocks = _blocks(k)
    _unit().decode[blocks, -(-n // DECODE_ROWS), matrices](
        _codes(weight.values),
        weight.scales,
        out,
        n,
        k,
        blocks,
        EVEN=k % BLOCK == 0,
        E4M3=_converts(out.device),
        BLOCK_ROWS=DECODE_ROWS,
        num_warps=WARPS,
    )


def linear(hidden: Tensor, weight: BlockFp8, scratch: Tensor | None) -> Tensor:
    """As kernels.block_fp8.block_linear: decoded by Hopper's kernel, by Triton's, or to scratch."""
    (tokens, k), n = hidden.shape, len(weight.values)
    if scratch is not None and tokens >= crossover(weight):
        return decoded_linear(hidden, weight, scratch)
    plan = plan_of(n, k, tokens) if tokens and block_linear.takes(weight) else None
    return _linear(hidden, weight) if plan is None else block_linear.linear(hidden, weight, plan)


def crossover(weight: BlockFp8) -> int:
    """Tokens from which `linear` decodes to scratch, where it is given any."""
    return crossover_of(*weight.values.shape) if block_linear.takes(weight) else CROSSOVER_TOKENS


def decoded_linear(hidden: Tensor, weight: BlockFp8, scratch: Tensor) -> Tensor:
    """hidden @ weight.T by torch, from the weight decoded into the front of `scratch`."""
    decoded = scratch.flatten()[: weight.values.numel()].view(weight.values.shape)
    decode_blocks(weight, decoded)
    return hidden @ decoded.T


def _linear(hidden: Tensor, weight: BlockFp8) -> Tensor:
    """Form the product by Triton."""
    (tokens, k), n = hidden.shape, len(weight.values)
    _check_size("weight", n * k)
    _check_size("hidden", tokens * k)
    out = torch.empty(tokens, n, dtype=torch.bfloat16, device=hidden.device)
    if not out.numel():
        return out
    tiles = _bucket(LARGE_LINEAR_TILES if n * k >= LARGE_VALUES else LINEAR_TILES, tokens)
    grid = (-(-tokens // tiles.tokens), -(-n // tiles.n))
    blocks = _blocks(k)
    span = _span(grid[0] * grid[1], blocks, tiles.resident * _multiprocessors(hidden.device))
    splits = -(-blocks // span)
    sums = out
    if splits > 1:
        sums = torch.empty(splits, tokens, n, dtype=torch.float32, device=hidden.device)
    _unit().linear[(*grid, splits)](
        hidden,
        _codes(weight.values),
        weight.scales,
        sums,
        weight.scales,
        weight.scales,
        tokens,
        n,
        k,
        blocks,
        span,
        GROUPED=False,
        **_options(tiles, k, hidden.device),
    )
    if splits > 1:
        _unit().add_splits[(-(-out.numel() // ADD_BLOCK),)](
            sums,
            out,
            out.numel(),
            splits,
            SPLITS_PADDED=SPLITS_MAX,
            BLOCK_COUNT=ADD_BLOCK,
            num_warps=WARPS,
            **launch_options(hidden.device),
        )
    return out


def _span(programs: int, blocks: int, held: int) -> int:
    """Blocks of K that one split takes, so that the last wave of `held` programs at once is as full as it can be."""
    best, least = blocks, float("inf")
    for splits in range(1, min(SPLITS_MAX, max(1, blocks // BLOCKS_PER_SPLIT_MIN)) + 1):
        span = -(-blocks // splits)
        waves = -(-programs * -(-blocks // span) // held)
        work = waves * (span + 2) + (2 if splits > 1 else 0)
        if work < least:
            best, least = span, work
    return best


def experts(
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate: BlockFp8,
    up: BlockFp8,
    down: BlockFp8,
    first_expert: int,
    experts_total: int | None,
    *,
    limit: float = inf,
    tiles: tuple[Tiles, Tiles] | ExpertPlans | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Form kernels.block_fp8.block_experts; `tiles` other than the table's, for measurements.

    Both of a pair have the same count of tokens, since they share the tiles that `route` fills.
    """
    tokens, choices = chosen.shape
    if out is None:
        out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    if not out.numel() or not choices or not len(gate.values):
        return out.zero_()
    expected = -(-min(tokens, PIECE_TOKENS) * choices // (experts_total or len(gate.values)))
    if not tiles and all(map(block_linear.takes, (gate, up, down))):
        _, middle, width = gate.values.shape
        tiles = expert_plans_of(middle, width, expected)
    tiles = tiles or _bucket(EXPERT_TILES, expected)
    size = PIECE_TOKENS
    if isinstance(tiles, ExpertPlans):
        size = max(1, min(size, tiles.assignments_max(len(gate.values)) // choices))
    for start in range(0, tokens, size):
        piece = slice(start, start + size)
        about = first_expert, limit, out[piece], tiles
        _experts(hidden[piece], chosen[piece], weights[piece], gate, up, down, *about)
    return out


def _experts(
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate: BlockFp8,
    up: BlockFp8,
    down: BlockFp8,
    first_expert: int,
    limit: float,
    out: Tensor,
    tiles: tuple[Tiles, Tiles] | ExpertPlans,
) -> None:
    device, unit = hidden.device, _unit()
    held, middle, width = gate.values.shape
    assignments, choices = chosen.numel(), chosen.shape[1]
    _check_size("gate", middle * width)
    _check_size("hidden", max(assignments * max(middle, width), len(hidden) * hidden.stride(0)))
    block_t = tiles[0].tokens
    tiles_max = expert_tiles(assignments, held, block_t)
    tile_expert = torch.empty(tiles_max, dtype=torch.int32, device=device)
    slots = torch.empty(tiles_max, block_t, dtype=torch.int32, device=device)
    unit.route[(held + 1,)](
        chosen,
        chosen.stride(0),
        tile_expert,
        slots,
        assignments,
        first_expert,
        tiles_max,
        held,
        CHOICES=choices,
        EXPERTS_PADDED=power_of_two(held + 1),
        BLOCK_T=block_t,
        CHUNK=ROUTE_CHUNKS[assignments > ROUTE_CHUNKS[0]],
        num_warps=WARPS,
        **launch_options(device),
    )
    routed = tile_expert, slots
    if isinstance(tiles, ExpertPlans):
        products = _products_on_hopper(hidden, routed, choices, gate, up, down, limit, tiles)
    else:
        products = _products_by_triton(hidden, routed, choices, gate, up, down, limit, tiles)
    unit.add_choices[len(hidden), -(-width // WIDTH_BLOCK)](
        products,
        chosen,
        chosen.stride(0),
        weights,
        weights.stride(0),
        out,
        first_expert,
        held,
        width,
        CHOICES=choices,
        BLOCK_WIDTH=WIDTH_BLOCK,
        num_warps=WARPS,
        **launch_options(device),
    )


def _products_on_hopper(
    hidden: Tensor,
    routed: tuple[Tensor, Tensor],
    choices: int,
    gate: BlockFp8,
    up: BlockFp8,
    down: BlockFp8,
    limit: float,
    plans: ExpertPlans,
) -> Tensor:
    """Of each assignment, by block_linear: rows of a tile follow each other in memory, for its copies."""
    tile_expert, slots = routed
    (_, middle, width), rows = gate.values.shape, slots.numel()
    gathered = torch.empty(rows, width, dtype=torch.bfloat16, device=hidden.device)
    _unit().gather[len(tile_expert), -(-width // GATHER_BLOCK)](
        hidden,
        hidden.stride(0),
        tile_expert,
        slots,
        gathered,
        choices,
        width,
        BLOCK_T=slots.shape[1],
        BLOCK_WIDTH=GATHER_BLOCK,
        num_warps=WARPS,
        **launch_options(hidden.device),
    )
    gated = torch.empty(rows, middle, dtype=torch.bfloat16, device=hidden.device)
    block_linear.grouped(gathered, gate, up, tile_expert, slots, gated, plans.gated, limit)
    del gathered
    products = torch.empty(len(hidden) * choices, width, dtype=torch.bfloat16, device=hidden.device)
    block_linear.grouped(gated, down, None, tile_expert, slots, products, plans.grouped)
    return products


def _products_by_triton(
    hidden: Tensor,
    routed: tuple[Tensor, Tensor],
    choices: int,
    gate: BlockFp8,
    up: BlockFp8,
    down: BlockFp8,
    limit: float,
    tiles: tuple[Tiles, Tiles],
) -> Tensor:
    """Of each assignment, by Triton."""
    (tile_expert, slots), (for_gate, for_down), device, unit = routed, tiles, hidden.device, _unit()
    (_, middle, width), assignments, tiles_max = gate.values.shape, len(hidden) * choices, len(tile_expert)
    gated = torch.empty(assignments, middle, dtype=torch.bfloat16, device=device)
    unit.gated[-(-middle // for_gate.n), tiles_max](
        hidden,
        hidden.stride(0),
        _codes(gate.values),
        gate.scales,
        _codes(up.values),
        up.scales,
        gated,
        tile_expert,
        slots,
        choices,
        middle,
        width,
        _blocks(width),
        limit,
        **_options(for_gate, width, device),
    )
    products = torch.empty(assignments, width, dtype=torch.bfloat16, device=device)
    unit.linear[-(-width // for_down.n), tiles_max](
        gated,
        _codes(down.values),
        down.scales,
        products,
        tile_expert,
        slots,
        0,
        width,
        middle,
        _blocks(middle),
        _blocks(middle),
        GROUPED=True,
        **_options(for_down, middle, device),
    )
    return products


def _check_size(field: str, values: int) -> None:
    if values > VALUES_MAX:
        raise BadInput("too many values for 32 bits", field=field, value=values, remedy=f"at most {VALUES_MAX}")


def _options(tiles: Tiles, k: int, device: torch.device) -> dict[str, Any]:
    return {
        "BLOCK_N": tiles.n,
        "BLOCK_T": tiles.tokens,
        "EVEN": k % BLOCK == 0,
        "E4M3": _converts(device),
        "STAGES": tiles.stages,
        "num_warps": tiles.warps,
        "maxnreg": tiles.registers,
        **launch_options(device),
    }


def _bucket(table: Mapping[int, Any], count: int) -> Any:
    return next(tiles for most, tiles in table.items() if count <= most)


def _codes(values: Tensor) -> Tensor:
    return values if _converts(values.device) else values.view(torch.uint8)


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _unit() -> ModuleType:
    return triton_unit("block_fp8_triton")


@lru_cache(maxsize=8)
def _converts(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_SINCE


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
