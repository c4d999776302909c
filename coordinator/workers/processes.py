"""Processes of this machine by what tells them apart for ever: id, moment of their start, boot. Linux.

A process id alone is reused. Start and boot are read once, while the process lives, and kept in the journal: a later
life of the coordinator can prove from them that the process is gone, also after the machine was booted anew (I2).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

import trio

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class Process(NamedTuple):
    """`id` 0: nobody's. `started` in clock ticks after the boot of `boot`; 0: could not be read, proves nothing."""

    id: int
    started: int = 0
    boot: str = ""


def process_of(process_id: int) -> Process:
    """The process that has this id now."""
    try:
        after_name = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        return Process(process_id, int(after_name[19]), BOOT_ID.read_text().strip())
    except (OSError, ValueError, IndexError):
        return Process(process_id)


def has_ended(process: Process) -> bool:
    """Whether `process` is proved gone: another one has its id, or nobody, or the machine was booted since."""
    return process.started > 0 and process_of(process.id) != process


async def wait_exit(process: int) -> None:
    """Until `process` has exited; one that is not there has."""
    try:
        pidfd = os.pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
