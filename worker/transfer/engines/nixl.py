"""Engine `nixl`: NIXL over UCX; TCP, or RDMA where `transports` says so and the hardware is there.

Each sender writes through an agent of its own at the receiver, with the pool registered in it. To shut a sender out is
to destroy its agent, and with it the UCX worker that its bytes would pass through. Deregistering the memory does not do
(tests/worker/transfer/test_engines.py): UCX on TCP applies a write to whatever address it names, registered or not.

UCX must not choose its own way between two processes of one host: through shared memory (cma, sysv, posix, knem, xpmem)
the *sender* stores the bytes, and no agent of the receiver can be destroyed to stop it. So `transports` names them, and
those are refused.

No progress thread: NIXL's takes half a core when idle. A write moves when the receiver's `progress` and the sender's
`poll` are called.
"""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from typing import Any, Final

import msgspec

from protocol.errors import ConfigError, Unavailable
from protocol.logs import fields, logger
from worker.transfer.engines.base import Jobs
from worker.transfer.engines.network import Address, NetworkSource, NetworkTarget, not_installed
from worker.transfer.interface import PoolMemory

#: The wheels, one for each CUDA release; the same engine on host memory.
MODULES: Final = ("nixl_cu13", "nixl_cu12")
#: UCX transports in which the sender stores into the receiver's memory by itself, or that would choose those.
REFUSED_TRANSPORTS: Final = {"all", "sm", "shm", "mm", "cma", "posix", "sysv", "knem", "xpmem", "self", "cuda_ipc"}
BACKEND: Final = "UCX"
MEMORY: Final = "DRAM"

log = logger("worker.transfer.nixl")


class NixlTarget(NetworkTarget):
    needs_progress = True

    def __init__(self, pool: PoolMemory, name: str, transports: str, devices: str) -> None:
        self._api = load(transports, devices)
        super().__init__(pool)
        self._name = name
        self._agents: dict[str, Any] = {}
        self._failing: set[str] = set()
        self._made = 0

    def admit(self, sender: str, place: bytes) -> bytes:
        self._made += 1
        try:
            agent = _agent(self._api, f"{self._name}#{self._made}")
            agent.register_memory([(self._pool.pages.ctypes.data, self._pool.pages.nbytes, 0, "")], MEMORY)
            endpoint = agent.get_agent_metadata()
        except Exception as error:  # NIXL's have no common base
            raise Unavailable(
                f"NIXL cannot make an endpoint: {error!r}", field="transfer.sender", value=sender
            ) from error
        self._agents[sender] = agent
        return msgspec.msgpack.encode(Address(endpoint, self._pool.pages.ctypes.data))

    def shut_out(self, sender: str) -> None:
        self._failing.discard(sender)
        del self._agents[sender]  # the last reference: the agent, its worker and its connections go here

    def progress(self) -> None:
        """An agent that fails is told of once; its sender sees that the write is overdue."""
        for sender, agent in self._agents.items():
            try:
                agent.get_new_notifs()
            except Exception as error:  # NIXL's have no common base
                if sender not in self._failing:
                    self._failing.add(sender)
                    log.warning("nixl makes no progress", extra=fields(sender=sender, error=repr(error)))

    def close(self) -> None:
        self._agents.clear()


class NixlSource(NetworkSource[str, Any]):
    """Connections are names of remote agents, handles NIXL's."""

    def __init__(self, pool: PoolMemory, jobs: Jobs, name: str, transports: str, devices: str) -> None:
        super().__init__(pool, jobs)
        try:
            self._agent = _agent(load(transports, devices), name)
            self._agent.register_memory([(pool.pages.ctypes.data, pool.pages.nbytes, 0, "")], MEMORY)
        except ConfigError:
            raise
        except Exception as error:  # NIXL's have no common base
            raise Unavailable(f"NIXL cannot start: {error!r}", field="worker.transfer", value="nixl") from error

    def _connect(self, endpoint: bytes) -> str:
        try:
            name: str = self._agent.add_remote_agent(endpoint)
        except Exception as error:  # NIXL's have no common base
            raise Unavailable(f"NIXL cannot connect: {error!r}", field="worker.transfer", value="nixl") from error
        return name

    def _disconnect(self, connection: str) -> None:
        with suppress(Exception):  # NIXL's have no common base; it may have noticed by itself
            self._agent.remove_remote_agent(connection)

    def _begin(self, connection: str, source: int, target: int, length: int) -> Any:
        agent = self._agent
        try:
            here = agent.get_xfer_descs([(source, length, 0)], MEMORY)
            there = agent.get_xfer_descs([(target, length, 0)], MEMORY)
            handle = agent.initialize_xfer("WRITE", here, there, connection)
        except Exception as error:  # NIXL's have no common base
            raise Unavailable(f"NIXL cannot write: {error!r}", field="worker.transfer", value="nixl") from error
        with suppress(Exception):  # an error at once shows in the state of the handle too
            agent.transfer(handle)
        return handle

    def _has_landed(self, handle: Any) -> bool:
        try:
            state: str = self._agent.check_xfer_state(handle)
        except Exception as error:  # NIXL's have no common base
            raise Unavailable(f"NIXL: {error!r}", field="worker.transfer", value="nixl") from error
        if state == "ERR":
            raise Unavailable("NIXL: the write failed", field="worker.transfer", value="nixl")
        return state == "DONE"

    def _release(self, handle: Any) -> None:
        with suppress(Exception):  # still under way: NIXL keeps it until the agent goes
            handle.release()

    def close(self) -> None:
        super().close()
        del self._agent


def load(transports: str, devices: str) -> Any:
    """The module. UCX reads its settings when it is loaded, so they are those of the process. Raises ConfigError."""
    chosen = [transport.strip() for transport in transports.split(",")]
    refused = [transport for transport in chosen if transport.lstrip("\\^") in REFUSED_TRANSPORTS or "^" in transport]
    if refused or not all(chosen):
        raise ConfigError(
            "shared memory between processes cannot be revoked from a sender",
            field="worker.transfer_transports",
            value=transports,
            remedy="name network transports of UCX, such as tcp or rc,tcp; for one host use engine shared",
        )
    os.environ["UCX_TLS"] = transports
    if devices:
        os.environ["UCX_NET_DEVICES"] = devices
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    failure = ImportError("no such module")
    for name in MODULES:
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError as error:
            failure = error
    raise not_installed("nixl", "'hisparse[nixl]'", failure)


def _agent(api: Any, name: str) -> Any:
    return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND]))
