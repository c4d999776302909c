"""Python's garbage collector, kept from stopping the loop while thousands of requests live in it.

Left alone it stops a full coordinator twice over. A full collection looks at every object there is, 0.2 s with 10,000
live requests, and comes whenever the heap has grown by a quarter. A young one comes when 700 more objects were made
than freed, but where each new object replaces an old one that balance hardly moves: measured here, 5 s of grants and
history lines gathered until one "young" collection took 50 to 90 ms.

So it is switched off and driven by time: what was made since the last look is looked at ten times a second, and once,
which takes a millisecond or two; what start-up made, never; everything else rarely enough to stay far below one per
cent of the time. Most of what a request leaves behind is freed by reference counts, without any of this.
"""

from __future__ import annotations

import gc
from typing import Final

import trio

from protocol.logs import fields, logger

YOUNG_INTERVAL_S: Final = 0.1
FULL_INTERVAL_S: Final = 600.0

#: The generation that young survivors go to; collecting it includes the young, and sends survivors to the oldest.
MIDDLE: Final = 1

log = logger("coordinator.gc_policy")


def settle() -> None:
    """Call once what stays was imported and made; `collect` must run from then on."""
    gc.collect()
    gc.freeze()
    gc.disable()


async def collect() -> None:
    """Until cancelled."""
    full_at = trio.current_time() + FULL_INTERVAL_S
    while True:
        await trio.sleep(YOUNG_INTERVAL_S)
        if trio.current_time() < full_at:
            gc.collect(MIDDLE)
            continue
        start = trio.current_time()
        unreachable = gc.collect()
        full_at = trio.current_time() + FULL_INTERVAL_S
        log.info("full collection", extra=fields(seconds=trio.current_time() - start, unreachable=unreachable))
