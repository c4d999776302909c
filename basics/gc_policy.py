"""When Python's garbage collector runs, so that it does not stop the event loop of a coordinator with many requests, or
of an HTTP front with many connections.

By default both kinds of collection cause pauses. A full collection visits every object: 0.2 s with 10,000 live
requests, each time the heap has grown by a quarter; 25 to 40 ms in a front, when a few hundred connections are opened.
A young collection starts when 700 more objects were allocated than freed. Where each new object replaces an old one,
that balance hardly moves: measured here, 5 s of grants and history lines gathered until one "young" collection took 50
to 90 ms.

So automatic collection is off, and time drives it. Objects made since the last collection are visited ten times a
second, each once, which takes a millisecond or two. Objects made during start-up are never visited. All others are
visited rarely enough to stay far below one per cent of the time. Reference counts free most objects of an ended request
without a collection. A cycle that has outlived a young collection stays until the full one, with all it refers to, so
that no message or prompt may be part of one (tests/coordinator/listener/test_fuzz_coordinator.py). A front visits all
others every 5 s: connections of strangers may leave cycles behind. Only objects of its connections are among them.
"""

from __future__ import annotations

import gc
from typing import Final

import trio

from protocol.logs import fields, logger

YOUNG_INTERVAL_S: Final = 0.1
FULL_INTERVAL_S: Final = 600.0
#: Of the time: what full collections take at most.
FULL_SHARE_MAX: Final = 0.001

#: The generation of young survivors. Collecting it includes the young, and moves survivors to the oldest.
MIDDLE: Final = 1

log = logger("gc_policy")


def settle() -> None:
    """Exempt all objects made so far and switch automatic collection off. Call at the end of start-up.

    `collect` must run from then on.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


async def collect(full_interval_s: float = FULL_INTERVAL_S, share_max: float = FULL_SHARE_MAX) -> None:
    """Collect in intervals, until cancelled; everything each `full_interval_s`, and less often where that would take
    more than `share_max` of the time."""
    full_at = trio.current_time() + full_interval_s
    while True:
        await trio.sleep(YOUNG_INTERVAL_S)
        if trio.current_time() < full_at:
            gc.collect(MIDDLE)
            continue
        start = trio.current_time()
        unreachable = gc.collect()
        ended = trio.current_time()
        full_at = ended + max(full_interval_s, (ended - start) / share_max)
        log.debug("full collection", extra=fields(seconds=ended - start, unreachable=unreachable))
