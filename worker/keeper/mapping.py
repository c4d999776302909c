"""Addresses of this process at which the segments of a keeper follow one another, as one tensor of bytes.

They are mapped for writing while weights are loaded, and for reading alone from then on: on the host always, on a GPU
where its driver allows that. Mapped once, they stay until the process ends.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from protocol.errors import CapacityError, Unavailable
from worker.keeper.messages import CPU, GPU_SEGMENT_BYTES, HOST_SEGMENT_BYTES
from worker.keeper.segments import call, driver

MAP_FIXED: Final = 0x10
MAP_NORESERVE: Final = 0x4000
MAP_FAILED: Final = ctypes.c_void_p(-1).value
#: Bytes that one sum of a digest is over.
SUMMED_BYTES: Final = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (*(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Mapping(Protocol):
    """Segments at one range of addresses. `is_read_only`: a write ends this process, or its context."""

    is_read_only: bool

    @property
    def bytes(self) -> int:
        """Bytes that are mapped."""
        ...

    @property
    def whole(self) -> Tensor:
        """uint8 of all addresses, of which the first `bytes` may be used; there must be a segment."""
        ...

    def add(self, descriptor: int, *, writable: bool) -> None:
        """Map the next segment; the descriptor is closed. Raises Unavailable, CapacityError."""
        ...

    def protect(self) -> None:
        """Have no more writes, as far as this can be."""
        ...

    def digest(self) -> str:
        """Digest of all bytes; empty where no process can change them."""
        ...

    def close(self) -> None:
        """Unmap all. No tensor may be used any more."""
        ...


class HostMapping:
    def __init__(self) -> None:
        memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        self._reserved = (memory // HOST_SEGMENT_BYTES + 1) * HOST_SEGMENT_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._address = _map(None, self._reserved, 0, flags, -1)
        self._descriptors: list[int] = []
        self.bytes = 0
        self.is_read_only = False

    @property
    def whole(self) -> Tensor:
        view = (ctypes.c_ubyte * self._reserved).from_address(self._address)
        return torch.frombuffer(view, dtype=torch.uint8)

    def add(self, descriptor: int, *, writable: bool) -> None:
        self._descriptors.append(descriptor)
        if self.bytes == self._reserved:
            raise CapacityError(
                "more weights than this machine has memory",
                field="weights",
                value=self.bytes,
                remedy="use a smaller model, or one in FP8",
            )
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _map(self._address + self.bytes, HOST_SEGMENT_BYTES, access, mmap.MAP_SHARED | MAP_FIXED, descriptor)
        self.bytes += HOST_SEGMENT_BYTES

    def protect(self) -> None:
        for number, descriptor in enumerate(self._descriptors):
            file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            at = self._address + number * HOST_SEGMENT_BYTES
            _map(at, HOST_SEGMENT_BYTES, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, file)
            os.close(file)
        self.is_read_only = True
        self._close_descriptors()

    def digest(self) -> str:
        return ""

    def close(self) -> None:
        self._close_descriptors()
        _libc.munmap(self._address, self._reserved)

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


class GpuMapping:
    def __init__(self, device: torch.device) -> None:
        self._device, self._driver = device, driver()
        torch.cuda.synchronize(device)  # there is a context from here on
        total = torch.cuda.get_device_properties(device).total_memory
        self._reserved = (total // GPU_SEGMENT_BYTES + 1) * GPU_SEGMENT_BYTES
        self._address = int(call(self._driver.cuMemAddressReserve, self._reserved, 0, 0, 0))
        self.bytes = 0
        self.is_read_only = False

    @property
    def whole(self) -> Tensor:
        return torch.as_tensor(_DeviceBytes(self._address, self._reserved), device=self._device)

    def add(self, descriptor: int, *, writable: bool) -> None:
        cuda = self._driver
        try:
            kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            handle = call(cuda.cuMemImportFromShareableHandle, descriptor, kind)
        finally:
            os.close(descriptor)
        try:
            call(cuda.cuMemMap, self._address + self.bytes, GPU_SEGMENT_BYTES, 0, handle, 0)
        finally:
            call(cuda.cuMemRelease, handle)  # the mapping holds the memory
        if writable:
            self._allow(self.bytes, GPU_SEGMENT_BYTES, cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        self.bytes += GPU_SEGMENT_BYTES

    def protect(self) -> None:
        torch.cuda.synchronize(self._device)
        flags = self._driver.CUmemAccess_flags
        try:
            self._allow(0, self.bytes, flags.CU_MEM_ACCESS_FLAGS_PROT_READ)
            self.is_read_only = True
        except Unavailable:  # a driver without it
            self._allow(0, self.bytes, flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)

    def digest(self) -> str:
        words = self.whole[: self.bytes].view(torch.int64).view(-1, SUMMED_BYTES // 8)
        return hashlib.blake2b(words.sum(1).cpu().numpy().tobytes(), digest_size=16).hexdigest()

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        if self.bytes:
            call(self._driver.cuMemUnmap, self._address, self.bytes)
        call(self._driver.cuMemAddressFree, self._address, self._reserved)

    def _allow(self, first: int, size: int, access: Any) -> None:
        described = self._driver.CUmemAccessDesc()
        described.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        described.location.id = self._device.index
        described.flags = access
        call(self._driver.cuMemSetAccess, self._address + first, size, [described], 1)


class _DeviceBytes:
    """Memory of the device as other libraries take it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def make_mapping(device: torch.device) -> Mapping:
    """Addresses on `device`. Raises Unavailable, ConfigError."""
    return HostMapping() if device.type == CPU else GpuMapping(device)


def _map(address: int | None, size: int, access: int, flags: int, descriptor: int) -> int:
    found = _libc.mmap(address, size, access, flags, descriptor, 0)
    if found in (None, MAP_FAILED):
        raise CapacityError(
            f"cannot be mapped: {os.strerror(ctypes.get_errno())}",
            field="weights",
            value=size,
            remedy="raise the limits of the process (ulimit -v, vm.max_map_count)",
        )
    return int(found)
