"""Waiting for a cluster that starts, while its processes are kept as they are later.

died      restarted after a pause that doubles, whole where it is a rank of a group (hisparse.cluster.supervision): what
          ended it may pass. Given up after too many short lives, which ends the start
refuses   a process that refuses a setting, or lacks the room that it is to have, would do so again: the start ends
          at once, with the end of its log
stuck     no process for which the start waits has come further for a while: the start ends, and says how far each
          has come. There is no limit for what comes further, however long weights and host pool take
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import trio

from hisparse.cluster.children import Child, exit_text
from hisparse.cluster.supervision import REFUSALS, ProcessSupervisor, Supervised
from protocol.errors import HiSparseError, Unavailable

#: How often processes that start are asked how far they are.
STEP_INTERVAL_S: Final = 0.25


async def started(
    kept: Supervised,
    names: Sequence[str],
    ready: Callable[[], Awaitable[None]],
    limit_s: float,
    report: Callable[[str], None],
) -> None:
    """Keep the children of `kept` until `ready` returns, which waits for those of these names.

    Raises the error whose exit code a child had that refused to start; Unavailable when one was asked to exit, or when
    none of `names` has come further for `limit_s`; HiSparseError when restarts did not keep one running; and what
    `ready` raises.
    """
    error: HiSparseError | None = None

    async def end_with(wait: Callable[[], Awaitable[HiSparseError | None]]) -> None:
        nonlocal error
        try:
            found = await wait()
        except HiSparseError as raised:  # raised outside of the nursery, which would wrap it in a group
            found = raised
        error = error or found
        nursery.cancel_scope.cancel()

    supervisor = ProcessSupervisor(kept, report, lambda: None, starting=True)
    async with trio.open_nursery() as nursery:
        for wait in (ready, partial(_lost, supervisor), partial(_stuck, kept, names, limit_s)):
            nursery.start_soon(end_with, wait)
    if error is not None:
        raise error


async def _lost(supervisor: ProcessSupervisor) -> HiSparseError:
    """The error of a child that ended and is not restarted, whose last lines go to stderr."""
    child = await supervisor.run()
    for line in child.tail().splitlines():
        print(f"{child.name}: {line}", file=sys.stderr, flush=True)
    status = await child.wait()
    kind = REFUSALS.get(status, HiSparseError) if status else Unavailable
    return kind(f"{exit_text(status)} during start", field="process", value=child.name, remedy="see its output above")


async def _stuck(kept: Supervised, names: Sequence[str], limit_s: float) -> HiSparseError:
    """The error of processes that come no further. A process that was started again has."""
    seen: list[tuple[int, str]] = []
    since = trio.current_time()
    while trio.current_time() - since <= limit_s:
        found = [_progress(kept.by_name[name]) for name in names]
        if found != seen:
            seen, since = found, trio.current_time()
        await trio.sleep(STEP_INTERVAL_S)
    far = ", ".join(f"{name} ({step})" for name, (_, step) in zip(names, seen, strict=True))
    return Unavailable(
        f"no process has come further for {limit_s:g} s",
        field="processes",
        value=far,
        remedy="see their output, and what that step waits for: a disk, a GPU, another process",
    )


def _progress(child: Child) -> tuple[int, str]:
    return child.pid, child.step
