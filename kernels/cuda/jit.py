"""Compile, key, cache and load the CUDA kernels: at worker start, never in the hot path.

    unit + defines + arch  --NVRTC-->  cubin + resources  --driver-->  functions

NVRTC comes as a pip wheel (cuda-core[cu13]) and compiles without a GPU or headers; a unit takes under a second.
Rejected: nvcc (a user with only pip has none), PTX (the driver would compile it at every start), prebuilt cubins in
the wheel (row sizes are compile-time constants, so that line counts and alignment cost nothing at run time).

Cache: one file per unit under a key over everything that the result depends on (headers that it includes, defines,
options, NVRTC's version, architecture, the format below); the compiler gets no other headers. A file is written beside
its place and renamed, so readers see all of it or nothing and no lock is needed: two processes that compile the same
unit publish the same bytes. A file whose digest does not fit its contents is compiled anew. What lies there runs on the
device and, of other compilers, on the host: the folder is this user's alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

from kernels.layout import Geometry
from protocol.errors import ConfigError, InternalError
from protocol.units import PAGE_TOKENS

SOURCE_DIR: Final = Path(__file__).parent / "src"
UNITS: Final = ("swap_in", "begin_step", "copy_rows", "rows", "seat")
FORMAT: Final = 1
OPTIONS: Final = ("--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")
INCLUDE: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
LINE_BYTES: Final = 128
PRIVATE_MODE: Final = 0o700
LOADED_MAX: Final = 512  # kernels of one process: a worker has one row layout, tests have dozens

Defines = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Resources:
    """What one kernel costs, as the compiler reports it. `smem_bytes` is static shared memory."""

    kernel: str
    registers: int
    smem_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class Compiled:
    cubin: bytes
    resources: tuple[Resources, ...]


def row_defines(geometry: Geometry, host_address: int = 0) -> Defines:
    """Row sizes of `geometry`, and the powers of two up to 128 that divide the address of every row in the pool."""
    layer_bytes = PAGE_TOKENS * geometry.row_bytes
    base = math.gcd(LINE_BYTES, host_address, geometry.page_bytes)
    planes = []
    for number, (begin, plane) in enumerate(zip((0, geometry.split), geometry.planes, strict=False)):
        align = math.gcd(base, layer_bytes, PAGE_TOKENS * begin, plane)
        planes += [(f"PLANE{number}_BYTES", plane), (f"PLANE{number}_ALIGN", align)]
    return (
        ("ROW_BYTES", geometry.row_bytes),
        ("PLANES", len(geometry.planes)),
        *planes,
        ("INDEX_ROW_BYTES", geometry.index_row_bytes),
        ("INDEX_ROW_ALIGN", math.gcd(base, geometry.layers * layer_bytes, geometry.index_row_bytes)),
    )


def compile_source(source: str, name: str, defines: Defines, arch: str) -> Compiled:
    """Compile CUDA C++ that may include headers of SOURCE_DIR. No GPU is needed. Raises InternalError with the log."""
    nvrtc = _bindings("nvrtc")
    headers = included(source, headers_of_kernels())
    program = _call(
        nvrtc.nvrtcCreateProgram,
        source.encode(),
        f"{name}.cu".encode(),
        len(headers),
        [text.encode() for text in headers.values()],
        [name.encode() for name in headers],
    )
    options = [f"--gpu-architecture={arch}", *OPTIONS, *(f"-D{key}={value}" for key, value in defines)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = _log(nvrtc, program)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise InternalError(f"does not compile for {arch}:\n{log}", field="kernel", value=name)
    cubin = bytearray(_call(nvrtc.nvrtcGetCUBINSize, program))
    _call(nvrtc.nvrtcGetCUBIN, program, cubin)
    _call(nvrtc.nvrtcDestroyProgram, program)
    return Compiled(bytes(cubin), parse_resources(log))


def compile_unit(unit: str, defines: Defines, arch: str) -> Compiled:
    """One unit for `arch` ("sm_90"), with Hopper's own matrix instructions where `defines` ask for them."""
    own = "a" if dict(defines).get("WGMMA") else ""
    return compile_source(_source_of(unit), unit, defines, arch + own)


def headers_of_kernels() -> dict[str, str]:
    """Texts of all headers in SOURCE_DIR, by the file's name; read once in a process."""
    return _headers_in(SOURCE_DIR)


@lru_cache(maxsize=4)
def _headers_in(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(directory.glob("*.cuh"))}


