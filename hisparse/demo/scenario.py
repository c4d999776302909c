"""The operator's commands on the demo's requests while they decode.

    all tasks below share one client connection
    follow    one per request: collects its tokens
    observe   reads requests, workers and pools until cancelled
    direct    mid-decode: retract one request and wait until it has left its worker; drain another worker with handover,
              or this one if no other has requests; resume the request

A move that comes too late raises no error. The report has the moves, and a run without any fails.
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
#: Least time until a retracted request is resumed, so that its absence from the batch shows.
RETRACTED_FOR_S: Final = 0.5
#: Time limit of one move, after which the demo goes on without it.
MOVE_LIMIT_S: Final = 60.0
#: Time limit from the last token until all pages are free.
RELEASE_LIMIT_S: Final = 20.0
#: Workers' counters come with reports and heartbeats; after this time they are final.
COUNTERS_LAG_S: Final = 1.2
#: "Mid-decode": after this part of the new tokens.
MID_DECODE_SHARE: Final = 1 / 8

Note = Callable[[str], None]


async def run_scenario(
    client: Client, requests: Sequence[DemoRequest], options: DemoOptions, outcome: Outcome, note: Note
) -> None:
    """Submit all requests, make the moves, wait for all tokens and pages. Fills `outcome` while it runs."""
    outcome.watch.expected = len(requests) * options.turns
    outcome.host_pages_before = pages_in_use(await client.pools())
    sampling = Sampling(max_tokens=options.new_tokens, ignore_eos=True)
    began = trio.current_time()
    async with trio.open_nursery() as background:
        background.start_soon(_observe, client, outcome.watch)
        async with trio.open_nursery() as nursery:
            for request in requests:
                nursery.start_soon(_converse, client, request, sampling, outcome)
            nursery.start_soon(_direct, client, options, outcome, note)
        outcome.serve_s = trio.current_time() - began
        await _released(client, outcome)
        await trio.sleep(COUNTERS_LAG_S)
        await _look(client, outcome.watch)
        background.cancel_scope.cancel()


async def _converse(client: Client, request: DemoRequest, sampling: Sampling, outcome: Outcome) -> None:
    """All turns of a request, each with all that was said before."""
    prompt = request.prompt
    for turn, said in enumerate((*request.said, ()), start=1):
        number = f"{turn:0{len(str(len(request.said) + 1))}}"
        name = f"{request.request_id}.{number}" if request.said else request.request_id
        each = DemoRequest(name, request.source, prompt, request.owner)
        outcome.served.append(each)
        outcome.tokens[name] = []
        await _follow(client, each, sampling, outcome)
        prompt = (*prompt, *outcome.tokens[name], *said)


async def _follow(client: Client, request: DemoRequest, sampling: Sampling, outcome: Outcome) -> None:
    name, owner = request.request_id, request.owner
    stream = await client.submit(request.prompt, sampling, request_id=name, tenant=owner)
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


async def _direct(client: Client, options: DemoOptions, outcome: Outcome, note: Note) -> None:
    watch = outcome.watch
    mid = int(options.new_tokens * MID_DECODE_SHARE)
    try:
        await _until(lambda: watch.running_past(mid) is not None, watch)
        chosen = watch.running_past(mid)
        if chosen is not None:
            await _retract(client, chosen, outcome, note)
            await _drain_with_handover(client, chosen.worker, outcome, note)
            await trio.sleep(RETRACTED_FOR_S)
            await client.resume([chosen.request_id])
            note(f"{chosen.request_id} resumed: index keys and the rows used last reload, no prefill")
    except HiSparseError as error:  # the request ended meanwhile; the report shows the missing moves
        note(f"not moved: {error}")


async def _retract(client: Client, chosen: RequestRow, outcome: Outcome, note: Note) -> None:
    name, watch = chosen.request_id, outcome.watch
    await client.retract([name])
    if await _until(lambda: watch.rows[name].state == "RETRACTED", watch, MOVE_LIMIT_S):
        outcome.retracted.append(name)
        note(f"{name} retracted from {chosen.worker} at token {len(outcome.tokens[name])}; its host pages stay")


async def _drain_with_handover(client: Client, home: str, outcome: Outcome, note: Note) -> None:
    """Drain the worker with the most running requests, other than `home` if possible, and wait until it is drained."""
    watch = outcome.watch
    running = watch.running_on()
    by_worker = {worker: ids for worker, ids in running.items() if worker != home} or running
    if not by_worker:
        note("nothing is left to hand over")
        return
    worker = max(by_worker, key=lambda name: len(by_worker[name]))
    await client.drain([worker], handover=True, deadline_s=MOVE_LIMIT_S)
    outcome.drained, outcome.leaving = worker, tuple(by_worker[worker])
    if await _until(lambda: watch.workers[worker].state == "drained", watch, MOVE_LIMIT_S):
        await _look(client, watch)
        note(f"{worker} drained: {len(outcome.handed_over)} requests go on elsewhere, from the shared host pool")


async def _until(condition: Callable[[], bool], watch: DemoWatch, limit_s: float = math.inf) -> bool:
    """Wait for `condition`. False: `limit_s` passed, or all requests ended, before it held."""
    give_up_at = trio.current_time() + limit_s
    while not condition():
        if watch.over or trio.current_time() > give_up_at:
            return False
        await trio.sleep(OBSERVE_INTERVAL_S)
    return True


async def _released(client: Client, outcome: Outcome) -> None:
    """Wait until all host pages are free again, at most RELEASE_LIMIT_S: after that, the report shows a leak."""
    give_up_at = trio.current_time() + RELEASE_LIMIT_S
    while True:
        outcome.host_pages_after = pages_in_use(await client.pools())
        if outcome.host_pages_after == outcome.host_pages_before or trio.current_time() > give_up_at:
            return
        await trio.sleep(OBSERVE_INTERVAL_S)
