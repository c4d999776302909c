"""A device that runs the CUDA kernels' own sources on a CPU (cuda.hpp), behind the launchers of kernels/cuda.

    with Device().installed() as device:
        device.adopt(state)     # on the CPU; from here on every kernel of that state is the emulated one
        begin_step(state, ...)

The compiler is g++ or $CXX. Libraries are kept by their content (tests.support.kept_kernels). Of kernels on tensor
cores attend_rows, prompt_index and Hopper's index_scores of fp8 and fp4 keys are emulated; Triton kernels are not.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Final
from unittest import mock

from kernels.cuda import launch, quantize
from kernels.cuda.jit import SOURCE_DIR, Compiled, Defines, included
from kernels.state import DeviceState
from protocol.errors import InternalError
from tests.support.kept_kernels import digest, folder, kept, sources_key

COMPILER: Final = shutil.which(os.environ.get("CXX", "g++"))
HERE: Final = Path(__file__).parent
SHARED: Final = re.compile(
    r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];"
)  # dynamic: of the block that runs
FLAGS: Final = ("-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", "-w")
#: The header that every unit includes first.
COMMON: Final = "cuda.hpp"
SAID_BYTES: Final = 200
PROCESSORS: Final = 2

Edit = tuple[str, str]  # of a source: what is there once, and what comes in its place

SOURCE: Final = """
extern "C" bool emulate_{kernel}(const void* p, unsigned x, unsigned y, unsigned threads, unsigned cluster,
                                 unsigned shared_bytes, unsigned seed, char* said, int room) {{
    const std::string wrong = emulated::run({kernel}, p, {{x, y, 1}}, threads, cluster, shared_bytes, seed);
    std::snprintf(said, static_cast<std::size_t>(room), "%s", wrong.c_str());
    return wrong.empty();
}}
"""
UNITS: Final = (
    *launch.KERNELS,
    ("swap_in", "swap_in"),
    ("index_select", "index_select"),
    ("index_hopper", "index_scores"),
    ("prompt_index", "prompt_index"),
    ("prompt_merge", "prompt_merge"),
    ("attend_rows", "attend_rows"),
    ("encode", "encode_fp4"),
    *((quantize.UNIT, kernel) for kernel in quantize.KERNELS),
)


@lru_cache
def library(unit: str, defines: Defines, edits: tuple[Edit, ...] = ()) -> ctypes.CDLL:
    """Headers of the kernels and of this folder, compiled together. InternalError with the compiler's words if not."""
    sources = sources_of(unit, edits)
    flags = [*FLAGS, *(f"-D{key}={value}" for key, value in defines)]
    key = digest(compiler_version(), *FLAGS, *sources_key(sources, defines))
    built = kept(f"{unit}-emulated", key, partial(build, unit, sources, flags))
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(built.cubin)
        file.flush()
        return ctypes.CDLL(file.name)


def sources_of(unit: str, edits: tuple[Edit, ...] = (), source: str = "") -> dict[str, str]:
    """All that is compiled, by the name of its file: `source` or one with all kernels of `unit`, and its headers."""
    sources = {}
    for header in sorted(SOURCE_DIR.glob("*.cuh")):
        text = header.read_text()
        for old, new in edits if header.stem == unit else ():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        sources[header.name] = SHARED.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulated::self->block->shared);", text)
    sources |= {own.name: own.read_text() for own in (HERE / COMMON, *sorted(HERE.glob("*.cuh")))}
    entries = [SOURCE.format(kernel=kernel) for of, kernel in UNITS if of == unit]
    source = source or "".join([f'#include "{COMMON}"\n#include "{unit}.cuh"\n', *entries])
    return included(source, sources) | {"unit.cpp": source}


