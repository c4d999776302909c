"""Drawing tokens on CUDA, in Triton (sampling_triton.py), on the current stream. Never waits; may be captured."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.cuda.triton_units import triton_unit

#: Tokens that a program looks at together, and its warps.
BLOCK: Final = 4096
WARPS: Final = 16


def draw_tokens(logits: Tensor, temperature: Tensor, top_p: Tensor, uniforms: Tensor, tokens: Tensor) -> None:
    """Replace `tokens` int32[B] where temperature > 0, as worker/runners/sampling.py says.

    logits float32[B, vocab], temperature and top_p float32[B], uniforms float64[B], all contiguous. Where sums of
    float64 round otherwise than the definition's, a draw within 1e-13 of a border may fall on its other side.
    """
    rows, vocab = logits.shape
    weights = torch.empty(rows, vocab, dtype=torch.float64, device=logits.device)
    block = min(BLOCK, 1 << (vocab - 1).bit_length())
    draw = triton_unit("sampling_triton").draw
    draw[rows,](logits, temperature, top_p, uniforms, weights, tokens, vocab, BLOCK=block, num_warps=WARPS)
