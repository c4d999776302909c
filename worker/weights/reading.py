"""Reads tensors of shards into memory of the device, several pieces at once.

    shard ──preadv──► staging buffer of a thread ──convert or decode──► rows of the destination

A *piece* is at most PIECE_BYTES of whole rows, for FP8 of whole blocks of rows. Each of READERS_MAX threads has one
staging buffer, pinned where the device is a GPU, and decoding a piece takes a bounded multiple of it: beyond the
destinations host memory stays below STAGING_BYTES_MAX. A piece whose stored dtype is the destination's, on the host, is
read into its place.

A failed read ends the others and leaves destinations half filled; the caller drops them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from kernels.block_fp8 import decode_blocks
from kernels.block_weight import BLOCK, BlockFp8
from protocol.errors import ConfigError
from worker.weights.safetensors_header import ELEMENT_BYTES, FIELD
from worker.weights.shards import Shards

PIECE_BYTES: Final = 16 * 1024 * 1024
READERS_MAX: Final = 8
#: Of temporaries for each value that is decoded at a time, at most a piece: index, decoded value, scaled value.
DECODED_BYTES: Final = 3 * 4
#: Bytes on the host beyond the destinations.
STAGING_BYTES_MAX: Final = 1 << 31
assert READERS_MAX * PIECE_BYTES * (1 + DECODED_BYTES) <= STAGING_BYTES_MAX

DTYPES: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}

#: Called with bytes read so far, by any thread, one at a time.
Progress = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class Read:
    """Fill `destination`, contiguous and of the tensor's shape, from tensor `name`.

    Values are converted to the destination's dtype. With `scales` float32 on the host they are FP8 and are decoded.
    """

    name: str
    destination: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _ReadPiece:
    read: Read
    first_row: int
    rows: int


def read_scales(shards: Shards, name: str) -> Tensor:
    """Scales of tensor `name` as float32 on the host. Raises ConfigError when one is not a positive number."""
    located = shards.tensors[name].tensor
    stored = torch.empty(located.shape, dtype=DTYPES[located.dtype])
    shards.read_into(name, 0, _bytes_of(stored))
    scales = stored.float()
    if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
        raise ConfigError(
            f"{name} has a scale that is negative or no number",
            field=FIELD,
            value=shards.where(name),
            remedy="download it again",
        )
    return scales


def read_all(shards: Shards, reads: Iterable[Read], progress: Progress | None = None) -> None:
    """Carry out all `reads`. Raises ConfigError when a shard ends early. Not cancellable."""
    pieces = [piece for read in reads for piece in _pieces(shards, read)]
    devices = {piece.read.destination.device for piece in pieces}
    readers = min(READERS_MAX, os.cpu_count() or 1, max(1, len(pieces)))
    run = _Run(shards, pinned=any(device.type == "cuda" for device in devices), progress=progress)
    with ThreadPoolExecutor(readers, "weights") as pool:
        queue = iter(pieces)
        futures = [pool.submit(run.read_pieces, queue) for _ in range(readers)]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        run.stopped = any(future.exception() for future in done)
    for future in futures:
        future.result()


class _Run:
    """What the threads of one `read_all` share."""

    def __init__(self, shards: Shards, *, pinned: bool, progress: Progress | None) -> None:
        self._shards, self._pinned, self._progress = shards, pinned, progress
        self._lock = threading.Lock()
        self._read_bytes = 0
        self.stopped = False

    def read_pieces(self, queue: Iterable[_ReadPiece]) -> None:
        staging = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._pinned)
        pieces = iter(queue)
        while not self.stopped:
            with self._lock:
                piece = next(pieces, None)
            if piece is None:
                return
            self._count(self._read(piece, staging))

    def _read(self, piece: _ReadPiece, staging: Tensor) -> int:
        tensor = self._shards.tensors[piece.read.name].tensor
        destination = _rows_of(piece.read.destination, piece)
        stored, row_bytes = DTYPES[tensor.dtype], _row_bytes(tensor.shape, tensor.dtype)
        size = piece.rows * row_bytes
        if destination.device.type == "cpu" and destination.dtype == stored:
            self._shards.read_into(piece.read.name, piece.first_row * row_bytes, _bytes_of(destination))
            return size
        buffer = staging if size <= PIECE_BYTES else torch.empty(size, dtype=torch.uint8)
        self._shards.read_into(piece.read.name, piece.first_row * row_bytes, _bytes_of(buffer[:size]))
        values = buffer[:size].view(stored).view(destination.shape)
        if piece.read.scales is None:
            destination.copy_(values)
        else:
            blocks = slice(piece.first_row // BLOCK, -(-(piece.first_row + piece.rows) // BLOCK))
            weight = BlockFp8(values.to(destination.device), piece.read.scales[blocks].to(destination.device))
            decode_blocks(weight, destination.dtype, out=destination)
        if destination.is_cuda:
            torch.cuda.current_stream(destination.device).synchronize()
        return size

    def _count(self, size: int) -> None:
        with self._lock:
            self._read_bytes += size
            if self._progress is not None:
                self._progress(self._read_bytes)


class LoadProgress:
    """A `Progress` that calls `say` with bytes read and bytes per second, every `interval_s` seconds."""

    def __init__(self, say: Callable[[int, float], None], interval_s: float) -> None:
        self._say, self._interval_s = say, interval_s
        self._began = self._said = time.monotonic()

    def __call__(self, read_bytes: int) -> None:
        now = time.monotonic()
        if now - self._said >= self._interval_s:
            self._said = now
            self._say(read_bytes, read_bytes / (now - self._began))


def _pieces(shards: Shards, read: Read) -> Iterable[_ReadPiece]:
    tensor = shards.tensors[read.name].tensor
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    at_once = max(1, PIECE_BYTES // max(1, _row_bytes(tensor.shape, tensor.dtype)))
    if read.scales is not None:
        at_once = max(BLOCK, at_once // BLOCK * BLOCK)
    return [_ReadPiece(read, first, min(at_once, rows - first)) for first in range(0, rows, at_once)]


def _row_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return ELEMENT_BYTES[dtype] * prod(shape[1:] if len(shape) > 1 else shape)


def _rows_of(tensor: Tensor, piece: _ReadPiece) -> Tensor:
    return tensor[piece.first_row : piece.first_row + piece.rows] if tensor.dim() > 1 else tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(torch.uint8).reshape(-1).numpy()  # shares the tensor's memory
    return memoryview(array)
