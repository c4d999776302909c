"""Dense products with block-FP8 weights on Hopper: launches src/block_linear.cuh."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from kernels.cuda.jit import Defines, Kernel, load

if TYPE_CHECKING:
    from kernels.block_fp8 import BlockFp8

BLOCK: Final = 128
MAP_BYTES: Final = 128
TEAM_ROWS: Final = 64
BARRIER_BYTES: Final = 256


class Plan(NamedTuple):
    """Of a block of threads: `tokens` columns, `teams` x `tiles` x 64 rows of weights, K cut among `slices` teams."""

    tokens: int
    teams: int
    slices: int
    tiles: int
    stages: int
    chunk: int = 0  # 0: the kernel's choice

    @property
    def rows(self) -> int:
        return self.teams * self.tiles * TEAM_ROWS

    @property
    def defines(self) -> Defines:
        named = {"WGMMA": 1, "TOKENS": self.tokens, "TEAMS": self.teams, "SLICES": self.slices, "TILES": self.tiles}
        named |= {"STAGES": self.stages} | ({"CHUNK": self.chunk} if self.chunk else {})
        return tuple(named.items())

    @property
    def shared_bytes(self) -> int:
        stage = self.rows * BLOCK + 2 * self.tokens * BLOCK
        return 1024 + self.stages * stage + (self.slices - 1) * self.rows * self.tokens * 4 + BARRIER_BYTES


class Parameters(ctypes.Structure):
    _fields_: ClassVar = [
        ("codes", ctypes.c_ubyte * MAP_BYTES),
        ("hidden", ctypes.c_ubyte * MAP_BYTES),
        ("scales", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
        ("tokens", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("units", ctypes.c_int32),
        ("token_tiles", ctypes.c_int32),
        ("overlap", ctypes.c_int32),
        ("unused", ctypes.c_int64),
    ]


def takes(weight: BlockFp8) -> bool:
    n, k = weight.values.shape
    return n % 2 == 0 and k % 16 == 0


def linear(
    hidden: Tensor, weight: BlockFp8, plan: Plan, least: int = 2, early: bool = False, ranges_most: int = 0
) -> Tensor:
    (tokens, k), n = hidden.shape, len(weight.values)
    device = hidden.device
    out = torch.empty(tokens, n, dtype=torch.bfloat16, device=device)
    blocks, token_tiles = -(-k // BLOCK), -(-tokens // plan.tokens)
    units = -(-n // plan.rows) * token_tiles * blocks
    ranges = min(ranges_most or _multiprocessors(device), -(-units // least))
    partial = None
    if units % ranges or (units // ranges) % blocks:
        partial = torch.empty(ranges * plan.rows * plan.tokens, dtype=torch.float32, device=device)
    kernel = _kernel(plan, device.index or 0)
    parameters = Parameters(
        codes=_codes_map(weight.values.data_ptr(), n, k, plan.rows),
        hidden=_hidden_map(hidden.data_ptr(), tokens, k, plan.tokens),
        scales=weight.scales.data_ptr(),
        out=out.data_ptr(),
        partial=None if partial is None else partial.data_ptr(),
        flags=_flags(device).data_ptr(),
        tokens=tokens,
        n=n,
        blocks=blocks,
        units=units,
        token_tiles=token_tiles,
        overlap=int(early),
    )
    stream = torch.cuda.current_stream(device).cuda_stream
    kernel.launch((ranges, 1), parameters, stream, shared_bytes=plan.shared_bytes, early=early)
    return out


@lru_cache(maxsize=8)
def _flags(device: torch.device) -> Tensor:
    return torch.zeros(4 * _multiprocessors(device), dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def _kernel(plan: Plan, device: int) -> Kernel:
    kernel = load("block_linear", "block_linear", plan.defines, device)
    kernel.allow_all(clusters=False)
    return kernel


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=4096)
def _codes_map(address: int, n: int, k: int, rows: int) -> Any:
    """Codes as [pair of rows, row of it, K]: a box is 128 of K and every second row of a tile."""
    return _tensor_map(0, address, (k, 2, n // 2), (k, 2 * k), (BLOCK, 1, rows // 2))


@lru_cache(maxsize=4096)
def _hidden_map(address: int, tokens: int, k: int, box: int) -> Any:
    return _tensor_map(9, address, (k, tokens), (2 * k,), (BLOCK // 2, box))


def _tensor_map(
    dtype: int, address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> Any:
    """A CUtensorMap, swizzled by 128 bytes, whose boxes are filled with zeros beyond the tensor."""
    encoded = (ctypes.c_uint64 * 32)()
    place = (ctypes.addressof(encoded) + 63) & ~63
    rank = len(sizes)
    status = _driver_library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        ctypes.c_int(dtype),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(0),  # no interleaving
        ctypes.c_int(3),  # swizzle 128B
        ctypes.c_int(3),  # L2 promotion 256B
        ctypes.c_int(0),  # zeros outside
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled: {status} for {sizes} {strides} {box}")
    return (ctypes.c_ubyte * MAP_BYTES).from_buffer_copy(ctypes.string_at(place, MAP_BYTES))


@lru_cache(maxsize=1)
def _driver_library() -> Any:
    return ctypes.CDLL("libcuda.so.1")
