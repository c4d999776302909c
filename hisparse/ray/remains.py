"""Processes that an earlier supervisor of this node left, by a file of what it started.

A supervisor that was killed takes no leave of its processes. The next one on the node ends what still runs, and sees it
end by a pidfd. A process is known by its id, its start and the machine's boot: after a boot all are gone.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import trio

from basics.processes import Process, has_ended, wait_exit
from hisparse.cluster.children import KILL_LIMIT_S
from protocol.errors import InternalError

FILE_MODE: Final = 0o600


class Remains(msgspec.Struct, frozen=True):
    """`processes` by name; `journal`: path of the one that knows what is in their host pool."""

    processes: dict[str, Process]
    journal: str = ""


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file at `path`, readable by its owner alone."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb") as file:
        file.write(data)
    partial.replace(path)


def note(path: Path, processes: Mapping[str, Process], journal: str) -> None:
    """Write what was started. A process is identified when it starts: later its id may be another's."""
    write_atomically(path, msgspec.json.encode(Remains(dict(processes), journal)))


def read(path: Path) -> Remains | None:
    """What was written there; None: nothing, or no such file. Raises OSError when it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Remains)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


async def end_all(found: Remains) -> None:
    """Kill what still runs; returns once each has ended. Raises InternalError after KILL_LIMIT_S."""
    with trio.move_on_after(KILL_LIMIT_S) as scope:
        for process in found.processes.values():
            await _end(process)
    if scope.cancelled_caught:
        raise InternalError(f"processes of an earlier supervisor still run {KILL_LIMIT_S:g} s after SIGKILL")


async def _end(process: Process) -> None:
    if _send(process, signal.SIGKILL):
        await wait_exit(process.id)


def runs(process: Process) -> bool:
    """Whether `process` runs. One that has ended and was not waited for does not."""
    with _opened(process) as pidfd:
        return pidfd is not None and not select.select([pidfd], [], [], 0)[0]


def ask_to_stop(process: Process) -> None:
    """SIGTERM to `process`, unless it has ended."""
    _send(process, signal.SIGTERM)


def _send(process: Process, number: signal.Signals) -> bool:
    """Whether the signal was sent: `process` runs."""
    with _opened(process) as pidfd:
        if pidfd is None:
            return False
        try:
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        return True


@contextmanager
def _opened(process: Process) -> Iterator[int | None]:
    """A descriptor of `process`, which is identified through it; None where it has ended."""
    if process.started == 0:  # it had ended before it was identified
        yield None
        return
    try:
        pidfd = os.pidfd_open(process.id)
    except ProcessLookupError:
        yield None
        return
    try:
        yield None if has_ended(process) else pidfd
    finally:
        os.close(pidfd)
