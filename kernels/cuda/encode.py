"""encode on CUDA: the contract of kernels/encode.py, one launch on the current stream for rows in fp8."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from kernels.cuda.triton_units import launch_options, power_of_two, triton_unit
from kernels.row_format import E4M3_MAX, RowFormat

#: Compute capability that converts to e4m3; below it, torch does.
FP8_SINCE = (8, 9)
WARPS = 4
#: Rows from which on programs encode several: more programs than that wait for each other.
MANY_ROWS = 1 << 14
PROGRAM_VALUES = 2_048
ALIGN_MAX = 16
BY_E4M3_MAX = float(torch.tensor(1.0) / E4M3_MAX)


def encode(form: RowFormat, values: Tensor) -> Tensor:
    """As kernels.encode.encode, of values on a GPU."""
    if form.kind != "fp8" or torch.cuda.get_device_capability(values.device) < FP8_SINCE:
        return form.encode(values)
    values = values.contiguous()
    out = torch.empty(*values.shape[:-1], form.row_bytes, dtype=torch.uint8, device=values.device)
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
