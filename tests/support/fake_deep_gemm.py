"""A fake of the package deep_gemm on a CPU: its products in float32, and what it demands of shapes and strides.

Rows that the package leaves alone, or fills with what no one asked for, hold no numbers here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 128
Pair = tuple[Tensor, Tensor]


class FakeDeepGemm:
    """`calls` names each product; `fails` is raised by the next one."""

    __version__ = "0.0"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: Exception | None = None
        self.tile = BLOCK
        self.utils = SimpleNamespace(
            layout=SimpleNamespace(set_mk_alignment_for_contiguous_layout=lambda rows: setattr(self, "tile", rows))
        )

    def set_pdl(self, enabled: bool) -> None:
        """Change nothing: a product has ended when it returns."""

    def fp8_gemm_nt(self, a: Pair, b: Pair, d: Tensor, *, compiled_dims: str = "nk") -> None:
        self._begin("dense")
        d.copy_(dequantized(*a) @ decoded(*b).T)

    def m_grouped_fp8_fp4_gemm_nt_contiguous(
        self,
        a: Pair,
        b: Pair,
        d: Tensor,
        grouped_layout: Tensor,
        *,
        compiled_dims: str = "nk",
        use_psum_layout: bool,
        expected_m_for_psum_layout: int,
    ) -> None:
        self._begin("contiguous")
        assert use_psum_layout
        assert expected_m_for_psum_layout > 0
        rows, begin = dequantized(*a), 0
        d.fill_(torch.nan)
        for group, end in enumerate(grouped_layout.tolist()):
            begin = -(-begin // self.tile) * self.tile
            assert begin <= end <= len(rows)
            d[begin:end] = rows[begin:end] @ decoded(b[0][group], b[1][group]).T
            begin = end

    def _begin(self, name: str) -> None:
        self.calls.append(name)
        if self.fails is not None:
            raise self.fails


def check_scales(scales: Tensor, rows: int) -> None:
    """Rows of one block adjacent, blocks a multiple of 16 bytes apart."""
    assert scales.dtype == torch.float32
    assert len(scales) == rows
    assert rows == 1 or scales.stride(0) == 1
    assert scales.shape[1] == 1 or scales.stride(1) == -(-rows // 4) * 4


def dequantized(values: Tensor, scales: Tensor) -> Tensor:
    """Rows e4m3[M, K] by scales [M, K / 128], in float32."""
    assert values.dtype == torch.float8_e4m3fn
    assert values.is_contiguous()
    check_scales(scales, len(values))
    return values.float() * scales.repeat_interleave(BLOCK, 1)


def decoded(values: Tensor, scales: Tensor) -> Tensor:
    """Weights e4m3[N, K] by scales of blocks, in float32."""
    n, k = values.shape
    assert n % 8 == 0
    assert scales.is_contiguous()
    assert scales.shape == (-(-n // BLOCK), k // BLOCK)
    return values.float() * scales.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)
