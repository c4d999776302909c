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
from hisparse.cluster.keeper import Restarts
from hisparse.ray.plan import NodePlan
from hisparse.ray.remains import write_atomically
from hisparse.ray.supervisor import DEADLINE_FILE, PLAN_FILE, STATUS_FILE, NodeStatus
from protocol.transport.private_dir import make_private_dir

#: Time for a supervisor, after the deadline of the drain, to end all processes and remove the pool.
STOP_LIMIT_S: Final = 120.0
STARTING: Final = NodeStatus("starting", {})


class NodeReport(msgspec.Struct, frozen=True):
    """`exit_code`: of a supervisor that is not started again, negative for a signal; None: it runs, or will again."""

    address: str
    asked: str
    is_home: bool
    client_endpoint: str
    admin_endpoint: str
    supervisor: int
    status: NodeStatus
    exit_code: int | None


class NodeHost:
    """One per node. Its methods are called by Ray, one at a time, with bytes that are JSON."""

    def __init__(self, plan: bytes) -> None:
        """Start the supervisor of `plan`, a NodePlan. Raises ConfigError when the runtime directory cannot be used."""
        self._plan = msgspec.json.decode(plan, type=NodePlan)
        self._directory = Path(self._plan.runtime_dir)
        make_private_dir(str(self._directory.parent))
        make_private_dir(str(self._directory))
        for name, text in self._plan.files.items():
            path = self._directory / name
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(path, text.encode())
        write_atomically(self._directory / PLAN_FILE, plan)
        (self._directory / DEADLINE_FILE).unlink(missing_ok=True)
        self._child: Child | None = None
        self._exit_code: int | None = None
        self._is_stopping = False
        self._ended = threading.Event()
        threading.Thread(target=self._keep, name="supervisor", daemon=True).start()

    def report(self) -> bytes:
        """A NodeReport."""
        try:
            status = msgspec.json.decode((self._directory / STATUS_FILE).read_bytes(), type=NodeStatus)
        except FileNotFoundError:
            status = STARTING
        cluster, pid = self._plan.config.cluster, self._child.pid if self._child is not None else 0
        ends = (cluster.client_endpoint, cluster.admin_endpoint)
        plan = self._plan
        return msgspec.json.encode(
            NodeReport(plan.address, plan.asked, plan.coordinator, *ends, pid, status, self._exit_code)
        )

    def stop(self, deadline_s: float) -> bool:
        """End all processes of the node; whether they have ended. Requests may run on for `deadline_s` where the
        coordinator is."""
        write_atomically(self._directory / DEADLINE_FILE, str(deadline_s).encode())
        self._is_stopping = True
        child = self._child
        if child is not None and not self._ended.is_set():
            child.signal(signal.SIGTERM)
        return self._ended.wait(deadline_s + STOP_LIMIT_S)

    def _keep(self) -> None:
        """Run the supervisor. It dies with this thread, which lives as long as the process."""
        restarts = Restarts()
        while True:
            began = time.monotonic()
            command = [sys.executable, "-m", "hisparse.ray.supervisor", str(self._directory), str(os.getpid())]
            (self._directory / STATUS_FILE).unlink(missing_ok=True)  # of the one before
            self._child = Child.start("supervisor", command, child_environ())
            status = self._child.process.wait()
            self._child.close()
            pause_s = restarts.after(time.monotonic() - began) if status < 0 and not self._is_stopping else None
            if pause_s is None:
                self._exit_code = status
                self._ended.set()
                return
            time.sleep(pause_s)
