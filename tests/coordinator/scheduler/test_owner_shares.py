"""No owner shuts out another: places of outputs, live requests, waiting ones, outputs of those that ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

from basics.request_states import TERMINAL, State
from basics.shares import SHARE, check_share
from protocol import messages
from protocol.errors import CapacityError
from protocol.settings import CoordinatorSettings
from protocol.units import PAGE_TOKENS
from tests.coordinator.turn.test_recovery import Life
from tests.support.scheduler_rig import AHEAD_TOKENS, SchedulerRig, open_rig

#: Many more than fit the arena of the rig (2^18 places) with room for all they may generate.
MAX_TOKENS = 7_000
REQUESTS = 50


async def abort_all(rig: SchedulerRig, request_ids: list[str]) -> None:
    await rig.scheduler.abort(tuple(request_ids), "test")
    for _ in range(50):
        await rig.settle()
        rig.round()
        await trio.sleep(0.3)
        if not set(request_ids) & set(rig.live()):
            return
    raise AssertionError("they did not end")


async def refusal(rig: SchedulerRig, *, hold: bool = False) -> str:
    """The refusal of an owner that submits until it is refused."""
    for number in range(100):
        request_id = f"h{number}-{hold}!"
        try:
            await rig.submit(request_id, tenant="hostile")
        except CapacityError as error:
            return str(error)
        if hold:
            await rig.scheduler.retract((request_id,), "test", keep=False, hold=True)
    raise AssertionError("never refused")


async def test_tiny_requests_of_large_max_tokens_shut_no_owner_out(autojump_clock: MockClock) -> None:
    """Requests of one owner that are aborted before their first token hold next to nothing."""
    settings = CoordinatorSettings(grant_ahead_tokens=AHEAD_TOKENS, live_requests_max=128, prefix_reuse="off")
    async with open_rig(settings=settings, host_pages=400) as rig:
        await rig.add_worker("w0", index_pages=400, hot_chunks=400)
        hostile = [f"h{number}!" for number in range(REQUESTS)]
        for request_id in hostile:
            await rig.submit(request_id, 1, MAX_TOKENS, tenant="hostile")
        await rig.submit("other!", 1, MAX_TOKENS, tenant="other")
        await abort_all(rig, [*hostile, "other!"])
        assert rig.token_log.held_by(("", "hostile")) <= REQUESTS * PAGE_TOKENS
        for request_id in hostile[:5]:
            await rig.submit(f"{request_id}again", 1, MAX_TOKENS, tenant="hostile")
        rig.check()


async def test_what_ended_requests_hold_is_small_after_a_restart_too(autojump_clock: MockClock) -> None:
    settings = CoordinatorSettings(grant_ahead_tokens=AHEAD_TOKENS, live_requests_max=64, prefix_reuse="off")
    async with Life.over(settings=settings) as life:
        life.host_pages = 400
        await life.add_worker("w0", index_pages=400, hot_chunks=400)
        hostile = [f"h{number}!" for number in range(REQUESTS)]
        for request_id in hostile:
            await life.submit(request_id, 1, MAX_TOKENS, tenant="hostile")
        await abort_all(life, hostile)
        await life.settle()
        groups, held = life.store.groups, life.token_log.held_by(("", "hostile"))
    async with Life.over(groups, settings) as life:
        life.host_pages = 400
        await life.add_worker("w1", index_pages=400, hot_chunks=400)
        assert 0 < life.token_log.held_by(("", "hostile")) <= held <= REQUESTS * PAGE_TOKENS
        await life.submit("other!", 1, MAX_TOKENS, tenant="other")
        life.token_log.check_invariants()


async def test_requests_in_a_full_arena_wait_and_lose_no_token(autojump_clock: MockClock) -> None:
    """Five outputs of up to 1,024 places among 4,096: some leave their worker until others have been forgotten."""
    settings = CoordinatorSettings(
        grant_ahead_tokens=AHEAD_TOKENS, live_requests_max=64, ended_keep_s=5.0, prefix_reuse="off"
    )
    async with open_rig(settings=settings, host_pages=200, arena_tokens=4_096) as rig:
        await rig.add_worker("w0", index_pages=200, hot_chunks=200, seats=8)
        names = [f"r{number}!" for number in range(6)]
        for number, request_id in enumerate(names):
            await rig.submit(request_id, 10, 600, tenant=f"t{number}")
        waited = set()
        for _ in range(8_000):
            rig.round()
            await trio.sleep(0.1)
            await rig.settle()
            if not rig.live():
                break
            waited |= {row.waits_for for row in rig.scheduler.request_rows(10)}
        rig.check()
        ended = {name: (it.outcome, it.generated_tokens) for name, it in rig.listener.endings.items()}
        assert ended == dict.fromkeys(names, ("FINISHED", 600))
        assert rig.counters.retractions["drop", "output_room"] > 0
        assert "output_room" in waited


async def test_running_outputs_of_one_owner_leave_another_its_share_at_once(autojump_clock: MockClock) -> None:
    """Twelve long outputs of one owner would take 12,288 of 8,192 places. Another owner submits when they have stopped
    growing: its requests are accepted and end while the first owner's wait, and these end in their turn."""
    settings = CoordinatorSettings(
        grant_ahead_tokens=AHEAD_TOKENS, live_requests_max=64, ended_keep_s=5.0, prefix_reuse="off"
    )
    async with open_rig(settings=settings, host_pages=400, arena_tokens=8_192) as rig:
        await rig.add_worker("w0", index_pages=400, hot_chunks=400, seats=16)

        async def rounds(count: int) -> None:
            for _ in range(count):
                rig.round()
                await trio.sleep(0.1)
                await rig.settle()

        hostile = [f"h{number}!" for number in range(12)]
        for request_id in hostile:
            await rig.submit(request_id, 10, 600, tenant="hostile")
        waits = 0
        while waits < 6:
            await rounds(1)
            waits = sum(row.waits_for == "output_room" for row in rig.scheduler.request_rows(20))
        others = ["o1!", "o2!"]
        for request_id in others:
            await rig.submit(request_id, 10, 100, tenant="other")
        while not rig.listener.endings.keys() >= {*others}:
            await rounds(1)
        assert len(rig.listener.endings.keys() & {*hostile}) <= 2, "they did not make room first"
        while rig.live():
            await rounds(20)
        rig.check()
        ended = {name: (it.outcome, it.generated_tokens) for name, it in rig.listener.endings.items()}
        assert ended == dict.fromkeys(hostile, ("FINISHED", 600)) | dict.fromkeys(others, ("FINISHED", 100))


