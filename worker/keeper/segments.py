"""Memory that outlives the processes which map it: pieces of `segment_bytes`, each behind a descriptor.

    host    a memfd. Sealed, it can be mapped for reading alone, by any process; before, by whom it is given to
    GPU     an allocation of the driver (cuMemCreate) that is exported as a descriptor. The keeper makes it without a
            context, so that it takes no device memory of its own. A process that maps it chooses its own access

A keeper that ends leaves the memory to the processes that map it, and it is free when the last of them has ended.
"""

from __future__ import annotations

import fcntl
import importlib
import os
from functools import lru_cache
from typing import Any, Final, Protocol

from protocol.errors import CapacityError, ConfigError, Unavailable
from worker.keeper.messages import CPU, segment_bytes

F_ADD_SEALS: Final = 1033
#: F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE
SEALS: Final = 1 | 2 | 4 | 8


class Segment(Protocol):
    """One piece."""

    def export(self, *, writable: bool) -> int:
        """A new descriptor, which the caller closes."""
        ...

    def seal(self) -> None:
        """Refuse writers from now on, where that can be. Raises Unavailable while a process can write it."""
        ...

    def close(self) -> None: ...


class HostSegment:
    """Pages of a memfd, which are allocated as they are written."""

    def __init__(self) -> None:
        self._file = os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, segment_bytes(CPU))

    def export(self, *, writable: bool) -> int:
        if writable:
            return os.dup(self._file)
        return os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)

    def seal(self) -> None:
        try:
            fcntl.fcntl(self._file, F_ADD_SEALS, SEALS)
        except OSError as error:
            raise Unavailable(
                "weights are still mapped for writing",
                field="weights",
                value=os.getpid(),
                remedy="map them for reading before they are sealed",
            ) from error

    def close(self) -> None:
        os.close(self._file)


class GpuSegment:
    """Device memory of the GPU of this id. Raises Unavailable without such a GPU, CapacityError when it is full."""

    def __init__(self, gpu: str) -> None:
        self._driver, self._properties = _allocation(gpu)
        try:
            self._handle = call(self._driver.cuMemCreate, segment_bytes(gpu), self._properties, 0)
        except Unavailable as error:
            raise CapacityError(
                f"no room for weights: {error}",
                field="worker.device",
                value=gpu,
                remedy="end what else runs on the GPU, or use a smaller model",
            ) from error

    def export(self, *, writable: bool) -> int:
        kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return int(call(self._driver.cuMemExportToShareableHandle, self._handle, kind, 0))

    def seal(self) -> None:
        """Do nothing: access is a matter of each mapping."""

    def close(self) -> None:
        call(self._driver.cuMemRelease, self._handle)


def make_segment(device: str) -> Segment:
    """Memory on `device`, CPU or the id of a GPU. Raises Unavailable, CapacityError."""
    return HostSegment() if device == CPU else GpuSegment(device)


@lru_cache(maxsize=1)
def driver() -> Any:
    """The CUDA driver, initialized. Raises ConfigError without its package, Unavailable without a GPU."""
    try:
        found = importlib.import_module("cuda.bindings.driver")
    except ImportError as problem:
        raise ConfigError(
            f"cannot be imported: {problem}",
            field="cuda.bindings",
            value="driver",
            remedy="pip install 'hisparse[cuda]'",
        ) from problem
    try:
        call(found.cuInit, 0)
    except RuntimeError as problem:  # there is no library of the driver
        raise Unavailable(
            f"no CUDA driver: {problem}",
            field="worker.device",
            value="cuda",
            remedy="install the driver of NVIDIA, or use worker.device=cpu",
        ) from problem
    return found


def gpu_id(ordinal: int) -> str:
    """The id of a GPU, the same in each process. Raises Unavailable."""
    cuda = driver()
    return bytes(call(cuda.cuDeviceGetUuid, call(cuda.cuDeviceGet, ordinal)).bytes).hex()


@lru_cache(maxsize=1)
def _allocation(gpu: str) -> tuple[Any, Any]:
    """The driver, and the properties of memory on `gpu` that can be exported."""
    cuda = driver()
    for ordinal in range(call(cuda.cuDeviceGetCount)):
        if gpu_id(ordinal) == gpu:
            properties = cuda.CUmemAllocationProp()
            properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            properties.location.id = ordinal
            kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            properties.requestedHandleTypes = kind
            return cuda, properties
    remedy = "let keeper and worker see the same GPUs (CUDA_VISIBLE_DEVICES)"
    raise Unavailable("no such GPU here", field="worker.device", value=gpu, remedy=remedy)


def call(function: Any, *arguments: Any) -> Any:
    """The result of a call of the driver. Raises Unavailable that names function and status."""
    status, *results = function(*arguments)
    if int(status) != 0:
        remedy = "see the kernel's log for an Xid, and nvidia-smi for what holds the GPU"
        raise Unavailable(f"{function.__name__}: {status!r}", field="cuda", value=int(status), remedy=remedy)
    return results[0] if len(results) == 1 else tuple(results)