def included(source: str, headers: Mapping[str, str]) -> dict[str, str]:
    """Return those of `headers` that `source` includes, directly or through other headers, in the order of names."""
    found: set[str] = set()
    missing = {*INCLUDE.findall(source)} & headers.keys()
    while missing:
        found |= missing
        missing = {name for header in missing for name in INCLUDE.findall(headers[header])} & headers.keys() - found
    return {name: headers[name] for name in sorted(found)}


def _source_of(unit: str) -> str:
    return f'#include "{unit}.cuh"\n'


def parse_resources(log: str) -> tuple[Resources, ...]:
    """What `ptxas -v` says of each entry function."""
    found = []
    for part in log.split("Compiling entry function '")[1:]:
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", part)]
        registers = re.search(r"Used (\d+) registers", part)
        smem = re.search(r"(\d+) bytes smem", part)
        found.append(
            Resources(
                kernel=part[: part.index("'")],
                registers=int(registers[1]) if registers else 0,
                smem_bytes=int(smem[1]) if smem else 0,
                spill_bytes=sum(spills),
            )
        )
    return tuple(sorted(found, key=lambda r: r.kernel))


def cache_dir() -> Path:
    """$HISPARSE_KERNEL_CACHE, or hisparse/kernels in the user's cache folder, made with mode 0700 when missing.

    One of this user that others may enter is closed to them. Raises ConfigError for a folder that another user may
    write; one of root, as an image has it, may be read by all.
    """
    chosen = os.environ.get("HISPARSE_KERNEL_CACHE")
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hisparse" / "kernels"
    place = Path(chosen) if chosen else default
    try:
        place.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
        status = place.stat()
        if status.st_uid == os.geteuid() and status.st_mode & 0o022:
            place.chmod(PRIVATE_MODE)
    except OSError as problem:
        raise _unusable_cache(place, str(problem)) from problem
    if status.st_uid not in (0, os.geteuid()) or (status.st_uid != os.geteuid() and status.st_mode & 0o022):
        raise _unusable_cache(place, f"owner {status.st_uid}, mode {status.st_mode & 0o7777:04o}: others may write it")
    return place


def _unusable_cache(place: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"cannot be used: {reason}",
        field="HISPARSE_KERNEL_CACHE",
        value=place,
        remedy="name a folder that this user may write, and no other",
    )


def cached_unit(unit: str, defines: Defines, arch: str, directory: Path) -> Compiled:
    """compile_unit through the cache in `directory`, which is made when missing."""
    place = directory / f"{unit}-{arch}-{content_key(unit, defines, arch)}.cubin"
    return cached(place, partial(compile_unit, unit, defines, arch))


def cached(place: Path, compile_it: Callable[[], Compiled]) -> Compiled:
    """What the file at `place` holds; compiled first where there is none, or a broken one."""
    held = _read(place)
    if held is None:
        held = compile_it()
        _publish(place, held)
    return held


def content_key(unit: str, defines: Defines, arch: str) -> str:
    """Changes with anything that the compiled unit depends on, and with no header that it does not include."""
    headers = included(_source_of(unit), headers_of_kernels())
    inputs = (FORMAT, OPTIONS, unit, defines, arch, _nvrtc_version(), headers)
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:32]