async def test_outputs_of_an_owner_end_while_an_operator_holds_the_first_of_them(autojump_clock: MockClock) -> None:
    """Fourteen long outputs of one owner, beyond its share of 8,192 places; the one that has room for all that it may
    generate is held. The others end, one after the other, and so does it once it is resumed."""
    settings = CoordinatorSettings(
        grant_ahead_tokens=AHEAD_TOKENS, live_requests_max=64, ended_keep_s=1.0, prefix_reuse="off"
    )
    async with open_rig(settings=settings, host_pages=400, arena_tokens=8_192) as rig:
        await rig.add_worker("w0", index_pages=400, hot_chunks=400, seats=16)

        async def until(condition: Callable[[], bool]) -> bool:
            for _ in range(1_500):
                if condition():
                    return True
                rig.round()
                await trio.sleep(0.1)
                await rig.settle()
            return False

        names = [f"r{number}!" for number in range(14)]
        for request_id in names:
            await rig.submit(request_id, 10, 600, tenant="one")

        def growing() -> list[messages.RequestRow]:
            return [row for row in rig.scheduler.request_rows(20) if row.waits_for != "output_room"]

        assert await until(lambda: [row.state for row in growing() if row.state not in TERMINAL] == [State.RUNNING])
        (first,) = (row.request_id for row in growing() if row.state == State.RUNNING)
        await rig.scheduler.retract((first,), "operator", keep=True, hold=True)
        others = {*names} - {first}
        assert await until(lambda: rig.listener.endings.keys() >= others), "they wait for one that is held"
        assert first not in rig.listener.endings
        await rig.scheduler.resume((first,), "operator")
        assert await until(lambda: not rig.live())
        rig.check()
        ended = {name: (it.outcome, it.generated_tokens) for name, it in rig.listener.endings.items()}
        assert ended == dict.fromkeys(names, ("FINISHED", 600))


async def test_an_owner_at_its_share_of_requests_is_refused_and_another_is_served(autojump_clock: MockClock) -> None:
    settings = CoordinatorSettings(live_requests_max=64, queue_max=32, prefix_reuse="off")
    async with open_rig(settings=settings) as rig:
        await rig.add_worker("w0", seats=1)
        assert "coordinator.queue_max=32: 28 requests waiting are this owner's" in await refusal(rig)
        await rig.submit("other!", tenant="other")
        for request_id in [it for it in rig.live() if it.startswith("h")][1:]:
            await rig.scheduler.retract((request_id,), "test", keep=False, hold=True)
        text = "coordinator.live_requests_max=64: 56 live requests are this owner's"
        assert text in await refusal(rig, hold=True)
        await rig.submit("another!", tenant="other")
        rig.check()


async def test_the_owner_of_most_ended_requests_gives_up_its_oldest(autojump_clock: MockClock) -> None:
    settings = CoordinatorSettings(live_requests_max=64, ended_keep_max=2, prefix_reuse="off")
    async with open_rig(settings=settings) as rig:
        await rig.add_worker("w0")
        for request_id, tenant in [("quiet", "q"), *((f"h{number}", "h") for number in range(3))]:
            await rig.submit(request_id, 10, 1, tenant=tenant)
            await rig.run_until(request_id, "FINISHED")
        await trio.sleep(1)
        assert [row.request_id for row in rig.scheduler.request_rows(10)] == ["h2", "quiet"]


@pytest.mark.parametrize("owners", [1, 2, 10])
def test_greedy_owners_leave_a_newcomer_room(owners: int) -> None:
    limit, held = 10_000, [0] * owners
    for turn in range(limit * 2):
        try:
            used = sum(held)
            check_share("places", 1, held=held[turn % owners], used=used, limit=limit, field="places")
        except CapacityError:
            continue
        held[turn % owners] += 1
    free = limit - sum(held)
    assert free >= limit // (1 + SHARE * owners) > 0
    assert max(held) - min(held) <= 1
    check_share("places", free * SHARE // (1 + SHARE), held=0, used=sum(held), limit=limit, field="places")


def test_one_unit_is_always_to_be_had_while_any_is_free() -> None:
    check_share("places", 1, held=0, used=9, limit=10, field="places")
    with pytest.raises(CapacityError, match="10 places already"):
        check_share("places", 1, held=0, used=10, limit=10, field="places")
