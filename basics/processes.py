"""Processes of this machine, identified uniquely by process id, start time and boot id. Linux.

A process id alone is reused. Start and boot are read once, while the process runs, and kept in the journal. From them a
later incarnation of the coordinator can prove that the process is gone, also after a reboot of the machine (I2).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

import trio

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class Process(NamedTuple):
    """`id` 0: unknown process. `started`: clock ticks after boot `boot`; 0: could not be read, so it proves nothing."""

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
    """Whether `process` is proved gone: no process has its id, or another one has, or the machine was rebooted."""
    return process.started > 0 and process_of(process.id) != process


async def wait_exit(process: int) -> None:
    """Return once process id `process` has exited or does not exist. Cancellable."""
    try:
        pidfd = os.pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
