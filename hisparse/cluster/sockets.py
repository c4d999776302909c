"""Sockets in the runtime directory that processes have left which were killed."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from protocol.settings import Config, WorkerSettings

IPC: Final = "ipc://"
#: Names of sockets that processes make in the runtime directory.
PATTERNS: Final = ("client.sock", "admin.sock", "worker.sock", "group-*.sock", "http-*.sock", "weights-*.sock")


def remove_dead_sockets(config: Config, placed: Iterable[WorkerSettings] = ()) -> None:
    """Remove sockets of a cluster with workers `placed` on which no process listens. What is no socket stays."""
    for path in {*_sockets_of(config, placed)}:
        if path.is_socket() and _is_dead(path):
            with suppress(OSError):
                path.unlink()


def _sockets_of(config: Config, placed: Iterable[WorkerSettings]) -> Iterator[Path]:
    cluster, directory = config.cluster, Path(config.cluster.runtime_dir)
    for pattern in PATTERNS:
        yield from directory.glob(pattern)
    endpoints = [cluster.client_endpoint, cluster.admin_endpoint, cluster.worker_endpoint]
    for endpoint in endpoints + [it.group_endpoint for it in placed]:
        if endpoint.startswith(IPC):
            yield Path(endpoint.removeprefix(IPC))


def _is_dead(path: Path) -> bool:
    """Return whether no process listens there. One that has no place for a connection now does listen."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
