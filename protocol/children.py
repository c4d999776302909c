"""Processes that work for threads of another process, each bounded in memory and in time.

    thread ── frames, each with its length ──► process: RLIMIT_AS, an alarm for each request ── a frame ──► thread

A thread cannot be stopped, and keeps the interpreter for as long as one operation on a large value takes. A process
that reaches a limit is gone, and its request is refused; the next one gets another process. A process that has ended
while it was idle, as when the kernel needed its memory, is replaced. Processes are started when they are needed, and
end with the process that started them: their input ends, or the alarm comes.

Address space counts as memory, so that numpy's OpenBLAS must not take 41 MiB of it for each core.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO, Final, TypeAlias

Buffer: TypeAlias = bytes | bytearray

_LENGTH: Final = struct.Struct("<I")
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Children:
    """Any number of threads may ask at once; each has a process for itself meanwhile. `kept_bytes_max`: of a request
    and its reply, after which a process is used again; past that it ends, with the memory that it took."""

    def __init__(self, module: str, limit_s: float, memory_bytes_max: int, kept_bytes_max: int) -> None:
        self.limits = f"{limit_s:g} s or {memory_bytes_max >> 20} MiB"
        self._command = [sys.executable, "-m", module, str(limit_s), str(memory_bytes_max)]
        self._kept_bytes_max = kept_bytes_max
        self._idle: list[subprocess.Popen[bytes]] = []

    def ask(self, *frames: Buffer) -> bytes | None:
        """The reply, whose size the process bounds; None when it has reached a limit. Raises OSError where no process
        can be started."""
        process = self._told(frames)
        assert process.stdout is not None
        reply = _read(process.stdout)
        if reply is None or sum(map(len, frames)) + len(reply) > self._kept_bytes_max:
            _end(process)
        else:
            self._idle.append(process)
        return reply

    def close(self) -> None:
        """End those that are idle: all, while none is asked."""
        with suppress(IndexError):
            while True:
                _end(self._idle.pop())

    def _told(self, frames: tuple[Buffer, ...]) -> subprocess.Popen[bytes]:
        """A process that has `frames`: an idle one, or a new one where there is none or it has ended."""
        with suppress(IndexError):
            process = self._idle.pop()
            if _tell(process, frames):
                return process
            _end(process)
        process = self._start()
        _tell(process, frames)  # where it has ended, its output has too
        return process

    def _start(self) -> subprocess.Popen[bytes]:
        environ = os.environ | _ONE_THREAD
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)


def _tell(process: subprocess.Popen[bytes], frames: tuple[Buffer, ...]) -> bool:
    """Whether `process` was there to take `frames`."""
    assert process.stdin is not None
    try:
        for frame in frames:
            _write(process.stdin, frame)
    except OSError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _write(file: IO[bytes], data: Buffer) -> None:
    file.write(_LENGTH.pack(len(data)))
    file.write(data)
    file.flush()


def _read(file: IO[bytes]) -> bytes | None:
    """None: the other side has ended."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    data = file.read(size)
    return data if len(data) == size else None


# ---------------------------------------------------------------- the process


def serve(answer: Callable[..., bytes], frames: int, stack_bytes: int = 0) -> None:
    """Give each request, of that many frames, to `answer`, until none comes. In the process. `stack_bytes`: of the
    thread in which `answer` runs; 0: it runs in the main thread."""
    limit_s, memory_bytes_max = float(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes_max, memory_bytes_max))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: who started this process ends it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    work = partial(_serve, answer, frames, limit_s)
    if stack_bytes:
        threading.stack_size(stack_bytes)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    else:
        work()


def _serve(answer: Callable[..., bytes], frames: int, limit_s: float) -> None:
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    while (first := _read(requests)) is not None:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        reply = answer(first, *(_read(requests) for _ in range(frames - 1)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(replies, reply)
