"""A Twin whose second state is on the CPU, too: its swap_in is the CUDA kernel's own source, emulated (cuda.hpp).

The compiler is g++ or $CXX. A library is built once in a process for each row layout and number of blocks.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch

from kernels.cuda.jit import SOURCE_DIR, Defines, row_defines
from kernels.cuda.swap_in import block_of
from kernels.layout import OPENED_CHUNKS, OPENED_PAGES, pages_for
from kernels.state import MissPlan, StepBatch, active_rows
from tests.gpu.twin import Twin

COMPILER: Final = shutil.which(os.environ.get("CXX", "g++"))
HERE: Final = Path(__file__).parent
Edit = tuple[str, str]  # of swap_in.cuh: what is there once, and what comes in its place
SHARED: Final = ("extern __shared__ uint4 dynamic[];", "void* const dynamic = emulated::self->block->shared;")
SAID_BYTES: Final = 200


@lru_cache
def library(defines: Defines, edits: tuple[Edit, ...] = ()) -> ctypes.CDLL:
    """Headers of the kernel and of this folder, compiled together. AssertionError with the compiler's words if not."""
    assert COMPILER, "needs g++"
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for header in SOURCE_DIR.glob("*.cuh"):
            text = header.read_text()
            for old, new in (SHARED, *edits) if header.name == "swap_in.cuh" else ():
                assert text.count(old) == 1, old
                text = text.replace(old, new)
            (place / header.name).write_text(text)
        for own in ("cuda.hpp", "ptx.cuh", "swap_in.cpp"):
            shutil.copy(HERE / own, place / own)
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", *(f"-D{key}={value}" for key, value in defines)]
        command = [COMPILER, *flags, "swap_in.cpp", "-o", "swap_in.so"]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        built = ctypes.CDLL(str(place / "swap_in.so"))
        built.emulate.restype = ctypes.c_bool  # else bits that the function left undefined count as true
        return built


class EmulatedTwin(Twin):
    """`clusters` more than rows: so many of blocks that keep lists."""

    device = "cpu"
    edits: tuple[Edit, ...] = ()

    def pinned(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def prepare(self) -> None:
        assert self.ranks is not None, "the launcher's choice asks a device"
        row = row_defines(self.geometry, self.gpu.host.data_ptr())
        self.library = library((*row, ("RANKS", self.ranks)), self.edits)

    def launch(self, group: int, topk: torch.Tensor, batch: StepBatch, out_rows: torch.Tensor, plan: MissPlan) -> None:
        assert self.ranks is not None
        keeping = -(-self.size // self.ranks) if self.keepers else 0
        block = block_of(self.gpu, group, topk, batch, out_rows, plan, self.ranks, keepers=keeping > 0)
        said = ctypes.create_string_buffer(SAID_BYTES)
        clusters = len(topk) + keeping
        fine = self.library.emulate(
            ctypes.byref(block), self.ranks, clusters, self.random.getrandbits(32), said, SAID_BYTES
        )
        assert fine, said.value.decode()

    def leave_opened(self, batch: StepBatch) -> None:
        state, active = self.gpu, active_rows(self.gpu, batch)
        for row, words in enumerate(batch.opened):
            words.fill_(-1)
            if not active[row]:
                continue
            head, pages, chunks = words.split([4, OPENED_PAGES, OPENED_CHUNKS])
            seat, length = int(batch.seats[row]), int(batch.lengths[row])
            head.copy_(torch.tensor([seat, length, int(state.hot_slots[seat]), int(state.now[seat])]))
            held = min(pages_for(length), OPENED_PAGES)
            pages[:held] = state.index_table[seat, :held]
            width = min(state.chunk_table.shape[1], OPENED_CHUNKS)
            chunks[:width] = state.chunk_table[seat, :width]
