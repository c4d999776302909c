"""encode on CUDA: the contract of kernels/encode.py, one launch on the current stream for rows in fp8."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cuda.triton_units import power_of_two, triton_unit
from kernels.row_format import E4M3_MAX, RowFormat

#: Compute capability that converts to e4m3; below it, torch does.
FP8_SINCE = (8, 9)
WARPS = 4
BY_E4M3_MAX = float(torch.tensor(1.0) / E4M3_MAX)


def encode(form: RowFormat, values: Tensor) -> Tensor:
    """As kernels.encode.encode, of values on a GPU."""
    if form.kind != "fp8" or torch.cuda.get_device_capability(values.device) < FP8_SINCE:
        return form.encode(values)
    values = values.contiguous()
    out = torch.empty(*values.shape[:-1], form.row_bytes, dtype=torch.uint8, device=values.device)
    rows = values.numel() // form.values
    if rows:
        triton_unit("encode_triton").encode[(rows,)](
            values,
            out,
            SCALED=form.scaled,
            PLAIN=form.plain,
            GROUP=form.group,
            ROW_BYTES=form.row_bytes,
            BY_MAX=BY_E4M3_MAX,
            GROUPS_PADDED=power_of_two(form.scaled // form.group),
            GROUP_PADDED=power_of_two(form.group),
            PLAIN_PADDED=power_of_two(max(1, form.plain)),
            num_warps=WARPS,
        )
    return out
