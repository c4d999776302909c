"""encode on CUDA: the contract of kernels/encode.py, one launch on the current stream for rows in fp8 and fp4.

Rows in fp4 have the bytes that a CPU gives them (src/encode.cuh), which torch's own operations on a GPU need not: there
a division by a constant is a product with its inverse.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from kernels.cuda import structures
from kernels.cuda.jit import Defines, load
from kernels.cuda.quantize import stream_of
from kernels.cuda.triton_units import launch_options, power_of_two, triton_unit
from kernels.row_format import E4M3_MAX, RowFormat
from kernels.row_target import RowTarget

#: Compute capability that converts to e4m3; below it, torch does.
FP8_SINCE = (8, 9)
WARPS = 4
#: Rows from which on programs encode several: more programs than that wait for each other.
MANY_ROWS = 1 << 14
PROGRAM_VALUES = 2_048
ALIGN_MAX = 16
#: Values that are not scaled, of a thread of encode_fp4.
PLAIN_EACH = 16
BY_E4M3_MAX = float(torch.tensor(1.0) / E4M3_MAX)


def encode(form: RowFormat, values: Tensor) -> Tensor:
    """As kernels.encode.encode, of values on a GPU."""
    written = form.kind == "fp8" or is_coded(form)
    if not written or torch.cuda.get_device_capability(values.device) < FP8_SINCE:
        return form.encode(values)
    values = values.contiguous()
    out = torch.empty(*values.shape[:-1], form.row_bytes, dtype=torch.uint8, device=values.device)
    if form.kind == "fp4":
        encode_fp4(form, values, RowTarget(out))
        return out
    rows = values.numel() // form.values
    if rows:
        together = max(1, PROGRAM_VALUES // power_of_two(form.values)) if rows >= MANY_ROWS else 1
        # Few rows may be encoded inside of a capture, where nothing can be compiled: one form for all addresses.
        align = gcd(values.data_ptr(), form.values * values.itemsize, ALIGN_MAX) if together > 1 else values.itemsize
        triton_unit("encode_triton").encode[(-(-rows // together),)](
            values,
            out,
            rows,
            SCALED=form.scaled,
            PLAIN=form.plain,
            GROUP=form.group,
            ROW_BYTES=form.row_bytes,
            BY_MAX=BY_E4M3_MAX,
            ROWS=together,
            VALUES_ALIGN=align,
            OUT_ALIGN=gcd(form.row_bytes, ALIGN_MAX),  # torch aligns what it allocates
            GROUPS_PADDED=power_of_two(form.scaled // form.group),
            GROUP_PADDED=power_of_two(form.group),
            PLAIN_PADDED=power_of_two(max(1, form.plain)),
            num_warps=WARPS,
            **launch_options(values.device),
        )
    return out


def is_coded(form: RowFormat) -> bool:
    """Return whether encode_fp4 is written for rows of `form`: whole words of codes, of scales and of plain values."""
    return form.kind == "fp4" and form.scaled // form.group % 4 == 0 and form.plain % PLAIN_EACH == 0


def encode_fp4(form: RowFormat, values: Tensor, target: RowTarget, *, scale: float = 1.0) -> None:
    """Write rows of `values` bfloat16 or float32[..., scaled + plain], contiguous, of which those that are scaled are
    first multiplied by `scale`, a power of two."""
    rows = values.numel() // form.values
    if not rows:
        return
    if values.data_ptr() % ALIGN_MAX:
        values = values.clone()
    block = structures.EncodeRows(
        values=values.data_ptr(),
        out=target.rows.data_ptr(),
        places=None if target.places is None else target.places.data_ptr(),
        n=rows,
        scale=scale,
    )
    parts = form.scaled // form.group + form.plain // PLAIN_EACH
    kernel = load("encode", "encode_fp4", fp4_defines(form, values.itemsize), values.device.index or 0)
    grid = (-(-rows * parts // structures.ENCODE_THREADS), 1)
    kernel.launch(grid, block, stream_of(values.device), threads=structures.ENCODE_THREADS)


def fp4_defines(form: RowFormat, value_bytes: int) -> Defines:
    """Return macros of encode_fp4 for rows of `form`, of values of 2 or 4 bytes."""
    return (("SCALED", form.scaled), ("PLAIN", form.plain), ("GROUP", form.group), ("VALUE_BYTES", value_bytes))
