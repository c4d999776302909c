"""Engine `mooncake`: the Mooncake Transfer Engine, TCP or RDMA.

Each sender writes through an engine of its own at the receiver, with the pool registered in it; to shut a sender out is
to destroy that engine. (Over TCP it also refuses a write to memory that is not registered, but looks only when the
write begins.) Its threads move the bytes: it needs no calls for progress.

A batch above BATCH_WRITES_MAX descriptors fails; each page is a write of its own here, so only their number in flight
is bounded (worker/transfer/sending.py).
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Final

import msgspec

from protocol.errors import Unavailable
from worker.transfer.engines.base import Jobs
from worker.transfer.engines.network import Address, NetworkSource, NetworkTarget, not_installed
from worker.transfer.interface import PoolMemory
from worker.transfer.sending import WINDOW_UNITS

#: Above this a batch returns -1 (measured with 0.3.13).
BATCH_WRITES_MAX: Final = 512
#: Peers find each other without a metadata server.
METADATA: Final = "P2PHANDSHAKE"
LANDED: Final = 1

assert WINDOW_UNITS <= BATCH_WRITES_MAX


class MooncakeTarget(NetworkTarget):
    needs_progress = False

    def __init__(self, pool: PoolMemory, host: str, protocol: str, devices: str) -> None:
        self._make = load()
        super().__init__(pool)
        self._host = host
        self._protocol = protocol
        self._devices = devices
        self._engines: dict[str, Any] = {}

    def admit(self, sender: str, place: bytes) -> bytes:
        engine = _engine(self._make, self._pool, self._host, self._protocol, self._devices)
        self._engines[sender] = engine
        endpoint = f"{self._host}:{engine.get_rpc_port()}".encode()
        return msgspec.msgpack.encode(Address(endpoint, self._pool.pages.ctypes.data))

    def shut_out(self, sender: str) -> None:
        del self._engines[sender]  # the last reference: its threads and connections go here

    def progress(self) -> None: ...

    def close(self) -> None:
        self._engines.clear()


class MooncakeSource(NetworkSource[str, int]):
    """Connections are names of segments, handles ids of batches of one write."""

    def __init__(self, pool: PoolMemory, jobs: Jobs, host: str, protocol: str, devices: str) -> None:
        super().__init__(pool, jobs)
        self._engine = _engine(load(), pool, host, protocol, devices)

    def _connect(self, endpoint: bytes) -> str:
        return endpoint.decode()

    def _disconnect(self, connection: str) -> None: ...

    def _begin(self, connection: str, source: int, target: int, length: int) -> int:
        batch: int = self._engine.transfer_submit_write(connection, source, target, length)
        if batch in (0, -1):
            raise Unavailable("Mooncake cannot write", field="transfer.peer", value=connection)
        return batch

    def _has_landed(self, handle: int) -> bool:
        state: int = self._engine.transfer_check_status(handle)
        if state < 0:
            raise Unavailable(f"Mooncake: the write ended in state {state}", field="worker.transfer", value="mooncake")
        return state == LANDED

    def _release(self, handle: int) -> None: ...

    def close(self) -> None:
        super().close()
        del self._engine


def load() -> Any:
    """The class of engines. Raises ConfigError."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        raise not_installed("mooncake", "'hisparse[mooncake]', apt install libibverbs1,", error) from error


def _engine(make: Any, pool: PoolMemory, host: str, protocol: str, devices: str) -> Any:
    engine = make()
    if engine.initialize(host, METADATA, protocol, devices):
        raise Unavailable(
            f"Mooncake cannot start with protocol {protocol}", field="worker.transfer_transports", value=protocol
        )
    if engine.register_memory(pool.pages.ctypes.data, pool.pages.nbytes):
        raise Unavailable("Mooncake cannot register the pool", field="worker.transfer", value="mooncake")
    return engine
