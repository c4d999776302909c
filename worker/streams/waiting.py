"""A fence awaited by a trio task, while other tasks run.

Most waits belong to the executor's thread, which may block. A task that must see a fence asks again and again, with
pauses that double: each question costs about a microsecond, and a cancelled task leaves nothing behind. Rejected: a
thread that blocks on the fence, which neither a deadline nor a cancellation could end.
"""

from __future__ import annotations

from typing import Final

import trio

from worker.streams.fences import Fence, FenceError

PAUSE_MIN_S: Final = 0.0001
PAUSE_MAX_S: Final = 0.005


async def wait_for_fence(fence: Fence, limit_s: float) -> None:
    """Return once the host has seen `fence` complete. FenceError naming it after `limit_s`.

    Cancelled: nothing has changed, the fence can be asked again. Always a checkpoint.
    """
    give_up_at = trio.current_time() + limit_s
    pause_s = PAUSE_MIN_S
    await trio.lowlevel.checkpoint()
    while not fence.done():
        if trio.current_time() >= give_up_at:
            raise FenceError(f"{fence} was not complete after {limit_s:g} s", field="fence", value=fence.name)
        await trio.sleep(min(pause_s, max(0.0, give_up_at - trio.current_time())))
        pause_s = min(2 * pause_s, PAUSE_MAX_S)
