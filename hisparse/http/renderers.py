"""Processes that render chat templates, each bounded in memory and in time.

    reader thread ── length, request ──► process: RLIMIT_AS, an alarm for each request ── length, reply ──► thread

A thread cannot be stopped, and one operation of a template on a client's value can take gigabytes. A process that
reaches a limit is gone, and so is the request that it rendered; the next one gets another process. Processes are
started when they are needed, and end with the front: their input ends, or the alarm comes. One that had much to render
ends, too, with the memory that it took.

Rejected: refusing the operations that grow (`*`, `indent`, `center`, `format`, ...): Jinja and str have too many.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, Any, Final

import msgspec

from hisparse.http.chat import refused, render
from protocol.errors import BadInput

#: For one conversation: to render it, and address space for it.
RENDER_LIMIT_S: Final = 10.0
MEMORY_BYTES_MAX: Final = 512 * 1024 * 1024
#: Of a request and its reply, after which a process is used again.
KEPT_BYTES_MAX: Final = 1024 * 1024

_LENGTH: Final = struct.Struct("<I")


class RenderRequest(msgspec.Struct, frozen=True, array_like=True):
    template: str
    messages: list[dict[str, str]]
    variables: dict[str, Any]
    bytes_max: int


class RenderReply(msgspec.Struct, frozen=True, array_like=True):
    """`refusal` is empty when `text` is the prompt."""

    text: str
    refusal: str


class Renderers:
    """Any number of threads may render at once; each has a process for itself meanwhile."""

    def __init__(self, limit_s: float = RENDER_LIMIT_S, memory_bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self._command = [sys.executable, "-m", __name__, str(limit_s), str(memory_bytes_max)]
        self._limits = f"{limit_s:g} s or {memory_bytes_max >> 20} MiB"
        self._idle: list[subprocess.Popen[bytes]] = []

    def render(
        self, template: str, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any], bytes_max: int
    ) -> str:
        """As chat.render, within limits. Raises BadInput."""
        request = RenderRequest(template, [dict(message) for message in messages], dict(variables), bytes_max)
        data = msgspec.msgpack.encode(request)
        process = self._idle.pop() if self._idle else self._start()
        reply = _asked(process, data)
        if reply is None:
            _end(process)
            raise refused(f"the model's chat template takes more than {self._limits} for them", len(messages))
        if len(data) + len(reply) > KEPT_BYTES_MAX:
            _end(process)
        else:
            self._idle.append(process)
        answer = msgspec.msgpack.decode(reply, type=RenderReply)
        if answer.refusal:
            raise refused(answer.refusal, len(messages))
        return answer.text

    def close(self) -> None:
        """While nothing renders."""
        while self._idle:
            _end(self._idle.pop())

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _asked(process: subprocess.Popen[bytes], request: bytes) -> bytes | None:
    """The reply, whose size the process bounds; None when it has ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _write(process.stdin, request)
        return _read(process.stdout)
    except OSError:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _write(file: IO[bytes], data: bytes) -> None:
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


def main() -> None:
    """Render what comes in, until nothing does."""
    limit_s, memory_bytes_max = float(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes_max, memory_bytes_max))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the front ends this process when it ends
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    while (data := _read(requests)) is not None:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        reply = msgspec.msgpack.encode(_rendered(data))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(replies, reply)


def _rendered(data: bytes) -> RenderReply:
    request = msgspec.msgpack.decode(data, type=RenderRequest)
    try:
        text = render(request.template, request.messages, request.variables, request.bytes_max, _strftime_now)
        text.encode()
    except (BadInput, UnicodeEncodeError) as error:
        return RenderReply("", error.message if isinstance(error, BadInput) else str(error))
    return RenderReply(text, "")


def _strftime_now(form: str) -> str:
    return datetime.now(UTC).strftime(form)


if __name__ == "__main__":
    main()
