"""Products with block-FP8 weights on Hopper: launches src/block_linear.cuh by a plan of block_plans.py.

Every launch begins early: it fetches the first weights while the kernel ahead is at work, and reads the activations
once that has ended. So the kernel just ahead must not write the weight or its scales, nor the experts of tiles.

Flags of ranges are zero between launches. Launches that may run at once must not share them: there is one set for each
stream, and one for each stream of a capture, which the captured graph zeroes itself when it begins to use them. A graph
may be replayed on any stream, as often as wanted; CUDA lets no graph run beside itself. A launch that was cut short
leaves flags behind, but its context is lost with it, and with that all memory of the process on that device.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from math import inf
from typing import Any, Final

import torch
from torch import Tensor

from kernels.block_weight import BlockFp8
from kernels.cuda.block_plans import BLOCK, COPY_BYTES, DENSE, GATED, GROUPED, TILE_EXPERT_BYTES, LinearPlan, work_of
from kernels.cuda.jit import Kernel, capture_id, load
from kernels.cuda.structures import BlockLinear, TensorMap
from protocol.errors import InternalError

TEAMS_MAX: Final = 4
MAPS_MAX: Final = 4096  # a few thousand weights and the buffers of captured graphs
#: CUtensorMapDataType, -Swizzle, -L2promotion
UINT8, BFLOAT16 = 0, 9
SWIZZLE_128, PROMOTE_256 = 3, 3


def takes(weight: BlockFp8) -> bool:
    """Whether the card is a Hopper, and the weight lies where its copies can begin. Shapes: block_plans.fits."""
    values = weight.values
    return _is_hopper(values.device) and values.data_ptr() % COPY_BYTES == 0


def linear(hidden: Tensor, weight: BlockFp8, plan: LinearPlan) -> Tensor:
    """hidden bfloat16[tokens, K] @ decoded weight [N, K].T: bfloat16[tokens, N], of one token or more."""
    (tokens, k), n, device = hidden.shape, len(weight.values), hidden.device
    if hidden.data_ptr() % COPY_BYTES:
        hidden = hidden.clone()
    work = work_of(n, k, tokens, plan, _multiprocessors(device))
    out = torch.empty(tokens, n, dtype=torch.bfloat16, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    partial = flags = None
    if work.splits_tiles:
        partial = torch.empty(work.ranges * plan.cluster * plan.rows * plan.tokens, dtype=torch.float32, device=device)
        flags = _flags(device, stream)
    parameters = BlockLinear(
        codes=_codes_map(weight.values.data_ptr(), n, k, plan.rows),
        hidden=_hidden_map(hidden.data_ptr(), tokens, k, plan.tokens),
        scales=weight.scales.data_ptr(),
        other_scales=weight.scales.data_ptr(),
        out=out.data_ptr(),
        partial=None if partial is None else partial.data_ptr(),
        flags=None if flags is None else flags.data_ptr(),
        tokens=tokens,
        n=n,
        blocks=work.blocks,
        units=work.units,
        token_tiles=work.token_tiles,
    )
    kernel = _kernel(plan._replace(least=0), DENSE, device.index)
    grid = work.ranges * plan.cluster, 1
    kernel.launch(grid, parameters, stream, cluster=plan.cluster, shared_bytes=plan.shared_bytes, early=True)
    return out


def grouped(
    rows: Tensor,
    weight: BlockFp8,
    other: BlockFp8 | None,
    tile_expert: Tensor,
    slots: Tensor,
    out: Tensor,
    plan: LinearPlan,
    limit: float = inf,
) -> None:
    """Products of `rows` bfloat16[tiles * plan.tokens, K], a tile of them by the expert that `tile_expert` names.

    With `other`: out[row] = silu(weight row) * other row, bfloat16[tiles * plan.tokens, n], both products cut to
    `limit`, the first from above. Without: rows of `out` are those that `slots` int32[tiles, plan.tokens] names; -1:
    none.
    """
    (held, n, k), device, tiles = weight.values.shape, out.device, len(tile_expert)
    stream = torch.cuda.current_stream(device).cuda_stream
    form = GROUPED if other is None else GATED
    ranges = _multiprocessors(device) * plan.resident // plan.cluster
    if other is None:
        codes = others = _codes_map(weight.values.data_ptr(), held * n, k, plan.rows)
    else:
        codes, others = (_half_map(one.values.data_ptr(), held * n, k, plan.rows // 2) for one in (weight, other))
    tile_rows = plan.rows * plan.cluster // (1 if other is None else 2)
    parameters = BlockLinear(
        codes=codes,
        others=others,
        hidden=_hidden_map(rows.data_ptr(), len(rows), k, plan.tokens),
        scales=weight.scales.data_ptr(),
        other_scales=(other or weight).scales.data_ptr(),
        out=out.data_ptr(),
        tile_expert=tile_expert.data_ptr(),
        slots=slots.data_ptr(),
        tokens=len(rows),
        n=n,
        blocks=-(-k // BLOCK),
        row_tiles=-(-n // tile_rows),
        jobs_max=tiles,
        limit=limit,
    )
    kernel = _kernel(plan._replace(least=0), form, device.index)
    kernel.launch(
        (ranges * plan.cluster, 1),
        parameters,
        stream,
        cluster=plan.cluster,
        shared_bytes=plan.shared_bytes + TILE_EXPERT_BYTES * tiles,
        early=True,
    )


#: By device, stream and whether it captured: the capture's number, and its flags.
_flags_of: dict[tuple[torch.device, int, bool], tuple[int, Tensor]] = {}


def _flags(device: torch.device, stream: int) -> Tensor:
    """int32 zeros for launches on `stream`: during a capture, memory and a node of its graph."""
    capture = capture_id(stream) if torch.cuda.is_current_stream_capturing() else 0
    key = (device, stream, capture != 0)
    held = _flags_of.get(key)
    if held is None or held[0] != capture:
        zeros = torch.zeros(TEAMS_MAX * _multiprocessors(device), dtype=torch.int32, device=device)
        held = _flags_of[key] = capture, zeros
    return held[1]


@lru_cache(maxsize=64)
def _kernel(plan: LinearPlan, form: int, device: int) -> Kernel:
    kernel = load("block_linear", "block_linear", plan.defines(form), device)
    kernel.allow_all(clusters=False)
    return kernel


@lru_cache(maxsize=8)
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=MAPS_MAX)
def _codes_map(address: int, n: int, k: int, rows: int) -> TensorMap:
    """Codes as [pair of rows, row of it, K]: a box is 128 of K and every second row of a tile."""
    return _tensor_map(UINT8, address, (k, 2, n // 2), (k, 2 * k), (BLOCK, 1, rows // 2))


@lru_cache(maxsize=MAPS_MAX)
def _half_map(address: int, n: int, k: int, rows: int) -> TensorMap:
    """Codes as [row, 1, K]: a box is 128 of K and as many rows of a tile as one of two weights has."""
    return _tensor_map(UINT8, address, (k, 1, n), (k, k), (BLOCK, 1, rows))


@lru_cache(maxsize=MAPS_MAX)
def _hidden_map(address: int, tokens: int, k: int, box: int) -> TensorMap:
    """Activations: a box is half a block of K and a tile of tokens."""
    return _tensor_map(BFLOAT16, address, (k, tokens), (2 * k,), (BLOCK // 2, box))


def _tensor_map(
    dtype: int, address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> TensorMap:
    """Swizzled by 128 bytes; boxes are filled with zeros beyond the tensor. `strides`: bytes, of all sizes but the
    first.

    Called through ctypes, since kernels take the 128 bytes and cuda.bindings gives an object.
    """
    rank = len(sizes)
    encoded = (ctypes.c_uint64 * 32)()
    place = (ctypes.addressof(encoded) + 63) & ~63  # the driver wants it aligned
    status = _driver_library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        ctypes.c_int(dtype),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(0),  # not interleaved
        ctypes.c_int(SWIZZLE_128),
        ctypes.c_int(PROMOTE_256),
        ctypes.c_int(0),  # zeros outside
    )
    if status:
        raise InternalError(f"cuTensorMapEncodeTiled: {status} for {sizes}, {strides}, {box}", field="cuda")
    return TensorMap.from_buffer_copy(ctypes.string_at(place, ctypes.sizeof(TensorMap)))


@lru_cache(maxsize=1)
def _driver_library() -> Any:
    return ctypes.CDLL("libcuda.so.1")
