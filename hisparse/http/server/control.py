"""The front's control socket: `hisparse reload http` asks for its API keys and TLS files to be read again.

Each front listens at RUNTIME_DIR/http-PID.sock, in a directory that only its user may enter. One question is one
connection: the line `reload`, answered by one JSON object, `Reloaded`, and the end. Without a runtime directory that
can be made the front serves all the same, and only SIGHUP is left.

Rejected: a relay through the coordinator, which a front may have lost, and whose clients it would have to tell apart;
a path of the HTTP port, which every client with a key reaches; only SIGHUP, which `docker compose kill` cannot send
without the engine taking it for a stop by hand.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import trio

from protocol.errors import ConfigError, Unavailable
from protocol.logs import fields, logger
from protocol.transport.private_dir import check_private_dir, make_private_dir

PATTERN: Final = "http-*.sock"
RELOAD: Final = b"reload\n"
#: Of one answer.
ANSWER_BYTES_MAX: Final = 64 * 1024
#: Longest time of one question, on both sides.
QUESTION_LIMIT_S: Final = 10.0
BACKLOG: Final = 4

log = logger("http")


class Reloaded(msgspec.Struct, frozen=True):
    """One line for each kind of file: `lines` were read, `errors` were not, and what was read before holds."""

    lines: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


# ---------------------------------------------------------------- the front's side


@contextmanager
def control_socket(runtime_dir: str) -> Iterator[socket.socket | None]:
    """A listening socket in `runtime_dir`, removed at the end. None, and a line in the log, where there can be none."""
    path = Path(runtime_dir) / f"http-{os.getpid()}.sock"
    listener = socket.socket(socket.AF_UNIX)
    try:
        make_private_dir(runtime_dir)
        remove_stale(Path(runtime_dir))
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except (ConfigError, OSError) as error:
        listener.close()
        log.warning("no control socket: only SIGHUP makes this front read its files again", extra=fields(error=error))
        yield None
        return
    try:
        yield listener
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def remove_stale(directory: Path) -> None:
    """Remove sockets of fronts whose process is gone."""
    for path in directory.glob(PATTERN):
        pid = path.stem.removeprefix("http-")
        if pid.isdecimal() and not Path("/proc", pid).exists():
            path.unlink(missing_ok=True)


async def serve_control(listener: socket.socket, reload: Callable[[], Reloaded]) -> None:
    """Answer one question at a time, until cancelled. `reload` raises nothing."""
    accepting = trio.socket.from_stdlib_socket(listener)
    while True:
        connection, _ = await accepting.accept()
        with trio.move_on_after(QUESTION_LIMIT_S), suppress(OSError, trio.BrokenResourceError):
            async with trio.SocketStream(connection) as stream:
                if await stream.receive_some(len(RELOAD)) == RELOAD:
                    await stream.send_all(msgspec.json.encode(reload()))


# ---------------------------------------------------------------- the side of `hisparse reload http`


def reload_fronts(runtime_dir: str) -> dict[str, Reloaded]:
    """Ask every front of `runtime_dir`; answers by the front's process, as in "http 4711". Raises Unavailable when none
    is there or one does not answer, and ConfigError when other users could have made the directory."""
    check_private_dir(runtime_dir, missing_ok=True)
    paths: Sequence[Path] = sorted(Path(runtime_dir).glob(PATTERN))
    answers = {}
    for path in paths:
        with suppress(ConnectionRefusedError, FileNotFoundError):  # its front is gone
            answers[path.stem.replace("-", " ")] = _ask(path)
    if not answers:
        remedy = "run this where the front runs, with the same --runtime-dir"
        raise Unavailable("no HTTP front listens there", field="cluster.runtime_dir", value=runtime_dir, remedy=remedy)
    return answers


def _ask(path: Path) -> Reloaded:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(QUESTION_LIMIT_S)
        try:
            connection.connect(str(path))
            connection.sendall(RELOAD)
            answer = b""
            while len(answer) <= ANSWER_BYTES_MAX and (part := connection.recv(ANSWER_BYTES_MAX)):
                answer += part
            return msgspec.json.decode(answer, type=Reloaded)
        except (TimeoutError, ConnectionResetError, BrokenPipeError, msgspec.DecodeError) as error:
            remedy = "look at its /healthz and its log"
            raise Unavailable(
                f"the HTTP front did not answer within {QUESTION_LIMIT_S:g} s: {error}",
                field="control socket",
                value=path,
                remedy=remedy,
            ) from error
