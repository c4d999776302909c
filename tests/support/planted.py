"""`python -m tests.support.planted DEFECT COMMAND flags...`: `hisparse COMMAND`, with a defect that shows while the
file named by PLANTED_WHILE exists. For drills: what an alert waits for is caused in a real process.

    slow-disk    each write of the journal takes SLOW_S longer
    full-disk    no write of the journal succeeds
    slow-steps   each decode step takes SLOW_S longer
    slow-units   each unit of a prompt takes SLOW_UNIT_S longer
    hang         the decode loop of a worker does not turn
    failing-loop the decode loop of a worker raises RuntimeError
    fault        a kernel writes to an address that is not mapped, amid a step; on a CPU the step raises. The file is
                 gone then
    no-memory    an allocation amid a step fails. The file is gone then
    lost-seat    a worker has one free seat less than the ledger says
    lone-rank    a worker says that it is one of two ranks of a group
    halted-trial a process in which a worker tries a grammar is stopped as soon as it starts. The file is gone then
    poison       the request whose id the file holds ends its worker by SIGKILL once it is admitted
    signal-at    a worker sends itself a signal at a point of its life. The file says which, as in "w1 exchange 9":
                 start (it has met its group), prompt (a round of prompts), decode (a step), exchange (its rows have
                 gone to its peers, and its sums have not), leave (a request leaves it); tell, hear, split (a pass that
                 ranks split opens on its owner, on another rank; a unit of it). The file is gone before

These need no file:

    endless-flush   a worker that is to end waits an hour for the last report's acknowledgement
    brief-meeting   ranks wait 1 s for each other
    stuck           a worker ends at once, unclean, and leaves a thread that waits for ever
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

PLANTED_WHILE: Final = "PLANTED_WHILE"
SLOW_S: Final = 0.3
SLOW_UNIT_S: Final = 1.0
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


def slow_steps() -> None:
    from worker.loop.executor import Executor

    before(Executor, "_launch_step", lambda: time.sleep(SLOW_S))


def slow_units() -> None:
    from worker.runners.transformers_dsa import TransformersRunner

    before(TransformersRunner, "launch_unit", lambda: time.sleep(SLOW_UNIT_S))


def hang() -> None:
    from worker.loop.executor import Executor

    def wait() -> None:
        while shows():
            time.sleep(POLL_S)

    before(Executor, "turn", wait)


def failing_loop() -> None:
    from worker.loop.executor import Executor

    def fail() -> None:
        raise RuntimeError("planted\nin a turn")

    before(Executor, "turn", fail)


def once(where: Any, name: str, act: Callable[[], None]) -> None:
    """Do `act` as `before` does, in one process alone: the file is gone ahead of it."""

    def take() -> None:
        try:
            Path(os.environ[PLANTED_WHILE]).unlink()
        except FileNotFoundError:  # another worker took it
            return
        act()

    before(where, name, take)


def fault() -> None:
    import torch

    from worker.loop.executor import Executor

    def write_amiss() -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("planted: an illegal memory access was encountered")
        source = 'extern "C" __global__ void fault() { *reinterpret_cast<volatile int*>(16) = 1; }'
        torch.cuda._compile_kernel(source, "fault")(grid=(1, 1, 1), block=(1, 1, 1), args=[])

    once(Executor, "_launch_step", write_amiss)


def no_memory() -> None:
    import torch

    from worker.loop.executor import Executor

    def allocate() -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.empty(1 << 50, dtype=torch.uint8, device=device)

    once(Executor, "_launch_step", allocate)


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


def halted_trial() -> None:
    from protocol.children import Children

    start = Children._start

    def started(children: Children) -> Any:
        process = start(children)
        if shows():
            process.send_signal(signal.SIGSTOP)
            Path(os.environ[PLANTED_WHILE]).unlink()
        return process

    Children._start = started  # type: ignore[method-assign,assignment]


def poison() -> None:
    from worker.loop.executor import Executor

    admit = Executor._admit

    def admitted(executor: Executor, asked: Any) -> None:
        admit(executor, asked)
        if shows() and asked.request_id == Path(os.environ[PLANTED_WHILE]).read_text():
            signal.raise_signal(signal.SIGKILL)

    Executor._admit = admitted  # type: ignore[method-assign,assignment]


def signal_at() -> None:
    import worker.process
    from worker.group.exchange import ProcessGroupCollectives
    from worker.loop.executor import Executor
    from worker.loop.guests import Guests
    from worker.runners.transformers_dsa import TransformersRunner

    def send(point: str) -> None:
        path = Path(os.environ[PLANTED_WHILE])
        try:
            name, where, number = path.read_text().split()
        except (FileNotFoundError, ValueError):  # another worker took it, or it is being written
            return
        if (name, where) == (os.environ["HISPARSE_WORKER_NAME"], point):
            path.unlink()
            signal.raise_signal(int(number))

    points: tuple[tuple[str, Any, str], ...] = (
        ("start", worker.process, "load_runner"),
        ("prompt", Executor, "_launch_prompt_round"),
        ("decode", Executor, "_launch_step"),
        ("exchange", ProcessGroupCollectives, "all_to_all"),
        ("leave", Executor, "_leave"),
        ("tell", Guests, "tell"),
        ("hear", Guests, "begin"),
        ("split", TransformersRunner, "launch_split"),
    )
    for point, where, name in points:
        before(where, name, partial(send, point))


def endless_flush() -> None:
    from worker.link import link

    vars(link)["FLUSH_LIMIT_S"] = 3_600.0


def brief_meeting() -> None:
    from worker.group import control

    vars(control)["MEET_LIMIT_S"] = 1.0


def stuck() -> None:
    from worker import process

    class StuckWorker:
        """In place of a WorkerProcess: its thread waits, as one does for the device."""

        def __init__(self, *_: object) -> None:
            threading.Thread(target=threading.Event().wait).start()

        def run(self) -> int:
            return process.EXIT_CLEAN

        def close(self) -> bool:
            return False

    vars(process)["WorkerProcess"] = StuckWorker


DEFECTS: Final[dict[str, Callable[[], None]]] = {
    "slow-disk": slow_disk,
    "full-disk": full_disk,
    "slow-steps": slow_steps,
    "slow-units": slow_units,
    "hang": hang,
    "failing-loop": failing_loop,
    "fault": fault,
    "no-memory": no_memory,
    "lost-seat": lost_seat,
    "lone-rank": lone_rank,
    "halted-trial": halted_trial,
    "poison": poison,
    "signal-at": signal_at,
    "endless-flush": endless_flush,
    "brief-meeting": brief_meeting,
    "stuck": stuck,
}

if __name__ == "__main__":
    DEFECTS[sys.argv.pop(1)]()
    from hisparse.cli import main

    main(prog_name="hisparse")
