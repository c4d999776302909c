"""Products of FP8 activations by block-FP8 weights from DeepGEMM (`sgl-deep-gemm`): w8a8 on Hopper.

    library     the package, imported once, with its cache of kernels beside ours
    takes       whether it takes a weight
    linear      one weight
    experts     the experts of one rank

The library compiles a kernel with nvcc when a form of product is first asked for, and keeps it in a folder; launches
are on torch's current stream, read nothing on the host, and can be captured.

Rows of experts lie one expert behind another, each from a multiple of ROWS_FEW or ROWS_MANY rows on, the tile of
tokens; the library reads on the device where each expert's rows end. `masked`: each expert has room for every token.
"""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from kernels.block_weight import BLOCK, BlockFp8
from kernels.cuda import quantize
from kernels.cuda.jit import cache_dir
from protocol.errors import ConfigError

PACKAGE: Final = "deep_gemm"
#: Major compute capability.
CAPABILITY: Final = 9
#: Rows of weights, in whole parts: 16 bytes of a result.
WEIGHT_ROWS: Final = 8
#: Tiles of tokens of experts: of few tokens each, of many.
ROWS_FEW, ROWS_MANY = 64, 128
#: Rows that each expert has room for with `masked`, in whole parts: a tile that reached into the next expert's rows
#: would overwrite them.
MASKED_ROWS: Final = 128
#: Tokens of one piece of a prompt: bounds what its experts' rows take.
PIECE_TOKENS: Final = 2048


@lru_cache(maxsize=1)
def library() -> Any:
    """The package. Raises ConfigError with the cause where it cannot be imported."""
    os.environ.setdefault("DG_JIT_CACHE_DIR", str(cache_dir() / PACKAGE))
    try:
        return importlib.import_module(PACKAGE)
    except Exception as problem:  # what a native library of another torch raises is no ImportError alone
        raise ConfigError(
            f"cannot be imported: {problem or type(problem).__name__}",
            field=PACKAGE,
            value=torch.__version__,
            remedy="install the extra for this torch: hisparse[deepgemm-torch211] or hisparse[deepgemm-torch213]",
        ) from problem


def takes(weight: BlockFp8) -> bool:
    """Whether weights [..., N, K] have whole blocks of K, and rows of results in whole parts."""
    n, k = weight.values.shape[-2:]
    return k % BLOCK == 0 and n % WEIGHT_ROWS == 0


def linear(hidden: Tensor, weight: BlockFp8, *, powers: bool) -> Tensor:
    """hidden bfloat16[M, K], quantized, @ weight [N, K].T: bfloat16[M, N]. `powers`: see quantize."""
    return product(quantize.quantize(hidden, powers=powers), weight)


def product(rows: quantize.Quantized, weight: BlockFp8, compiled_dims: str = "") -> Tensor:
    """rows @ weight.T: bfloat16[M, N]."""
    out = torch.empty(len(rows.values), len(weight.values), dtype=torch.bfloat16, device=rows.values.device)
    if len(out):
        library().fp8_gemm_nt(tuple(rows), (weight.values, weight.scales), out, compiled_dims=compiled_dims)
    return out


def experts(
    hidden: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate_up: BlockFp8,
    down: BlockFp8,
    first: int,
    experts_total: int,
    *,
    powers: bool,
    masked: bool = False,
    multiple: int = 0,
) -> Tensor:
    """Output bfloat16[T, K]: as kernels.block_fp8.block_experts_w8a8, with gate above up in one weight [E, 2 I, K].

    `masked`, `multiple`: other than the choice of this module, for measurements.
    """
    out = torch.empty_like(hidden)
    for start in range(0, len(hidden), PIECE_TOKENS):
        piece = slice(start, start + PIECE_TOKENS)
        part = hidden[piece], chosen[piece], shares[piece]
        if masked:
            span = -(-len(part[0]) // MASKED_ROWS) * MASKED_ROWS
            placed = quantize.place(part[1], first, len(down.values), span=span)
        else:
            few = part[1].numel() <= ROWS_FEW * experts_total
            tile = multiple or (ROWS_FEW if few else ROWS_MANY)
            placed = quantize.place(part[1], first, len(down.values), multiple=tile)
        expected = max(1, -(-part[1].numel() // experts_total))
        products = _experts(part[0], placed, gate_up, down, expected, multiple=0 if masked else tile, powers=powers)
        quantize.add_rows(products, placed, part[2], out[piece])
    return out


def _experts(
    hidden: Tensor,
    placed: quantize.Placed,
    gate_up: BlockFp8,
    down: BlockFp8,
    expected: int,
    *,
    multiple: int,
    powers: bool,
) -> Tensor:
    middle = gate_up.values.shape[1] // 2
    rows = quantize.quantize(hidden, powers=powers, placed=placed)
    both = _grouped(rows, gate_up, placed, expected, multiple).view(-1, 2 * middle)
    gated = quantize.quantize_gated(both[:, :middle], both[:, middle:], powers=powers, placed=placed)
    return _grouped(gated, down, placed, expected, multiple).view(-1, hidden.shape[1])


def _grouped(
    rows: quantize.Quantized, weight: BlockFp8, placed: quantize.Placed, expected: int, multiple: int
) -> Tensor:
    """Rows of each expert @ its weight.T, bfloat16; tiles without rows are not written."""
    values, n, found = rows.values, weight.values.shape[1], library()
    out = torch.empty(*values.shape[:-1], n, dtype=torch.bfloat16, device=values.device)
    stored = weight.values, weight.scales
    if placed.span:
        found.m_grouped_fp8_fp4_gemm_nt_masked(tuple(rows), stored, out, placed.ends, expected)
    else:
        found.utils.layout.set_mk_alignment_for_contiguous_layout(multiple)
        found.m_grouped_fp8_fp4_gemm_nt_contiguous(
            tuple(rows), stored, out, placed.ends, use_psum_layout=True, expected_m_for_psum_layout=expected
        )
    return out
