"""Products of FP8 activations by block-FP8 weights from DeepGEMM (`sgl-deep-gemm`): w8a8 on Hopper.

    library         the package, imported once, with its cache of kernels beside ours
    require         name and version of a package that multiplies on this card
    takes           whether it takes a weight
    linear, coded, gated   one weight
    experts         the experts of one rank
    padded_counts, expert_counts   counts of rows for which the library may compile another kernel

The library compiles a kernel with nvcc when a form of product is first asked for, and keeps it in a folder. Which form
it takes follows from the count of rows: so rows are padded to one of few counts, and each of these is run once before
work begins. Rows that pad have no numbers, and their results are cut off. Launches are on torch's current stream, read
nothing on the host, and can be captured. The device of the tensors must be the current one.

Rows of experts lie one expert behind another, each from a multiple of ROWS_FEW or ROWS_MANY rows on, the tile of
tokens; the library reads on the device where each expert's rows end. Rejected: room for every token in each expert
("masked"), which takes as long for the rows of a step and several times the memory.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kernels.block_weight import BLOCK, E4M3, BlockFp8
from kernels.cuda import quantize
from kernels.cuda.jit import cache_dir
from kernels.cuda.triton_units import power_of_two
from protocol.errors import ConfigError

PACKAGE: Final = "deep_gemm"
#: Where packages of CUDA 13's toolkit have their files.
TOOLKIT: Final = "nvidia.cu13"
#: Major compute capability of the cards that it is used on.
CAPABILITY: Final = 9
#: Extras of this project, by the release of torch that their package was built for.
EXTRAS: Final = {"2.11": "deepgemm-torch211", "2.13": "deepgemm-torch213"}
#: Rows of weights, in whole parts: 16 bytes of a result.
WEIGHT_ROWS: Final = 8
#: Counts of rows of a dense product: these, multiples of FEW up to MANY, multiples of MANY_STEP beyond. More counts ask
#: for more kernels, and for some counts the library chooses a slower kernel than for the next (benchmarks/NOTES.md).
SMALL_COUNTS: Final = (16, 64)
FEW, MANY, MANY_STEP = 128, 512, 256
#: Tiles of tokens of experts: where an expert may expect EXPECTED_FEW rows at most, and beyond.
ROWS_FEW, ROWS_MANY = 64, 128
EXPECTED_FEW: Final = 32
#: Rows of an expert beyond which the library is told of no more: it has no faster kernel for them.
EXPECTED_MOST: Final = 64
#: Tokens of all ranks in one piece of a prompt: bounds what its experts' rows take.
PIECE_TOKENS: Final = 16_384
#: Share of its norm by which the probe's product may differ from torch's: results are rounded to bfloat16.
PROBE_ERROR_MOST: Final = 1e-2


@lru_cache(maxsize=1)
def library() -> Any:
    """The package. Raises ConfigError with the cause where it cannot be imported."""
    os.environ.setdefault("DG_JIT_CACHE_DIR", str(cache_dir() / PACKAGE))
    toolkit = packaged_toolkit()
    if toolkit and not (os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or shutil.which("nvcc")):
        os.environ["CUDA_HOME"] = toolkit
    try:
        found = importlib.import_module(PACKAGE)
        found.set_pdl(True)  # its kernels wait for the kernel ahead themselves
    except Exception as problem:  # what a native library of another torch raises is no ImportError alone
        raise ConfigError(
            f"cannot be imported: {problem or type(problem).__name__}",
            field=PACKAGE,
            value=f"torch {torch.__version__}",
            remedy=_remedy(torch.__version__),
        ) from problem
    return found


def packaged_toolkit() -> str:
    """Folder of the nvcc that pip installed with the extra; empty without one."""
    try:
        places = importlib.import_module(TOOLKIT).__path__
    except ImportError:
        return ""
    return next((place for place in places if Path(place, "bin", "nvcc").exists()), "")


def require(device: torch.device) -> str:
    """Name and version of the package, after one product on `device`, compared with torch's.

    Raises ConfigError for a card without its kernels, and for a package that cannot be imported, does not compile, or
    gives another result.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major != CAPABILITY:
        raise ConfigError(
            "has no kernels for this card",
            field=PACKAGE,
            value=f"compute capability {major}.{minor}",
            remedy=f"use a card of capability {CAPABILITY}, or worker.matmul = weight_only",
        )
    found = library()
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            error = probe_error(device)
    except Exception as problem:  # whatever a compiler, a driver or an interface of another release says
        raise ConfigError(
            f"forms no product: {problem or type(problem).__name__}",
            field=PACKAGE,
            value=found.__version__,
            remedy="install g++, put the nvcc of CUDA 13 on PATH or its folder into CUDA_HOME, or use weight_only",
        ) from problem
    if not error <= PROBE_ERROR_MOST:
        raise ConfigError(
            f"gives another product than torch, by {error:.1%} of its norm",
            field=PACKAGE,
            value=found.__version__,
            remedy=_remedy(torch.__version__),
        )
    return f"{PACKAGE} {found.__version__}"


