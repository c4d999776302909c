"""Rows on their way to and from a library's products of FP8 by FP8: launches src/quantize.cuh.

    place       a row of a buffer for each assignment to an expert of this rank
    quantize    bfloat16 rows to e4m3 and scales, each to its own place or to those of its choices
    spread      quantized rows to the places of their choices
    quantize_gated   silu(gate) * up of rows where they are, likewise
    add_rows    for each token, the weighted sum of its choices' rows

An *assignment* is one choice of one token, number token * choices + choice. Scales float32[blocks, rows] lie as the
library's copy engine reads them: those of one block of 128 values side by side, rows in whole parts of SCALE_ROWS.

Every launch begins early and waits for the kernel ahead before it reads.
"""

from __future__ import annotations

import ctypes
from math import inf
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels.block_weight import BLOCK, E4M3
from kernels.cuda.jit import load
from kernels.cuda.structures import (
    EXPERTS_MAX,
    PLACE_THREADS,
    QUANTIZE_THREADS,
    SUM_THREADS,
    PlaceRows,
    QuantizeRows,
    SpreadRows,
    SumRows,
)
from protocol.errors import BadInput

UNIT: Final = "quantize"
KERNELS: Final = ("count_rows", "place_rows", "quantize_rows", "spread_rows", "quantize_gated", "sum_rows")
#: Assignments that one block places, and those of a block's run where there are more.
PLACED_BY_ONE_MOST: Final = 8192
PLACED_RUN: Final = 2048
#: Rows of scales, in whole parts: 16 bytes.
SCALE_ROWS: Final = 4
VECTOR_BYTES: Final = 16
UNITS_PER_BLOCK: Final = QUANTIZE_THREADS * 8 // BLOCK
#: Units that half a warp may take, as the source has it; one, up to so many blocks of threads.
UNITS: Final = 4
BLOCKS_APART_MOST: Final = 1024
VALUES_PER_BLOCK: Final = SUM_THREADS * 8


class Placed(NamedTuple):
    """Rows of a buffer by experts. `rows` int32[assignments]: -1 for another rank's. `ends` int32[experts]: behind the
    last row of each expert. `total`: rows of the buffer."""

    rows: Tensor
    ends: Tensor
    total: int


class Quantized(NamedTuple):
    """`values` e4m3[rows, k] and `scales` float32[rows, blocks], whose rows are adjacent in memory."""

    values: Tensor
    scales: Tensor


class Codes(NamedTuple):
    """Quantized rows that another kernel fills: as of Quantized, or rows that lie apart. `powers`: scales are powers of
    two."""

    values: Tensor
    scales: Tensor
    powers: bool

    @classmethod
    def allocate(cls, rows: int, k: int, device: torch.device, *, powers: bool) -> Codes:
        """For `rows` rows of `k` values, in whole blocks."""
        return cls(*_target(rows, k, device, None), powers)


