"""Child processes that never outlive their parent, and whose exit is seen at once.

    parent           child
    Child.start  ->  runs in a new session: Ctrl-C in the terminal reaches only the parent, which decides the order of
                     stopping; it gets one SIGTERM when the parent dies (`stop_with_parent`)
    Child.order  ->  one line on the standard input of a child that waits for it; the end of the input is the parent's
    Child.wait   <-  its exit, by a pidfd: no SIGCHLD handler, no polling, no thread per child
    stop_children    SIGTERM, a grace period, SIGKILL

Rejected: trio.run_process, which forks in a worker thread; the parent-death signal fires when that *thread* ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import trio

import hisparse
from protocol.config import ENVIRONMENT_PREFIX, KERNEL_CACHE_VARIABLE
from protocol.errors import InternalError, Unavailable
from protocol.start_and_end import read_reason, step_of

#: prctl(2): the signal for a process when the thread that started it ends.
PR_SET_PDEATHSIG: Final = 1
#: What the kernel sends when the parent ends, in `stop_with_parent`.
PARENT_ENDED: Final = signal.SIGUSR1
#: Option of a command, with the descriptor of a file for the reason of its end.
REASON_FLAG: Final = "--reason-fd"
#: Size of the end of a log that is shown when its child died.
TAIL_BYTES: Final = 4_096
TAIL_LINES: Final = 12
#: Time for the kernel to end a child after SIGKILL, which frees its mappings first.
KILL_LIMIT_S: Final = 30.0


def stop_with_parent(parent_pid: int) -> None:
    """Have this process sent one SIGTERM when the parent ends. Raises Unavailable when it has ended already.

    The kernel tells the end of a parent that was killed once for each of its threads: a child passes from thread to
    thread as they end. A second SIGTERM would be an order to end at once.
    """
    told = False

    def tell_once(*_: object) -> None:
        nonlocal told
        if not told:
            told = True
            signal.raise_signal(signal.SIGTERM)

    signal.signal(PARENT_ENDED, tell_once)
    die_with_parent(parent_pid, PARENT_ENDED)


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for a signal when the parent ends. Raises Unavailable when it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise InternalError(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        raise Unavailable("the parent process has ended", field="die-with", value=parent_pid)


class Code(msgspec.Struct, frozen=True):
    """The code that a child runs: an interpreter, by default this process's, and the folder of the packages."""

    python: str = sys.executable
    root: str = str(Path(hisparse.__file__).resolve().parents[1])


def child_environ(code: Code = Code()) -> dict[str, str]:  # noqa: B008 - it is frozen
    """Environment for a child: this process's, without settings but the folder of kernels, with the path of `code`.

    The working directory is not on the child's path: a `kernels/` there would hide the package of that name.
    """
    kept = (name for name in os.environ if not name.startswith(ENVIRONMENT_PREFIX) or name == KERNEL_CACHE_VARIABLE)
    environ = {name: os.environ[name] for name in kept}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (code.root, environ.get("PYTHONPATH", ""))))
    environ["PYTHONSAFEPATH"] = "1"
    return environ


@dataclass(frozen=True)
class Child:
    """A running child. Owns its pidfd; `wait` may be called by any number of tasks and any number of times."""

    name: str
    process: subprocess.Popen[bytes]
    pidfd: int
    log_path: Path | None
    reason_fd: int | None = None

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        log_path: Path | None = None,
        *,
        inherited: Sequence[int] = (),
        takes_orders: bool = False,
        gives_reason: bool = False,
    ) -> Child:
        """Start `command`. Its output goes to `log_path`, by default to the parent's stderr; it has the descriptors
        `inherited` under their numbers. `takes_orders`: its standard input is a pipe that `order` writes to.
        `gives_reason`: `command` takes REASON_FLAG, and leaves there why it ends (protocol.start_and_end)."""
        reason_fd = os.memfd_create("reason") if gives_reason else None
        if reason_fd is not None:
            command, inherited = [*command, REASON_FLAG, str(reason_fd)], [*inherited, reason_fd]
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if log_path else None
        try:
            process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.PIPE if takes_orders else subprocess.DEVNULL,
                stdout=2 if log is None else log,
                stderr=log,
                start_new_session=True,
                pass_fds=inherited,
            )
        finally:
            if log is not None:
                os.close(log)
        return cls(name, process, os.pidfd_open(process.pid), log_path, reason_fd)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def step(self) -> str:
        """The step of its start, as the process itself tells it (protocol.start_and_end)."""
        return step_of(self.pid)

    @property
    def reason(self) -> str:
        """Cause of its end, as it has said itself; empty where it has not."""
        return "" if self.reason_fd is None else read_reason(self.reason_fd)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def end_text(self, status: int) -> str:
        """Return `exit_text` of the status, with the reason that it left."""
        return ": ".join(filter(None, (exit_text(status), self.reason)))

    async def wait(self) -> int:
        """Wait for the exit; returns the status, negative for a signal that ended it. Cancelled: nothing changes."""
        await trio.lowlevel.checkpoint_if_cancelled()
        pidfd = os.dup(self.pidfd)  # trio lets one task wait on a descriptor
        try:
            while self.process.poll() is None:
                await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)
        return int(self.process.returncode)

    def signal(self, number: signal.Signals) -> None:
        if self.running:
            self.process.send_signal(number)

    def order(self) -> bool:
        """Write the order that a child with `takes_orders` waits for; False: it has ended."""
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(b"\n")
            stdin.flush()
        except OSError:
            return False
        return True

    def tail(self) -> str:
        """The last lines of its log; empty without `log_path`."""
        if self.log_path is None:
            return ""
        with self.log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def close(self) -> None:
        if self.process.stdin is not None:
            with suppress(OSError):  # what an ended child has not read
                self.process.stdin.close()
        os.close(self.pidfd)
        if self.reason_fd is not None:
            os.close(self.reason_fd)


def exit_text(status: int) -> str:
    """-9 -> "killed by SIGKILL", 70 -> "exited with 70"."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"


async def wait_all(children: Sequence[Child], limit_s: float) -> bool:
    """Wait until every child has ended; False when `limit_s` passed first."""
    with trio.move_on_after(limit_s) as scope:
        for child in children:
            await child.wait()
    return not scope.cancelled_caught


async def stop_children(children: Sequence[Child], grace_s: float) -> None:
    """SIGTERM to all, then SIGKILL to those still running after `grace_s`. Cancelled: SIGKILL to all at once.

    Raises InternalError when a child still runs KILL_LIMIT_S after SIGKILL.
    """
    try:
        for child in children:
            child.signal(signal.SIGTERM)
        await wait_all(children, grace_s)
    finally:
        for child in children:
            child.signal(signal.SIGKILL)
        with trio.CancelScope(shield=True):
            all_ended = await wait_all(children, KILL_LIMIT_S)
    if not all_ended:
        stuck = ", ".join(f"{child.name} ({child.pid})" for child in children if child.running)
        raise InternalError(f"still running {KILL_LIMIT_S:g} s after SIGKILL: {stuck}")