def probe_error(device: torch.device) -> float:
    """Distance of one small product from torch's, a share of its norm."""
    numbers = torch.arange(2 * BLOCK * BLOCK, device=device)
    codes = ((numbers * 37) % 0x70).to(torch.uint8).view(E4M3).view(2 * BLOCK, BLOCK)
    weight = BlockFp8(codes, torch.tensor([[0.5], [2.0]], device=device))
    hidden = ((numbers[: 3 * BLOCK] * 29) % 16 - 8).view(3, BLOCK).bfloat16()
    wanted = hidden.float() @ (codes.float() * weight.scales.repeat_interleave(BLOCK, 0)).T
    got = linear(hidden, weight, powers=True).float()
    return float((got - wanted).norm() / wanted.norm())


def _remedy(torch_version: str) -> str:
    release = ".".join(torch_version.split(".")[:2])
    if release in EXTRAS:
        return f"pip install 'hisparse[{EXTRAS[release]}]'"
    return f"install torch {' or '.join(EXTRAS)} and its extra, {' or '.join(EXTRAS.values())}"


def takes(weight: BlockFp8) -> bool:
    """Return whether weights [..., N, K] have whole blocks of K, and rows of results in whole parts."""
    n, k = weight.values.shape[-2:]
    return k % BLOCK == 0 and n % WEIGHT_ROWS == 0


