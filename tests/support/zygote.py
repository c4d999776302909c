"""Processes that begin with torch and the model library imported: forked from one that has done it once.

    pytest ── a job, three descriptors ──► zygote ── fork ──► middle ── fork ──► the process
       ▲                                                      ends at once          │
       └─────────── parent, while it was the reaper of orphans ─────────────────────┘

Importing both takes 4 s of CPU time, most of what a worker with a tiny checkpoint needs to start; what a coordinator
imports takes 0.5 s, and a command 0.3 s. So processes of pytest-xdist are forked too, each with a zygote of its own
that is forked from it at its start. A process that is forked runs the same module with the same arguments,
environment and descriptors as one that is executed, and pytest is its parent. Its command line and /proc/PID/environ
are the zygote's. A command that starts a cluster, and is forked, first forks a zygote of its own, from which its
children are forked in turn. Processes that are executed are tested elsewhere. An HTTP front is always executed: it has
no torch.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from types import SimpleNamespace
from typing import Any, Final, NoReturn

from hisparse.cluster import children
from tests import ROOT

#: What runs in processes that are forked, as any worker does, unless it is an HTTP front.
MODULES: Final = (
    "benchmarks.serve",
    "hisparse.cli",
    "hisparse.ray.supervisor",
    "tests.support.group_rig",
    "tests.support.slow_demo",
    "tests.support.standing",
)
STANDING: Final = "tests.support.standing"
#: A process of pytest-xdist: what execnet would execute, run by this module.
XDIST: Final = "tests.support.xdist_process"
#: Of a zygote whose processes run tests.
COLLECT: Final = "collect"
WORKER: Final = "worker"
FRONT: Final = "http"
#: Commands that start a cluster, and modules that do.
STARTERS: Final = frozenset({"up", "demo", "hisparse.ray.supervisor", "benchmarks.serve"})
#: prctl(2): whether orphans among the descendants become children of this process.
PR_SET_CHILD_SUBREAPER: Final = 36
MODULE: Final = "-m"
#: Of the check at start that rows of a batch are apart, which others test: a full one takes 0.7 s of CPU time.
TRIALS: Final = 1
JOB_BYTES_MAX: Final = 1 << 17
#: Descriptors that a forked process is given; they are moved above PLACES_MAX before they come to their places.
DESCRIPTORS_MAX: Final = 16
PLACES_MAX: Final = 1_000


class Zygote:
    """Ends once this process has closed `connection`, or has ended."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def fork(self, command: Sequence[str], environ: Mapping[str, str], descriptors: Sequence[int], **how: Any) -> int:
        """The number of a new child of this process, which runs `python -m MODULE ...`, as `command` says."""
        job = {"argv": [*command[2:]], "environ": dict(environ), "parent": os.getpid(), **how}
        libc = ctypes.CDLL(None)
        with self._lock:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [json.dumps(job).encode()], descriptors)
                return int(self._connection.recv(99))
            finally:
                libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


#: The zygote of this process, once it has one.
_own: list[Zygote] = []


def zygote(*options: str) -> Zygote:
    """Return that of this process, executed with `options` when it is first needed."""
    if not _own:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen(
                [sys.executable, MODULE, __name__, str(theirs.fileno()), *options],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            )
        _own.append(Zygote(ours))
    return _own[0]


