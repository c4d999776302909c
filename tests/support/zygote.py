"""Processes that begin with torch and the model library imported: forked from one that has done it once.

    pytest ── a job, three descriptors ──► zygote ── fork ──► middle ── fork ──► the process
       ▲                                                      ends at once          │
       └─────────── parent, while it was the reaper of orphans ─────────────────────┘

Importing both takes 4 s of CPU time, most of what a worker with a tiny checkpoint needs to start. A process that is
forked runs the same module with the same arguments, environment and descriptors as one that is executed, and pytest is
its parent. Its command line and /proc/PID/environ are the zygote's. Processes that are executed are tested elsewhere.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from tests import ROOT

#: prctl(2): whether orphans among the descendants become children of this process.
PR_SET_CHILD_SUBREAPER: Final = 36
MODULE: Final = "-m"
JOB_BYTES_MAX: Final = 1 << 17


class Zygote:
    """Ends with this process."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, MODULE, __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            )

    def fork(self, command: Sequence[str], environ: Mapping[str, str], descriptors: Sequence[int], **how: Any) -> int:
        """The number of a new child of this process, which runs `python -m MODULE ...`, as `command` says."""
        job = {"argv": [*command[2:]], "environ": dict(environ), "parent": os.getpid(), **how}
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._connection, [json.dumps(job).encode()], descriptors)
            return int(self._connection.recv(99))
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@cache
def zygote() -> Zygote:
    return Zygote()


class Forked(subprocess.Popen[Any]):
    """As subprocess.Popen, of a command `python -m MODULE ...`."""

    def _execute_child(
        self,
        args: Sequence[str],
        executable: object,
        preexec_fn: object,
        close_fds: object,
        pass_fds: object,
        cwd: object,
        env: Mapping[str, str] | None,
        startupinfo: object,
        creationflags: object,
        shell: object,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        *others: object,
    ) -> None:
        new_session = bool(others[5])
        given = [fd if fd != -1 else place for place, fd in enumerate((p2cread, c2pwrite, errwrite))]
        environ = os.environ if env is None else env
        self.pid = zygote().fork(args, environ, given, cwd=str(cwd or os.getcwd()), new_session=new_session)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start `command`: forked where it is a module of a worker, or of a rank, and runs the code of this tree.

    The zygote has imported its modules already, so that a forked process would ignore another tree in PYTHONPATH.
    """
    is_worker = command[:2] == [sys.executable, MODULE] and {"worker", "tests.support.group_rig"} & {*command[2:]}
    environ = options.get("env") or os.environ
    is_ours = environ.get("PYTHONPATH", "").split(os.pathsep)[0] in ("", str(ROOT))
    return Forked(command, **options) if is_worker and is_ours else subprocess.Popen(command, **options)


# ---------------------------------------------------------------- the zygote


def main() -> None:
    from transformers import DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM  # noqa: F401  # their modules are lazy

    import tests.support.worker_rig  # noqa: F401
    import worker.group.group
    import worker.process
    import worker.runners.transformers_dsa  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads is not to be forked"
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        while True:
            job, descriptors, _, _ = socket.recv_fds(connection, JOB_BYTES_MAX, 3)
            if not job:
                return
            ends = os.pipe()
            middle = os.fork()
            if not middle:
                child = os.fork()
                if child:
                    os.write(ends[1], str(child).encode())
                    os._exit(0)
                break
            os.waitpid(middle, 0)
            connection.send(os.read(ends[0], 99))
            for number in (*ends, *descriptors):
                os.close(number)
    for number in ends:
        os.close(number)
    become(json.loads(job), descriptors)


def become(job: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Run a job in this process, once its parent is pytest."""
    while os.getppid() != job["parent"]:
        time.sleep(0.001)
    if job["new_session"]:
        os.setsid()
    for place, number in enumerate(descriptors):
        os.dup2(number, place)
        os.close(number)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environ"])
    sys.argv = job["argv"]
    runpy.run_module(job["argv"][0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