class Kernel:
    """One loaded kernel. `threads` is its launch bound, the block size that it is written for."""

    def __init__(self, module: Any, name: str) -> None:
        driver = _bindings("driver")
        self._driver = driver
        self._clusters: dict[tuple[int, int], int] = {}  # one per size of cluster and shape of top-k
        self._function = _call(driver.cuModuleGetFunction, module, name.encode())
        attribute = self._attribute = driver.CUfunction_attribute
        self.threads = int(
            _call(driver.cuFuncGetAttribute, attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, self._function)
        )

    def allow_all(self, clusters: bool) -> None:
        """Permit launches with all shared memory that the device gives a block, in clusters as large as it allows."""
        driver, attribute = self._driver, self._attribute
        most = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        static = _call(driver.cuFuncGetAttribute, attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self._function)
        dynamic = _call(driver.cuDeviceGetAttribute, most, _call(driver.cuCtxGetDevice)) - static
        _call(
            driver.cuFuncSetAttribute,
            self._function,
            attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            dynamic,
        )
        if clusters:  # where a device refuses, clusters_at_once has none of more than 8 blocks
            larger = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            driver.cuFuncSetAttribute(self._function, larger, 1)

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
        """Launch on the CUDA stream at address `stream`; captured when that stream is. Returns at once.

        `early`: blocks may begin before the kernel ahead has ended, once that has said so in all of its blocks; ours
        must await it (griddepcontrol) before touching what it wrote.
        """
        driver = self._driver
        config = self._config(grid, threads or self.threads, cluster, shared_bytes, early=early)
        config.hStream = driver.CUstream(stream)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        _call(driver.cuLaunchKernelEx, config, self._function, ctypes.addressof(arguments), 0)

    def clusters_at_once(self, cluster: int, shared_bytes: int) -> int:
        """How many clusters of `cluster` blocks the device holds at once.

        None where the query fails: a device refuses it for clusters larger than it allows, such as 16 blocks where 8
        are the most. A device with another defect fails the launch that follows.
        """
        held = self._clusters.get((cluster, shared_bytes))
        if held is None:
            config = self._config((cluster, 1), self.threads, cluster, shared_bytes)
            status, *found = self._driver.cuOccupancyMaxActiveClusters(self._function, config)
            held = int(found[0]) if int(status) == 0 else 0
            self._clusters[cluster, shared_bytes] = held
        return held

    def _config(
        self, grid: tuple[int, int], threads: int, cluster: int, shared_bytes: int, *, early: bool = False
    ) -> Any:
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        attributes = []
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = cluster, 1, 1
            attributes.append(attribute)
        if early:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config


@lru_cache(maxsize=LOADED_MAX)
def load(unit: str, kernel: str, defines: Defines, device: int) -> Kernel:
    """`kernel` of `unit` on a device whose context is current, compiled or from the cache, once per process."""
    return Kernel(_module(unit, defines, device), kernel)


@lru_cache(maxsize=LOADED_MAX)
def _module(unit: str, defines: Defines, device: int) -> Any:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    torch.cuda.synchronize(device)  # makes the context that the module belongs to
    compiled = cached_unit(unit, defines, f"sm_{major}{minor}", cache_dir())
    return _call(_bindings("driver").cuModuleLoadData, compiled.cubin)


def capture_id(stream: int) -> int:
    """Number of the capture that the CUDA stream at address `stream` takes part in; 0: of none."""
    driver = _bindings("driver")
    status, number, *_ = _results(driver.cuStreamGetCaptureInfo, driver.CUstream(stream))
    return int(number) if int(status) == int(driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE) else 0


def _read(place: Path) -> Compiled | None:
    try:
        head, cubin = place.read_bytes().split(b"\n", 1)
        stored = json.loads(head)
        if stored["sha256"] != hashlib.sha256(cubin).hexdigest():
            return None
        return Compiled(cubin, tuple(Resources(**entry) for entry in stored["resources"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _publish(place: Path, compiled: Compiled) -> None:
    head = {
        "sha256": hashlib.sha256(compiled.cubin).hexdigest(),
        "resources": [asdict(entry) for entry in compiled.resources],
    }
    try:
        place.parent.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, prefix=".new-", delete=False) as file:
            file.write(json.dumps(head).encode() + b"\n" + compiled.cubin)
        Path(file.name).replace(place)
    except OSError as problem:
        raise _unusable_cache(place.parent, str(problem)) from problem


def _nvrtc_version() -> tuple[int, int]:
    nvrtc = _bindings("nvrtc")
    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise InternalError(f"nvrtcVersion: {status}", field="nvrtc")
    return major, minor


def _log(nvrtc: Any, program: Any) -> str:
    log = bytearray(_call(nvrtc.nvrtcGetProgramLogSize, program))
    _call(nvrtc.nvrtcGetProgramLog, program, log)
    return log.rstrip(b"\0").decode(errors="replace")


def _call(function: Any, *arguments: Any) -> Any:
    """The result of a driver or NVRTC call. Raises InternalError naming call and status."""
    results = _results(function, *arguments)
    return results[0] if results else None


def _results(function: Any, *arguments: Any) -> tuple[Any, ...]:
    """All results of a call, as _call."""
    status, *results = function(*arguments)
    if int(status) != 0:
        raise InternalError(f"{function.__name__}: {status!r}", field="cuda")
    return tuple(results)


@lru_cache(maxsize=2)
def _bindings(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as problem:
        raise ConfigError(
            f"cannot be imported: {problem}",
            field="cuda.bindings",
            value=name,
            remedy="pip install 'hisparse[cuda]'",
        ) from problem