def build(unit: str, sources: dict[str, str], flags: list[str]) -> Compiled:
    """A shared library."""
    with tempfile.TemporaryDirectory() as name:
        for file, text in sources.items():
            (Path(name) / file).write_text(text)
        if COMMON in sources:
            (Path(name) / f"{COMMON}.gch").symlink_to(precompiled(sources[COMMON]))
        command = [str(COMPILER), *flags, "unit.cpp", "-o", "unit.so"]
        done = subprocess.run(command, cwd=name, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InternalError(done.stderr, field="unit", value=unit)
        return Compiled((Path(name) / "unit.so").read_bytes(), ())


@lru_cache
def precompiled(text: str) -> Path:
    """COMMON as the compiler keeps what it has read: half of what a unit costs, since COMMON names much of the standard
    library. A compiler that cannot use the file reads COMMON itself."""
    place = folder() / f"{COMMON}-{digest(compiler_version(), *FLAGS, text)}.gch"
    with (folder() / f"{COMMON}.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder()) as name:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            (Path(name) / COMMON).write_text(text)
            flags = [flag for flag in FLAGS if flag != "-shared"]
            subprocess.run([str(COMPILER), *flags, "-x", "c++-header", COMMON, "-o", "made"], cwd=name, check=True)
            (Path(name) / "made").replace(place)
    return place


@lru_cache
def compiler_version() -> str:
    """Return the version that the compiler prints; it stands for the compiler in keys."""
    assert COMPILER, "needs g++"
    return subprocess.run([COMPILER, "-v"], capture_output=True, text=True, check=True).stderr


class Emulated:
    """What kernels.cuda.jit.Kernel is, but for streams: a launch has ended when it returns."""

    def __init__(self, unit: str, kernel: str, defines: Defines, device: Device) -> None:
        self.name, self._device = kernel, device
        self._threads = threads_of(kernel, dict(defines))
        built = library(unit, defines, device.edits if unit == "swap_in" else ())
        self._emulate = getattr(built, f"emulate_{kernel}")
        self._emulate.restype = ctypes.c_bool

    def launch(
        self,
        grid: tuple[int, int],
        parameters: ctypes.Structure,
        stream: int,
        *,
        threads: int = 0,
        cluster: int = 1,
        shared_bytes: int = 0,
        early: bool = False,
    ) -> None:
        """Raises AssertionError with what the emulation found wrong."""
        said = ctypes.create_string_buffer(SAID_BYTES)
        self._device.launches += 1
        seed = hash((self._device.seed, self._device.launches)) & 0xFFFF_FFFF
        numbers = (*grid, threads or self._threads, cluster, shared_bytes, seed)
        fine = self._emulate(ctypes.byref(parameters), *numbers, said, SAID_BYTES)
        assert fine, f"{self.name}: {said.value.decode()}"

    def allow_all(self, clusters: bool) -> None:
        """Nothing to allow."""

    def clusters_at_once(self, cluster: int, shared_bytes: int) -> int:
        return self._device.at_once if cluster <= self._device.largest else 0


#: Launch bounds, where the launcher names no number.
THREADS: Final = {
    **{"swap_in": 768, "prompt_index": 640, "prompt_merge": 1024, "attend_rows": 512},
    **{"index_scores": 544, "index_select": 512},
}


def threads_of(kernel: str, defines: dict[str, int]) -> int:
    """Return the threads of a block, the launch bound of the kernel's source."""
    few = kernel == "attend_rows" and defines["HEADS"] == 128  # fewer warps gather
    return THREADS.get(kernel, 0) - 128 * few


class Device:
    """`at_once` clusters, of `largest` blocks at most, have room; `edits` of swap_in.cuh; launches differ by `seed`."""

    def __init__(self, seed: int = 0, at_once: int = 100, largest: int = 16, edits: tuple[Edit, ...] = ()) -> None:
        self.seed, self.at_once, self.largest, self.edits = seed, at_once, largest, edits
        self.launches = 0
        self.states: list[DeviceState] = []

    def adopt(self, state: DeviceState) -> None:
        """From here on `state`, on the CPU, is run by the emulated kernels."""
        self.states.append(state)

    def load(self, unit: str, kernel: str, defines: Defines, device: int) -> Emulated:
        return Emulated(unit, kernel, defines, self)

    def runs(self, state: DeviceState) -> bool:
        return any(state is ours for ours in self.states)

    @contextmanager
    def installed(self) -> Iterator[Device]:
        """In here launchers and public functions know of this device."""
        with ExitStack() as stack:
            for name, ours in (
                ("load", self.load),
                ("runs_on_cuda", self.runs),
                ("has_clusters", lambda state: True),
                ("stream_of", lambda state: 0),
                ("processors", lambda device: PROCESSORS),
            ):
                for path, module in list(sys.modules.items()):
                    if path.startswith("kernels.") and callable(vars(module).get(name)):
                        stack.enter_context(mock.patch.object(module, name, ours))
            yield self
