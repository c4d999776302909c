"""What an actor does on its node: writes the files of its plan, runs the supervisor, and says how it is.

Ray makes the actor again after its process or its node has died. The supervisor ends with the actor, by the kernel's
signal, and the next one waits for that. A supervisor that a signal ended is started again here; one that exited, for a
setting or because its processes did not keep running, is not: its exit code is the answer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from hisparse.cluster.children import Child, child_environ
from hisparse.cluster.restarts import Restarts, unseen_service_s
from hisparse.cluster.up import STOP_GRACE_S
from hisparse.console.options import EXIT_CODES
from hisparse.ray.plan import NodePlan
from hisparse.ray.remains import read, runs, write_atomically
from hisparse.ray.supervisor import PLAN_FILE, REMAINS_FILE, STATUS_FILE, STOP_FILE, NodeStatus, StopOrder
from protocol.errors import ConfigError
from protocol.transport.private_dir import make_private_dir

#: Time for a supervisor, after the deadline of the drain, to end all processes and remove the pool.
STOP_LIMIT_S: Final = 120.0
#: How often the processes that a killed supervisor left are looked at.
LOOK_INTERVAL_S: Final = 0.1
STARTING: Final = NodeStatus("starting", {})


class NodeReport(msgspec.Struct, frozen=True):
    """`exit_code`: of a supervisor that is not started again, negative for a signal; None: it runs, or will again.
    `nodes`: of the cluster. `workers`: names of those of this node."""

    address: str
    asked: str
    is_home: bool
    client_endpoint: str
    admin_endpoint: str
    supervisor: int
    status: NodeStatus
    exit_code: int | None
    nodes: int = 1
    workers: tuple[str, ...] = ()


class NodeHost:
    """One per node. Its methods are called by Ray, one at a time, with bytes that are JSON."""

    def __init__(self, plan: bytes) -> None:
        """Start the supervisor of `plan`, a NodePlan. Where the runtime directory cannot be used, `report` says so: Ray
        does not make an actor again whose constructor raises."""
        self._plan = msgspec.json.decode(plan, type=NodePlan)
        self._directory = Path(self._plan.runtime_dir)
        self._child: Child | None = None
        self._refusal: NodeStatus | None = None
        self._exit_code: int | None = None
        self._lock = threading.Lock()
        self._stopping, self._ended = threading.Event(), threading.Event()
        try:
            self._write_files(plan)
        except ConfigError as error:
            self._refusal, self._exit_code = NodeStatus("stopped", {}, (str(error),)), EXIT_CODES[error.code]
            self._ended.set()
            return
        threading.Thread(target=self._keep, name="supervisor", daemon=True).start()

    def report(self) -> bytes:
        """A NodeReport."""
        plan, cluster, child = self._plan, self._plan.config.cluster, self._child
        return msgspec.json.encode(
            NodeReport(
                plan.address,
                plan.asked,
                plan.coordinator,
                cluster.client_endpoint,
                cluster.admin_endpoint,
                child.pid if child is not None else 0,
                self._refusal or self._status(),
                self._exit_code,
                plan.nodes,
                tuple(it.name for it in plan.workers),
            )
        )

    def stop(self, deadline_s: float, keeps_pool: bool = False) -> bool:
        """End all processes of the node, as StopOrder says; whether they have ended."""
        with self._lock:
            self._stopping.set()
            if self._child is not None and not self._ended.is_set():
                write_atomically(self._directory / STOP_FILE, msgspec.json.encode(StopOrder(deadline_s, keeps_pool)))
                self._child.signal(signal.SIGTERM)
        return self._ended.wait(deadline_s + STOP_LIMIT_S) and self._all_ended()

    def _all_ended(self) -> bool:
        """Whether no process of the supervisors runs, after STOP_GRACE_S at most: those of a killed one end later."""
        found = read(self._directory / REMAINS_FILE)
        left = [] if found is None else list(found.processes.values())
        limit = time.monotonic() + STOP_GRACE_S
        while any(map(runs, left)):
            if time.monotonic() >= limit:
                return False
            time.sleep(LOOK_INTERVAL_S)
        return True

    def _write_files(self, plan: bytes) -> None:
        """Raises ConfigError when the runtime directory cannot be used."""
        make_private_dir(str(self._directory.parent))
        make_private_dir(str(self._directory))
        try:
            for name, text in self._plan.files.items():
                path = self._directory / name
                path.parent.mkdir(mode=0o700, exist_ok=True)
                write_atomically(path, text.encode())
            write_atomically(self._directory / PLAN_FILE, plan)
            (self._directory / STOP_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"a file in it cannot be written: {error}",
                field="cluster.runtime_dir",
                value=self._directory,
                remedy="choose a directory of this user on a disk with free space",
            ) from error

    def _status(self) -> NodeStatus:
        try:
            return msgspec.json.decode((self._directory / STATUS_FILE).read_bytes(), type=NodeStatus)
        except FileNotFoundError:
            return STARTING

    def _keep(self) -> None:
        """Run the supervisor. It dies with this thread, which lives as long as the process."""
        restarts, status = Restarts(), 0
        while (child := self._start()) is not None:
            began = time.monotonic()
            status = child.process.wait()
            child.close()
            pause_s = restarts.after(unseen_service_s(time.monotonic() - began)) if status < 0 else None
            if pause_s is None or self._stopping.wait(pause_s):
                break
        self._exit_code = status
        self._ended.set()

    def _start(self) -> Child | None:
        """The next supervisor; None after `stop`."""
        with self._lock:
            if self._stopping.is_set():
                return None
            (self._directory / STATUS_FILE).unlink(missing_ok=True)  # of the one before
            command = [sys.executable, "-m", "hisparse.ray.supervisor", str(self._directory), str(os.getpid())]
            self._child = Child.start("supervisor", command, child_environ())
            return self._child
