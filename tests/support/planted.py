"""`python -m tests.support.planted DEFECT COMMAND flags...`: `hisparse COMMAND`, with a defect that shows while the
file named by PLANTED_WHILE exists. For drills: what an alert waits for is caused in a real process.

    slow-disk    each write of the journal takes SLOW_S longer
    full-disk    no write of the journal succeeds
    hang         the decode loop of a worker does not turn
    lost-seat    a worker has one free seat less than the ledger says
    lone-rank    a worker says that it is one of two ranks of a group
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

PLANTED_WHILE: Final = "PLANTED_WHILE"
SLOW_S: Final = 0.3
POLL_S: Final = 0.05


def shows() -> bool:
    return Path(os.environ[PLANTED_WHILE]).exists()


def before(where: Any, name: str, act: Callable[[], None]) -> None:
    """Do `act` before each call of `where.name` while the defect shows."""
    original = getattr(where, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if shows():
            act()
        return original(*arguments, **options)

    setattr(where, name, call)


def slow_disk() -> None:
    from coordinator.journal.store import SqliteStore

    before(SqliteStore, "_write_rows", lambda: time.sleep(SLOW_S))


def full_disk() -> None:
    from coordinator.journal.store import SqliteStore

    def refuse() -> None:
        raise sqlite3.OperationalError("database or disk is full")

    before(SqliteStore, "_write_rows", refuse)


def hang() -> None:
    from worker.loop.executor import Executor

    def wait() -> None:
        while shows():
            time.sleep(POLL_S)

    before(Executor, "turn", wait)


def lost_seat() -> None:
    from worker.loop.seats import Seats

    free = Seats.free
    Seats.free = lambda seats: free(seats)._replace(seats=free(seats).seats - shows())  # type: ignore[method-assign,assignment]


def lone_rank() -> None:
    from protocol.messages import GroupMember
    from worker.link import link_state

    module: Any = link_state
    made = module.WorkerHello

    def hello(*arguments: Any, **options: Any) -> Any:
        said = made(*arguments, **options)
        return msgspec.structs.replace(said, member=GroupMember("g0", 0, 2, 1)) if shows() else said

    module.WorkerHello = hello


DEFECTS: Final[dict[str, Callable[[], None]]] = {
    "slow-disk": slow_disk,
    "full-disk": full_disk,
    "hang": hang,
    "lost-seat": lost_seat,
    "lone-rank": lone_rank,
}

if __name__ == "__main__":
    DEFECTS[sys.argv.pop(1)]()
    from hisparse.cli import main

    main(prog_name="hisparse")