class Forked(subprocess.Popen[Any]):
    """As subprocess.Popen, of a command `python -m MODULE ...`."""

    def _execute_child(
        self,
        args: Sequence[str],
        executable: object,
        preexec_fn: object,
        close_fds: object,
        pass_fds: Sequence[int],
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
        environ, places = os.environ if env is None else env, [0, 1, 2, *pass_fds]
        how = {"cwd": str(cwd or os.getcwd()), "new_session": new_session, "places": places}
        self.pid = zygote().fork(args, environ, [*given, *pass_fds], **how)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start `command`: forked where it is a worker or of MODULES, no HTTP front, and runs the code of this tree.

    The zygote has imported its modules already, so that a forked process would ignore another tree in PYTHONPATH.
    """
    is_module = [*command[:2]] == [sys.executable, MODULE] and (command[2] in MODULES or WORKER in command[3:])
    environ = options.get("env") or os.environ
    is_ours = environ.get("PYTHONPATH", "").split(os.pathsep)[0] in ("", str(ROOT))
    is_forked = is_module and is_ours and FRONT not in command[3:4]
    return Forked(command, **options) if is_forked else subprocess.Popen(command, **options)


#: In place of the module `subprocess` of hisparse.cluster.children.
FORKING: Final = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)


def run(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end as `start` does; its output as text. Raises subprocess.TimeoutExpired."""
    with start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


# ---------------------------------------------------------------- the zygote


def main() -> None:
    gc.disable()  # what is imported lives on: a seventh of the time
    from transformers import DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM  # noqa: F401  # their modules are lazy

    import coordinator.service  # noqa: F401
    import hisparse.cli
    import hisparse.cluster.supervision
    import hisparse.cluster.up  # noqa: F401
    import tests.support.worker_rig  # noqa: F401
    import worker.group.group
    import worker.process
    import worker.runners.transformers_dsa  # noqa: F401

    if COLLECT in sys.argv:
        import_tests()
    gc.collect()
    gc.freeze()  # a collection in a forked process, also at its end, would copy all of this memory: 1.4 s of CPU time
    gc.enable()
    serve(socket.socket(fileno=int(sys.argv[1])))


def import_tests(*paths: str) -> None:
    """Import all test modules, or those in `paths`, as pytest does, with assertions rewritten: a pytest that runs in a
    forked process finds them imported.

    An error is that of the processes to report, which collect again.
    """
    import pytest

    with redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", "--quiet", "--capture=no", "-p", "no:cacheprovider", *paths])


def serve(connection: socket.socket) -> None:
    """Fork a process for each job; returns once there are no more jobs."""
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads is not to be forked"
    with connection:
        while True:
            job, descriptors, _, _ = socket.recv_fds(connection, JOB_BYTES_MAX, DESCRIPTORS_MAX)
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


def fork_own() -> None:
    """Give this process, which has one thread, a zygote of its own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        serve(theirs)
        sys.exit()
    theirs.close()
    _own[:] = [Zygote(ours)]


def become(job: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Run a job in this process, once its parent is the process that asked; ends with that one."""
    while os.getppid() != job["parent"]:
        if not os.path.exists(f"/proc/{job['parent']}"):
            os._exit(1)
        time.sleep(0.001)
    if job["argv"][0] != STANDING:  # which others of the run use
        ctypes.CDLL(None).prctl(children.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if job["new_session"]:
        os.setsid()
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, PLACES_MAX) for number in descriptors]
    for number in descriptors:
        os.close(number)
    for place, number in zip(job["places"], moved, strict=True):
        os.dup2(number, place)
        os.close(number)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environ"])
    sys.argv = job["argv"]
    if job["argv"][0] == XDIST:
        end_as_interpreter(XDIST)
    if job["argv"][0] == STANDING:
        rest_longer()
    if STARTERS & {*job["argv"][:2]}:
        fork_own()
        vars(children)["subprocess"] = FORKING  # of the cluster that it starts
    from worker.runners import invariance

    vars(invariance)["TRIALS"] = TRIALS
    end_as_interpreter(job["argv"][0])


def rest_longer() -> None:
    """Let this process, and what is forked from it, look around seldom while there is no work: three clusters that
    stand for a whole run take an eighth of a core otherwise."""
    from basics import gc_policy
    from coordinator.listener import sweeper
    from worker.loop import executor

    vars(gc_policy)["YOUNG_INTERVAL_S"] = 1.0
    vars(sweeper)["GROWTH_INTERVAL_S"] = sweeper.SWEEP_INTERVAL_S
    vars(executor)["IDLE_S"] = 0.5


def end_as_interpreter(module: str) -> NoReturn:
    """Run `module`, and end as the interpreter does, but without taking its objects down: 0.3 s of CPU time."""
    code: object = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    main()
