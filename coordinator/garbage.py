"""Python's garbage collector, kept from stopping the loop while thousands of requests live in it.

A full collection looks at every object there is: with 10,000 live requests that is 0.2 s, and CPython starts one
whenever the heap has grown by a quarter, so a coordinator that fills up would stop again and again. What a request
leaves behind is freed by reference counts, or young. So: what start-up made is never looked at again, and a full
collection comes on our own schedule, rarely enough to stay far below one per cent of the time.
"""

from __future__ import annotations

import gc
from typing import Final

import trio

from metrics.logs import fields, logger

#: Allocations between collections of the young, and of what survives ten of those: 20,000 objects take 4 ms.
YOUNG_THRESHOLD: Final = 2_000
MIDDLE_THRESHOLD: Final = 10
#: CPython counts middle collections up to this before a full one: never, in practice.
FULL_THRESHOLD: Final = 1_000_000_000
FULL_INTERVAL_S: Final = 600.0

log = logger("coordinator.garbage")


def settle() -> None:
    """Call once everything that stays was imported and made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_THRESHOLD, MIDDLE_THRESHOLD, FULL_THRESHOLD)


async def collect_rarely() -> None:
    """Until cancelled."""
    while True:
        await trio.sleep(FULL_INTERVAL_S)
        start = trio.current_time()
        unreachable = gc.collect()
        log.info("full collection", extra=fields(seconds=trio.current_time() - start, unreachable=unreachable))
