"""Gated norms of sums on a GPU, and quantized where rows travel. Twins on a CPU: tests/worker/families/test_axk2.py."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernels.block_weight import E4M3  # noqa: E402
from kernels.cuda import quantize  # noqa: E402
from kernels.routing import exchanged_rows  # noqa: E402
from tests.worker.families.test_axk2 import check_gated_norm, gated_norm  # noqa: E402
from worker.families.axk2 import AXK2  # noqa: E402
from worker.runners.attention import join_normed  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 64])
def test_a_gated_norm_of_a_sum(rows: int, dtype: torch.dtype) -> None:
    check_gated_norm(rows, "cuda", dtype)


@pytest.mark.parametrize("powers", [False, True])
def test_a_gated_norm_is_quantized_where_rows_travel(powers: bool) -> None:
    size, norm = 7168, gated_norm(7168, torch.bfloat16, "cuda")
    hidden, parts = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((5, 1, size), (1, 5, size)))
    packed = torch.full((7, 7456), 7, dtype=torch.uint8, device="cuda")
    own = exchanged_rows(packed, size, E4M3, 8)
    assert own.scales is not None
    also = quantize.Codes(own.hidden[:5], own.scales[:5], powers)
    _, found = join_normed(norm, hidden, parts, also=also, family=AXK2)
    assert found is not None
    wanted = quantize.quantize(found.values.view(5, size), powers=powers)
    assert torch.equal(also.values.view(torch.uint8), wanted.values.view(torch.uint8))
    assert torch.equal(also.scales, wanted.scales)
    assert packed[5:].eq(7).all()