def place(chosen: Tensor, first: int, experts: int, *, multiple: int) -> Placed:
    """Rows for `chosen` int32 or int64[tokens, choices], of the experts first .. first + experts - 1. Tokens may lie
    apart.

    Those of each begin at a multiple of `multiple`. Raises BadInput for more than EXPERTS_MAX experts.
    """
    if experts > EXPERTS_MAX:
        raise BadInput("too many", field="experts", value=experts, remedy=f"at most {EXPERTS_MAX} on one rank")
    assignments, device = chosen.numel(), chosen.device
    rows = torch.empty(assignments, dtype=torch.int32, device=device)
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    runs = 1 if assignments <= PLACED_BY_ONE_MOST else -(-assignments // PLACED_RUN)
    counts = torch.empty(runs, experts, dtype=torch.int32, device=device) if runs > 1 else None
    parameters = PlaceRows(
        chosen=chosen.data_ptr(),
        rows=rows.data_ptr(),
        ends=ends.data_ptr(),
        counts=None if counts is None else counts.data_ptr(),
        assignments=assignments,
        first=first,
        experts=experts,
        multiple=multiple,
        wide=int(chosen.dtype == torch.int64),
        stride=chosen.stride(0),
        choices=chosen.shape[1],
        span=assignments if counts is None else PLACED_RUN,
    )
    if counts is not None:
        _run("count_rows", device, (runs, 1), parameters, PLACE_THREADS)
    _run("place_rows", device, (runs, 1), parameters, PLACE_THREADS)
    return Placed(rows, ends, rows_most(assignments, experts, multiple))


def rows_most(assignments: int, experts: int, multiple: int) -> int:
    """Rows that `assignments` take where each of `experts` begins at a multiple of `multiple`, however they fall."""
    busy = min(assignments, experts)
    return (busy + (assignments - busy) // multiple) * multiple


def quantize(hidden: Tensor, *, powers: bool, placed: Placed | None = None, total: int = 0) -> Quantized:
    """`hidden` bfloat16[rows, k], k a multiple of 128; by `placed`, rows where their choices are, and no others.

    A scale is the largest magnitude of 128 values / 448, with `powers` the next power of two; of zeros it is 1.
    `total`: rows of the result, where there are to be more; those have no numbers.
    """
    rows, k = _checked("hidden", hidden)
    target = _target(max(rows, total), k, hidden.device, placed)
    if rows:
        choices = 1 if placed is None else len(placed.rows) // rows
        _launch("quantize_rows", hidden, None, placed, target, rows, choices, powers=powers)
    return target


def spread(codes: Codes, placed: Placed) -> Quantized:
    """Rows of `codes`, values of each adjacent from a multiple of 8 bytes on, where their choices are by `placed`."""
    (rows, k), target = codes.values.shape, _target(0, codes.values.shape[1], codes.values.device, placed)
    parameters = SpreadRows(
        codes=codes.values.data_ptr(),
        given=codes.scales.data_ptr(),
        rows=placed.rows.data_ptr(),
        values=target.values.data_ptr(),
        scales=target.scales.data_ptr(),
        stride=codes.values.stride(0),
        scale_stride=codes.scales.stride(0),
        block_stride=codes.scales.stride(1),
        count=rows,
        choices=len(placed.rows) // max(1, rows),
        k=k,
        blocks=k // BLOCK,
        span=target.scales.stride(1),
    )
    if rows:
        _run("spread_rows", codes.values.device, (_blocks(rows, k), 1), parameters, QUANTIZE_THREADS)
    return target


def quantize_gated(
    gate: Tensor, up: Tensor, *, powers: bool, placed: Placed | None = None, total: int = 0, limit: float = inf
) -> Quantized:
    """silu(gate) * up, rounded to bfloat16 after each of both, as `quantize`. Both are cut to `limit` first, gate from
    above. Rows bfloat16[rows, k] lie equally far apart in both; by `placed`, those of its choices are read and written,
    and no others."""
    rows, k = _checked("gate", gate)
    target = _target(max(rows, total), k, gate.device, placed)
    if rows:
        count = rows if placed is None else len(placed.rows)
        _launch("quantize_gated", gate, up, placed, target, count, 1, powers=powers, limit=limit)
    return target


def add_rows(products: Tensor, placed: Placed, shares: Tensor, out: Tensor) -> None:
    """Write to `out` bfloat16[tokens, width] the sum of share * row over each token's choices on this rank, in order.

    `products` bfloat16[rows, width], width a multiple of 8; `shares` float32 or bfloat16[tokens, choices], tokens of
    any distance. Parts are
    rounded to the wider of both dtypes and summed in float32.
    """
    (tokens, width), choices = out.shape, shares.shape[1]
    parameters = SumRows(
        products=products.data_ptr(),
        rows=placed.rows.data_ptr(),
        shares=shares.data_ptr(),
        out=out.data_ptr(),
        choices=choices,
        width=width,
        wide_shares=int(shares.dtype == torch.float32),
        stride=shares.stride(0),
    )
    if tokens:
        _run("sum_rows", out.device, (tokens, -(-width // VALUES_PER_BLOCK)), parameters, SUM_THREADS)


def _checked(field: str, rows: Tensor) -> tuple[int, int]:
    """Rows and columns of `rows`. Raises BadInput for what the kernels cannot read."""
    count, columns = rows.shape
    if columns % BLOCK or rows.dtype != torch.bfloat16 or rows.stride(1) != 1 or rows.data_ptr() % VECTOR_BYTES:
        raise BadInput(
            f"expected bfloat16 in whole blocks of {BLOCK}, from a multiple of {VECTOR_BYTES} bytes on",
            field=field,
            value=f"{str(rows.dtype).removeprefix('torch.')}{list(rows.shape)}",
            remedy="decode the weight, or copy the rows",
        )
    return count, columns


def _target(rows: int, k: int, device: torch.device, placed: Placed | None) -> Quantized:
    """Memory for values and scales."""
    total = rows if placed is None else placed.total
    span = -(-total // SCALE_ROWS) * SCALE_ROWS
    scales = torch.empty(k // BLOCK, span, dtype=torch.float32, device=device)
    return Quantized(torch.empty(total, k, dtype=E4M3, device=device), scales.t()[:total])


def _launch(
    kernel: str,
    hidden: Tensor,
    factors: Tensor | None,
    placed: Placed | None,
    target: Quantized,
    count: int,
    choices: int,
    *,
    powers: bool,
    limit: float = inf,
) -> None:
    k = hidden.shape[1]
    parameters = QuantizeRows(
        hidden=hidden.data_ptr(),
        factors=None if factors is None else factors.data_ptr(),
        rows=None if placed is None else placed.rows.data_ptr(),
        values=target.values.data_ptr(),
        scales=target.scales.data_ptr(),
        stride=hidden.stride(0),
        count=count,
        choices=choices,
        k=k,
        blocks=k // BLOCK,
        span=target.scales.stride(1),
        powers=int(powers),
        limit=limit,
    )
    _run(kernel, hidden.device, (_blocks(count, k), 1), parameters, QUANTIZE_THREADS)


def _blocks(rows: int, k: int) -> int:
    """Blocks of threads for the units of `rows`."""
    blocks = -(-rows * (k // BLOCK) // UNITS_PER_BLOCK)
    return -(-blocks // UNITS) if blocks > BLOCKS_APART_MOST else blocks


def _run(name: str, device: torch.device, grid: tuple[int, int], parameters: ctypes.Structure, threads: int) -> None:
    kernel = load(UNIT, name, (), device.index or 0)
    kernel.launch(grid, parameters, stream_of(device), threads=threads, early=True)


def stream_of(device: torch.device) -> int:
    """Address of the current stream on `device`."""
    return torch.cuda.current_stream(device).cuda_stream
