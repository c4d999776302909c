"""Encoding rows and index keys in one launch: the same bytes as torch's, whatever the values."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernels.cuda.encode import MANY_ROWS  # noqa: E402
from kernels.encode import encode, prepare_encode  # noqa: E402
from kernels.row_format import RowFormat, index_key_format, kv_row_format  # noqa: E402

FORMATS = [
    kv_row_format("fp8", 512, 64),
    index_key_format("fp8", 128),
    kv_row_format("fp8", 384, 2),
    kv_row_format("fp8", 64, 16),
    kv_row_format("fp8", 128, 32),
    index_key_format("fp8", 4),
    kv_row_format("bfloat16", 512, 64),
    kv_row_format("fp4", 512, 64),
    kv_row_format("fp4", 128, 32),
    index_key_format("fp4", 128),
]


def plainly(form: RowFormat, values: torch.Tensor) -> torch.Tensor:
    """Rows in fp4 are a CPU's."""
    return form.encode(values.cpu()).cuda() if form.kind == "fp4" else form.encode(values)


def draw(form: RowFormat, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of all magnitudes; rows of zeros, and with zeros, an infinity and a NaN."""
    generator = torch.Generator("cuda").manual_seed(rows)
    values = torch.randn(rows, form.values, generator=generator, device="cuda")
    values *= 10 ** (10 * torch.rand(rows, 1, generator=generator, device="cuda") - 7)
    if rows > 3:
        values[0], values[1, :3], values[2, 1], values[3, 2] = 0.0, 0.0, torch.inf, torch.nan
    return values.to(dtype)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.kind}-{form.scaled}-{form.plain}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bytes_are_those_of_torch(form: RowFormat, dtype: torch.dtype) -> None:
    for rows in (1, 64, 5000, MANY_ROWS + 5):
        values = draw(form, rows, dtype)
        assert torch.equal(encode(form, values), plainly(form, values))
        if rows > MANY_ROWS:
            assert torch.equal(encode(form, values[1:]), plainly(form, values[1:])), "at other addresses"
    wide = draw(form, 6, dtype).unflatten(0, (2, 3)).transpose(0, 1)
    assert torch.equal(encode(form, wide), plainly(form, wide))
    assert encode(form, values[:0]).shape == (0, form.row_bytes)


def test_encoding_can_be_captured_once_prepared() -> None:
    form, values = FORMATS[0], draw(FORMATS[0], 7, torch.bfloat16)
    prepare_encode(form, torch.bfloat16, values.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = encode(form, values[1:])
    values.neg_()
    graph.replay()
    assert torch.equal(out, form.encode(values[1:]))
