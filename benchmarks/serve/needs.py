"""Memory that a run needs and the machine has: a run is refused before anything is made. Pure but for looking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.serve.model import device_bytes, geometry
from benchmarks.serve.workloads import Cell, pool_pages
from hisparse.cluster.gpus import gpu_bytes
from protocol.config import tmpfs_dir
from protocol.units import BLOCK_TOKENS_MAX, PAGE_TOKENS, pages_for
from worker.pool.host_memory import file_system_room, memory_room

GIB: Final = 1 << 30
#: Largest pool.
POOL_BYTES_MAX: Final = 100 * GIB
#: Beside the pool: the processes, pinned buffers, libraries.
PROCESSES_BYTES: Final = 8 * GIB
#: Beside weights, exchange and contexts: graphs, scratch memory, libraries.
SCRATCH_BYTES: Final = 6 * GIB
#: The rows of a request's smallest hot buffer, and its tail.
HOT_PAGES: Final = 65


class TooLittleError(Exception):
    """The machine has less than a run needs."""


@dataclass(frozen=True)
class Needs:
    """Bytes of device memory, and host pages. `pages_wanted`: were the pool not bounded."""

    device_bytes: int
    pages: int
    pages_wanted: int
    page_bytes: int

    @property
    def pool_bytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def host_bytes(self) -> int:
        return self.pool_bytes + PROCESSES_BYTES


def needs_of(
    config: Any, cells: Sequence[Cell], *, kv_dtype: str, ranks: int, pass_tokens: int, pool_bytes_max: int
) -> Needs:
    """Return the needs of the cell that needs most. A bounded pool has to hold one client's context at least."""
    shape = geometry(config, kv_dtype)
    wanted = pool_pages(cells)
    pages = min(wanted, pool_bytes_max // shape.page_bytes)
    slab = max(pages_for(cell.context_tokens) for cell in cells)
    requests = max(
        cell.clients * (HOT_PAGES * shape.chunk_bytes + pages_for(cell.workload.longest) * shape.index_page_bytes)
        for cell in cells
    )
    rows_max = max(min(pass_tokens, BLOCK_TOKENS_MAX), *(cell.clients for cell in cells))
    device = device_bytes(config, ranks, rows_max) + slab * shape.slab_page_bytes + requests + SCRATCH_BYTES
    return Needs(device, pages, wanted, shape.page_bytes)


@dataclass(frozen=True)
class Machine:
    """Bytes that are there. `devices`: of each GPU; `shared`: of the file system of a pool that a GPU registers."""

    devices: tuple[int, ...]
    host: int
    shared: int

    @classmethod
    def look(cls, device: str, host_bytes: int = 0) -> Machine:
        """`host_bytes`: what is known of host memory where the kernel says less, since it grows as it is used."""
        gpus = tuple(gpu_bytes()) if device != "cpu" else ()
        return cls(
            gpus, host_bytes or memory_room().free_bytes, file_system_room(Path(tmpfs_dir("/")).parent).free_bytes
        )


def check(needs: Needs, has: Machine, device: str) -> None:
    """Raises TooLittleError, with need and have."""
    if device != "cpu":
        if not has.devices:
            raise TooLittleError("no GPU is there: name one with --device, or try the tiny model with --device cpu")
        number = int(device.partition(":")[2] or 0)
        if number >= len(has.devices):
            raise TooLittleError(f"{device} is not there: this machine has {len(has.devices)} GPUs")
        _require("device memory", needs.device_bytes, has.devices[number], "use fewer --layers, or a larger GPU")
        _require("the pool's file system, /dev/shm", needs.pool_bytes, has.shared, "make it larger, or --pool-gib less")
    _require("host memory", needs.host_bytes, has.host, "choose smaller --cells or --pool-gib; --host-gib says what is")
    tokens = needs.pages * PAGE_TOKENS
    if needs.pages < needs.pages_wanted:
        wanted = needs.pages_wanted * needs.page_bytes
        raise TooLittleError(
            f"a pool of {needs.pool_bytes / GIB:.1f} GiB holds {tokens:,} tokens, and these cells need "
            f"{wanted / GIB:.1f} GiB: choose other --cells, or raise --pool-gib"
        )


def _require(what: str, need: int, have: int, remedy: str) -> None:
    if need > have:
        raise TooLittleError(f"{what}: needs {need / GIB:.1f} GiB, has {have / GIB:.1f} GiB: {remedy}")
