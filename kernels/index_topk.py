"""index_topk: the lightning indexer's scores over paged keys, and an exact top-k.

    score[t] = sum_h weights[h] * relu(queries[h] . key[t] * scale)        in float32, t in 0..length-1

Keys are in the dtype of the queries, or in fp8 or fp4 with scales (kernels/row_format.py); products accumulate in
float32, float32 keys are multiplied as such, and heads are summed in an order that never changes. Scores may differ in
the last bits from one backend to another, and by more on Hopper for fp8 and fp4 keys of 128 values and 32 or 64 heads:
bfloat16 queries are multiplied as e4m3 there, scaled by head (kernels/cuda/src/index_hopper.cuh), and of a key in fp4
those groups are zeros whose scale is less than 2**-11 of its largest (kernels/cuda/src/fp4_keys.cuh). The selection is
exact for the scores that a backend computed: the k highest, ties to the lowest position, NaN below everything, both
zeros equal, ascending by position, -1 padded. A row's result depends neither on its neighbours nor on its place in the
batch.

A draft row selects among positions below its own length, like any row: itself and what comes before it. Keys of later
rows of the step, and of rows that were rejected, lie at or beyond that length.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.backend import backend
from kernels.check import Sizes, check_number
from kernels.row_bytes import FP4_KEY_GROUP
from kernels.row_format import RowFormat
from kernels.state import DeviceState, StepBatch
from protocol.errors import BadInput
from protocol.units import TOPK_MAX

QUERY_DTYPES: Final = (torch.float32, torch.bfloat16)


def index_topk(
    state: DeviceState,
    group: int,
    queries: Tensor,
    weights: Tensor,
    batch: StepBatch,
    scale: float,
    topk_out: Tensor,
) -> None:
    """Top-k positions of each real row into `topk_out` int32[B, k]; every entry is written, padding is -1.

    `queries` float32|bfloat16[B, H, D], `weights` float32[B, H], `scale` above 0. Keys of `index_row_bytes`
    D * itemsize are in the queries' dtype, others quantised (kernels/row_format.py). A row whose context is not wholly
    granted gives -1 and counts Tripwire.UNGRANTED. Never waits for the device. Raises BadInput before any change.
    """
    check_number("group", group, state.geometry.groups)
    sizes = Sizes()
    sizes.check("queries", queries, ("batch", "heads", "dim"), *QUERY_DTYPES)
    sizes.check("weights", weights, ("batch", "heads"), torch.float32)
    sizes.check("topk_out", topk_out, ("batch", "k"), torch.int32)
    sizes.check("batch.seats", batch.seats, ("batch",), torch.int32, torch.int64)
    sizes.check("batch.lengths", batch.lengths, ("batch",), torch.int32, torch.int64)
    sizes.check("state.index_keys", state.index_keys[group], ("keys", state.geometry.index_row_bytes), torch.uint8)
    check_number("k", sizes["k"] - 1, TOPK_MAX)
    if not scale > 0:
        raise BadInput("must be above 0", field="scale", value=scale, remedy="pass the indexer's softmax scale")
    keys = index_key_format(state, sizes["dim"], queries.dtype)
    backend(state, __name__).index_topk(state, group, queries, weights, batch, keys, scale, topk_out)


def prepare_index(state: DeviceState, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Get ready for `queries` [B, heads, dim] of `dtype`: compile, load, allocate. At worker start, before any capture.

    Raises BadInput when keys of this state fit no such queries, ConfigError when the kernels cannot be cached.
    """
    backend(state, __name__).prepare_index(state, heads, index_key_format(state, dim, dtype), dtype)


def index_key_format(state: DeviceState, dim: int, dtype: torch.dtype) -> RowFormat:
    """The format of index keys that queries of `dim` values of `dtype` are compared with. Raises BadInput."""
    kind = f"{dtype}".removeprefix("torch.")
    if dtype not in QUERY_DTYPES:
        raise BadInput("no such queries", field="dtype", value=kind, remedy="use float32 or bfloat16")
    forms = [RowFormat(kind, dim, 0, dim), RowFormat("fp8", dim, 0, dim)]
    if dim % FP4_KEY_GROUP == 0:
        forms.append(RowFormat("fp4", dim, 0, FP4_KEY_GROUP))
    for form in forms:
        if form.row_bytes == state.geometry.index_row_bytes:
            return form
    raise BadInput(
        f"index keys of {state.geometry.index_row_bytes} bytes hold {dim} values in no format",
        field="queries",
        value=f"{kind}[..., {dim}]",
        remedy=f"{', '.join(f'{form.row_bytes} bytes ({form.kind})' for form in forms)} fit these queries",
    )
