"""What happens to the requests while they decode, through the operator's commands alone.

    all tasks below share one client connection
    follow    one per request: collects its tokens
    observe   reads requests, workers and pools until told to stop
    direct    mid-decode: retract one request and see that it is off its worker; drain a worker that it did not run
              on, or its own where nothing else runs any more, with handover; resume the request

Nothing here raises because a move came too late; the report says what was moved, and a run that moved nothing fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import trio

from hisparse.client.client import Client
from hisparse.demo.plan import DemoOptions, DemoRequest
from hisparse.demo.watch import DemoWatch, Outcome, pages_in_use
from protocol.errors import HiSparseError
from protocol.messages import RequestRow, Sampling

OBSERVE_INTERVAL_S: Final = 0.05
#: How long a retracted request is left alone at least, so that its absence from the batch shows.
RETRACTED_FOR_S: Final = 0.5
#: Longest that one move may take before the demo goes on without it.
MOVE_LIMIT_S: Final = 60.0
#: Longest from the last token to the last page's return.
RELEASE_LIMIT_S: Final = 20.0
#: Counters of workers come with reports and heartbeats: so much later they are final.
COUNTERS_LAG_S: Final = 1.2
#: "Mid-decode": after this part of the new tokens.
MID_DECODE_SHARE: Final = 1 / 8

Say = Callable[[str], None]


async def run_scenario(
    client: Client, requests: Sequence[DemoRequest], options: DemoOptions, outcome: Outcome, say: Say
) -> None:
    """Submit all, move two about, wait for every last token and page. `outcome` is filled as it goes."""
    outcome.host_pages_before = pages_in_use(await client.pools())
    sampling = Sampling(max_tokens=options.new_tokens, ignore_eos=True)
    began = trio.current_time()
    async with trio.open_nursery() as background:
        background.start_soon(_observe, client, outcome.watch)
        async with trio.open_nursery() as nursery:
            for request in requests:
                outcome.tokens[request.request_id] = []
                nursery.start_soon(_follow, client, request, sampling, outcome)
            nursery.start_soon(_direct, client, options, outcome, say)
        outcome.serve_s = trio.current_time() - began
        await _released(client, outcome)
        await trio.sleep(COUNTERS_LAG_S)
        await _look(client, outcome.watch)
        background.cancel_scope.cancel()


async def _follow(client: Client, request: DemoRequest, sampling: Sampling, outcome: Outcome) -> None:
    stream = await client.submit(request.prompt, sampling, request_id=request.request_id)
    async for tokens in stream:
        outcome.tokens[request.request_id] += [int(token) for token in tokens]


async def _observe(client: Client, watch: DemoWatch) -> None:
    while True:
        await _look(client, watch)
        await trio.sleep(OBSERVE_INTERVAL_S)


async def _look(client: Client, watch: DemoWatch) -> None:
    watch.saw_requests((await client.requests()).rows)
    watch.saw_workers(await client.workers())
    watch.saw_pools(await client.pools())


async def _direct(client: Client, options: DemoOptions, outcome: Outcome, say: Say) -> None:
    watch = outcome.watch
    mid = int(options.new_tokens * MID_DECODE_SHARE)
    try:
        await _until(lambda: watch.running_past(mid) is not None, watch)
        chosen = watch.running_past(mid)
        if chosen is not None:
            await _retract(client, chosen, outcome, say)
            await _drain_with_handover(client, chosen.worker, outcome, say)
            await trio.sleep(RETRACTED_FOR_S)
            await client.resume([chosen.request_id])
            say(f"{chosen.request_id} resumed: index keys and the rows used last reload, no prefill")
    except HiSparseError as error:  # it ended while we looked: the report shows what was not moved
        say(f"not moved: {error}")


async def _retract(client: Client, chosen: RequestRow, outcome: Outcome, say: Say) -> None:
    name, watch = chosen.request_id, outcome.watch
    await client.retract([name])
    if await _until(lambda: watch.rows[name].state == "RETRACTED", watch, MOVE_LIMIT_S):
        outcome.retracted.append(name)
        say(f"{name} retracted from {chosen.worker} at token {len(outcome.tokens[name])}; its host pages stay")


async def _drain_with_handover(client: Client, home: str, outcome: Outcome, say: Say) -> None:
    """Drain the worker, other than `home` if any, that has the most to hand over, and wait until it is drained."""
    watch = outcome.watch
    running = watch.running_on()
    by_worker = {worker: ids for worker, ids in running.items() if worker != home} or running
    if not by_worker:
        say("nothing is left to hand over")
        return
    worker = max(by_worker, key=lambda name: len(by_worker[name]))
    await client.drain([worker], handover=True, deadline_s=MOVE_LIMIT_S)
    outcome.drained, outcome.leaving = worker, tuple(by_worker[worker])
    if await _until(lambda: watch.workers[worker].state == "drained", watch, MOVE_LIMIT_S):
        await _look(client, watch)
        say(f"{worker} drained: {len(outcome.handed_over)} requests go on elsewhere, from the shared host pool")


async def _until(condition: Callable[[], bool], watch: DemoWatch, limit_s: float = math.inf) -> bool:
    """Whether `condition` came to hold before `limit_s` passed and before every request was over."""
    give_up_at = trio.current_time() + limit_s
    while not condition():
        if watch.over or trio.current_time() > give_up_at:
            return False
        await trio.sleep(OBSERVE_INTERVAL_S)
    return True


async def _released(client: Client, outcome: Outcome) -> None:
    """Wait until the pages are back, or RELEASE_LIMIT_S: then it is a leak."""
    give_up_at = trio.current_time() + RELEASE_LIMIT_S
    while True:
        outcome.host_pages_after = pages_in_use(await client.pools())
        if outcome.host_pages_after == outcome.host_pages_before or trio.current_time() > give_up_at:
            return
        await trio.sleep(OBSERVE_INTERVAL_S)