def padded(rows: int) -> int:
    """The count of rows that a dense product of `rows`, 1 or more, is formed with."""
    for count in SMALL_COUNTS:
        if rows <= count:
            return count
    step = FEW if rows <= MANY else MANY_STEP
    return -(-rows // step) * step


def padded_counts(rows_max: int) -> Sequence[int]:
    """All of them, for up to `rows_max` rows."""
    last = padded(rows_max)
    counts = (*SMALL_COUNTS, *range(FEW, MANY, FEW), *range(MANY, last + 1, MANY_STEP))
    return [count for count in counts if count <= last]


def expected_rows(assignments: int, experts_total: int) -> int:
    """Rows that the library is told to expect of each expert: a power of two, EXPECTED_MOST at most."""
    return min(EXPECTED_MOST, power_of_two(max(1, -(-assignments // experts_total))))


def expert_counts(choices: int, experts_total: int) -> Sequence[int]:
    """One count of tokens for each form that experts' products may take."""
    forms: dict[int, int] = {}
    for rows in range(1, PIECE_TOKENS + 1):
        forms.setdefault(expected_rows(rows * choices, experts_total), rows)
    return list(forms.values())


def linear(hidden: Tensor, weight: BlockFp8, *, powers: bool) -> Tensor:
    """hidden bfloat16[M, K], quantized, @ weight [N, K].T: bfloat16[M, N]. `powers`: see quantize."""
    if not len(hidden):
        return hidden.new_empty(0, len(weight.values))
    return product(quantize.quantize(hidden, powers=powers, total=padded(len(hidden))), weight)[: len(hidden)]


def coded(codes: quantize.Codes, rows: int, weight: BlockFp8) -> Tensor:
    """Product of the first `rows` of `codes`, of which there are `padded(rows)`."""
    return product(quantize.Quantized(codes.values, codes.scales), weight)[:rows]


def gated(gate: Tensor, up: Tensor, weight: BlockFp8, *, powers: bool) -> Tensor:
    """Product of silu(gate) * up, as linear forms one."""
    if not len(gate):
        return gate.new_empty(0, len(weight.values))
    return product(quantize.quantize_gated(gate, up, powers=powers, total=padded(len(gate))), weight)[: len(gate)]


def product(rows: quantize.Quantized, weight: BlockFp8) -> Tensor:
    """rows @ weight.T: bfloat16[M, N], by a kernel for these N and K. One for all sizes takes up to twice the time."""
    out = torch.empty(len(rows.values), len(weight.values), dtype=torch.bfloat16, device=rows.values.device)
    library().fp8_gemm_nt(tuple(rows), (weight.values, weight.scales), out, compiled_dims="nk")
    return out


def experts(
    hidden: Tensor | quantize.Codes,
    chosen: Tensor,
    shares: Tensor,
    gate_up: BlockFp8,
    down: BlockFp8,
    first: int,
    experts_total: int,
    *,
    powers: bool,
    limit: float = inf,
    multiple: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Output bfloat16[T, K]: as kernels.block_fp8.block_experts_w8a8, with gate above up in one weight [E, 2 I, K].

    Quantized rows may lie apart, with scales [T, blocks] whose rows lie apart too.
    `multiple`: tile of tokens other than this module's choice, for measurements.
    """
    if out is None:
        out = torch.empty(len(chosen), down.values.shape[1], dtype=torch.bfloat16, device=chosen.device)
    for part in pieces(len(chosen)):
        rows = _part_of(hidden, part), chosen[part], shares[part]
        _add_piece(*rows, gate_up, down, first, experts_total, limit, out[part], powers=powers, multiple=multiple)
    return out


def pieces(tokens: int) -> Sequence[slice]:
    """Pieces of PIECE_TOKENS at most, as equal as can be."""
    size = -(-tokens // max(1, -(-tokens // PIECE_TOKENS)))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, max(1, size))]


def _part_of(rows: Tensor | quantize.Codes, part: slice) -> Tensor | quantize.Codes:
    if isinstance(rows, quantize.Codes):
        return quantize.Codes(rows.values[part], rows.scales[part], rows.powers)
    return rows[part]


def _add_piece(
    hidden: Tensor | quantize.Codes,
    chosen: Tensor,
    shares: Tensor,
    gate_up: BlockFp8,
    down: BlockFp8,
    first: int,
    experts_total: int,
    limit: float,
    out: Tensor,
    *,
    powers: bool,
    multiple: int,
) -> None:
    """Write the sums of one piece of tokens. What is no longer read makes room for what follows."""
    middle, expected = gate_up.values.shape[1] // 2, expected_rows(chosen.numel(), experts_total)
    tile = multiple or (ROWS_FEW if expected <= EXPECTED_FEW else ROWS_MANY)
    placed = quantize.place(chosen, first, len(down.values), multiple=tile)
    if isinstance(hidden, quantize.Codes):
        rows = quantize.spread(hidden, placed)
    else:
        rows = quantize.quantize(hidden, powers=powers, placed=placed)
    both = grouped(rows, gate_up, placed, expected, tile)
    del rows
    gate, up = both[:, :middle], both[:, middle:]
    gated_rows = quantize.quantize_gated(gate, up, powers=powers, placed=placed, limit=limit)
    del gate, up
    del both
    quantize.add_rows(grouped(gated_rows, down, placed, expected, tile), placed, shares, out)


def grouped(rows: quantize.Quantized, weight: BlockFp8, placed: quantize.Placed, expected: int, tile: int) -> Tensor:
    """Rows of each expert @ its weight.T: bfloat16[placed.total, N]. Tiles without rows are not written."""
    found = library()
    out = torch.empty(placed.total, weight.values.shape[1], dtype=torch.bfloat16, device=weight.values.device)
    found.utils.layout.set_mk_alignment_for_contiguous_layout(tile)
    found.m_grouped_fp8_fp4_gemm_nt_contiguous(
        tuple(rows),
        (weight.values, weight.scales),
        out,
        placed.ends,
        use_psum_layout=True,
        expected_m_for_psum_layout=expected,
    )
    return out
