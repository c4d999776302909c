"""A worker's way to its host pool at start: reclaim, size, open, register; each step refuses before it takes anything.

A standby opens and registers the pool that is there ahead of its worker's death, and neither reads nor writes it.

A pool that is there already decides its own size when `host_mem` is auto: workers of a node share one, and a successor
finds the rows of its predecessor in it.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec

from kernels.layout import Geometry
from protocol.byte_sizes import AUTO
from protocol.config import pool_path
from protocol.logs import fields, logger
from protocol.settings import Config
from worker.pool.file import Header, empty_unused, find_pool, reclaim_stale
from worker.pool.host_memory import file_system_room, memory_room, resolve_host_mem
from worker.pool.host_pool import MappedPool
from worker.pool.registration import CudaRegistrar

log = logger("worker.pool.start")


def size_pool(config: Config, geometry: Geometry, model_fingerprint: str) -> Config:
    """`config` with `host_mem` in bytes, having reclaimed what dead clusters left. Raises ConfigError."""
    settings = config.worker
    path = pool_path(settings.pool_dir, settings.node)
    for stale in reclaim_stale(path.parent, keep=path):
        log.warning(
            "host pool of a dead cluster removed",
            extra=fields(path=stale.path, bytes=stale.file_bytes, owner=dict(stale.owner)),
        )
    found = find_pool(path, Header.of(geometry, 0, model_fingerprint, {}))
    if found is not None and settings.host_mem == AUTO:
        host_bytes = found.pages * found.page_bytes
    else:
        if found is None:
            empty_unused(path)
        memory, file_system = memory_room(), file_system_room(path.parent)
        host_bytes = resolve_host_mem(settings, memory, file_system, have_bytes=found.file_bytes if found else 0)
    return msgspec.structs.replace(config, worker=msgspec.structs.replace(settings, host_mem=str(host_bytes)))


def attach_pool(
    config: Config, geometry: Geometry, model_fingerprint: str, halted: threading.Event
) -> MappedPool | None:
    """Open the node's pool for a worker to come; None: there is none of this geometry and model. Raises as `open_pool`
    does."""
    path = Path(pool_path(config.worker.pool_dir, config.worker.node))
    found = find_pool(path, Header.of(geometry, 0, model_fingerprint, {}))
    return None if found is None else open_pool(config, geometry, found.pages, model_fingerprint, halted)


def open_pool(
    config: Config,
    geometry: Geometry,
    host_pages: int,
    model_fingerprint: str,
    halted: threading.Event,
    *,
    attached: MappedPool | None = None,
) -> MappedPool:
    """The node's pool, registered with the worker's device. Raises as HostPool's methods do; then nothing is held.

    It is `attached`, if that is the pool that lies there now and has `host_pages`; if not, `attached` is closed.
    """
    settings = config.worker
    path = Path(pool_path(settings.pool_dir, settings.node))
    if attached is not None:
        found = find_pool(path, Header.of(geometry, 0, model_fingerprint, {}))
        if found is not None and (found.pool_id, found.pages) == (attached.pool_id, host_pages):
            return attached
        attached.close()
    owner = {
        "cluster": config.cluster.name,
        "node": settings.node,
        "worker_endpoint": config.cluster.worker_endpoint,
        "pid": os.getpid(),
    }
    pool = MappedPool.open(path, geometry, host_pages, model_fingerprint, owner=owner, halted=halted)
    try:
        if settings.device.startswith("cuda"):
            pool.register(CudaRegistrar(settings.device), halted)
    except BaseException:
        pool.close()
        raise
    return pool
