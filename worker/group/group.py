"""One rank's part in its group, from the first meeting to the last round.

The ports on which gloo listens are closed to new connections once all ranks are connected. Gloo asks no connection who
it is, keeps each that is made, and never stops listening. A filter on the listening socket drops what is sent to it
from then on; connections that were accepted before have no filter. Between the start of the listener and
`close_to_strangers` a peer that reaches the port could still stand in for a rank (docs/security.md).

Rejected: shutting the socket down (the thread of gloo that accepts would see it ready for ever); gloo's TLS (torch is
built without it); a firewall (needs rights that a worker does not have).
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from protocol.errors import ConfigError
from protocol.logs import fields, logger
from protocol.messages import GroupMember
from protocol.settings import Config, WorkerSettings
from worker.group.control import Control
from worker.group.exchange import ProcessGroupCollectives, explained

#: setsockopt(2) of Linux, and one instruction of a classic BPF program: return 0, which drops the packet.
SO_ATTACH_FILTER: Final = 26
DROP_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)


def listening() -> frozenset[int]:
    """Descriptors of this process's listening TCP sockets."""
    return frozenset(number for number in map(int, os.listdir("/proc/self/fd")) if _listens(number))


def close_to_strangers(descriptors: Iterable[int]) -> None:
    """Let no further connection be made to these listening sockets. They stay open, and so do accepted connections.

    Raises OSError where the kernel takes no filter.
    """
    program = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
    filter_of_one = struct.pack("@HP", 1, ctypes.addressof(program))
    for number in descriptors:
        with _borrowed(number) as listener:
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter_of_one)


def _listens(number: int) -> bool:
    with suppress(OSError), _borrowed(number) as found:  # OSError: it is no socket, or was closed meanwhile
        is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
        return is_tcp and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """A socket object for a descriptor that is not closed with it."""
    found = socket.socket(fileno=number)
    try:
        yield found
    finally:
        found.detach()


class ControlStore(Store):
    """Keys are set or appended to, and are kept by rank 0. Waits have no timeout: a lost rank ends the process.

    What gloo and NCCL ask for is here; `add`, `delete_key` and `num_keys` raise as in the base class. NCCL's monitor
    asks once a second with `check` for a key of its timeouts, which this project does not use.
    """

    def __init__(self, control: Control) -> None:
        super().__init__()
        self._control = control

    def set(self, key: str, value: str | bytes) -> None:
        self._control.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def append(self, key: str, value: str | bytes) -> None:
        self._control.set(key, value.encode() if isinstance(value, str) else bytes(value), appends=True)

    def get(self, key: str) -> bytes:
        return self._control.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        del timeout
        for key in keys:
            self._control.get(key)

    def check(self, keys: list[str]) -> bool:
        del keys
        return False  # rank 0 is not asked: the answer would wait for it

    def set_timeout(self, timeout: timedelta) -> None:
        del timeout


#: Interfaces on which NCCL listens, where a group is on one machine.
NCCL_INTERFACE: Final = "NCCL_SOCKET_IFNAME"
LOOPBACK: Final = "lo"
IPC: Final = "ipc://"
#: Of collectives: they never decide that a rank is lost (control.py).
NO_TIMEOUT: Final = timedelta(days=3_650)
#: Longest that collectives may take to end when this process leaves.
ABORT_LIMIT_S: Final = 5.0
#: Settings of a worker that must be equal on all ranks: rounds, graphs and results depend on them.
SHARED: Final = (
    *("dtype", "kv_dtype", "row_dtype", "index_dtype", "matmul", "graphs", "seats", "pass_tokens", "split_tokens"),
    *("context_max_tokens", "lookahead_steps", "draft_tokens", "deterministic", "role"),
)

log = logger("worker.group")


def shared_values(settings: WorkerSettings, fingerprint: str) -> dict[str, str]:
    """What must be equal on all ranks, by the name of its setting. `fingerprint` of the checkpoint."""
    device = settings.device.partition(":")[0]
    values = {f"worker.{name}": str(getattr(settings, name)) for name in SHARED}
    return {"worker.model": fingerprint, "worker.device": device} | values


class Group:
    """A rank that has met the others. `close` when this process ends, or `leave` when it holds nothing."""

    def __init__(self, control: Control, settings: WorkerSettings) -> None:
        """Sets the collectives up, which waits for all ranks."""
        self.control = control
        self.rank, self.size = settings.group_rank, settings.group_size
        self.member = GroupMember(settings.group, self.rank, self.size, control.incarnation)
        self._store = ControlStore(control)  # kept: the library calls it as long as the group lives
        with explained(control.explain):
            self.process_group = _process_group(settings, self._store)
        self.collectives = ProcessGroupCollectives(
            self.process_group, self.rank, self.size, control.progress, control.explain
        )

    @classmethod
    def join(cls, config: Config, fingerprint: str) -> Group:
        """Meet the other ranks. Waits for them. Raises what `Control` and its `join` raise."""
        control = Control(config, shared_values(config.worker, fingerprint))
        try:
            control.join()
        except BaseException:
            control.close()
            raise
        return cls(control, config.worker)

    def leave(self) -> bool:
        """This process holds no request and ends; its streams are closed, since NCCL ends no communicator that a graph
        refers to. Whether the collectives ended within ABORT_LIMIT_S: else the end of the interpreter would wait."""
        self.control.leave()
        ending = threading.Thread(target=self.process_group.abort, name="end of collectives", daemon=True)
        ending.start()  # waits for no peer: what was launched is done
        ending.join(ABORT_LIMIT_S)
        return not ending.is_alive()

    def close(self) -> None:
        self.control.close()


def _process_group(settings: WorkerSettings, store: ControlStore) -> Any:
    rank, size = settings.group_rank, settings.group_size
    if settings.device == "cpu":
        return _gloo(settings, store)
    if settings.group_endpoint.startswith(IPC):
        os.environ.setdefault(NCCL_INTERFACE, LOOPBACK)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = NO_TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _gloo(settings: WorkerSettings, store: ControlStore) -> Any:
    """Connected to all ranks, and then open to no others."""
    before = listening()
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_address(settings.group_endpoint))]
    options._timeout = NO_TIMEOUT
    group = dist.ProcessGroupGloo(store, settings.group_rank, settings.group_size, options)
    try:
        close_to_strangers(listening() - before)
    except OSError as error:
        log.warning("ports of the collectives stay open to strangers", extra=fields(error=error.strerror))
    return group


def _address(endpoint: str) -> str:
    """The address of this machine that other ranks reach: loopback for a path, else that of the route to rank 0."""
    if endpoint.startswith(IPC):
        return "127.0.0.1"
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: finds the route and sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"no route to it: {error.strerror}",
            field="worker.group_endpoint",
            value=endpoint,
            remedy="name the address of the machine of rank 0",
        ) from error
