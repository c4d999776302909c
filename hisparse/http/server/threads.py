"""How the front's process shares memory and the interpreter among its clients.

Memory of large bodies is given back when they are done. glibc learns from each large buffer that is freed to keep the
next ones, up to 32 MiB, and gives each thread an arena of its own; both are switched off. Small buffers of connections
lie between others, and what they leave free stays with the process: every few seconds it is returned. A front with TLS
that had 1,000 connections kept 33 MiB of 105 for nothing (2 to 3 ms to return it; 0.1 ms where there is nothing).

The loop waits less for the interpreter: each time that it has looked for I/O, several times for each answer, a thread
that reads a body may keep it for SWITCH_INTERVAL_S, not for Python's 5 ms.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from typing import Final

import trio

from basics.process_memory import map_large_buffers, return_memory

SWITCH_INTERVAL_S: Final = 0.0005
ARENAS_MAX: Final = 2
#: How often free memory is returned to the system.
RETURN_INTERVAL_S: Final = 5.0
#: Of mallopt(3).
M_ARENA_MAX: Final = -8


def share_fairly() -> None:
    """At the start of the process. Other C libraries than glibc are left as they are."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    map_large_buffers()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS_MAX)


async def return_free_memory() -> None:
    """Every RETURN_INTERVAL_S, until cancelled."""
    while True:
        await trio.sleep(RETURN_INTERVAL_S)
        return_memory()
