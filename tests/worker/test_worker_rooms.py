"""basics.rooms has every container of a worker that grows with what clients ask for."""

from __future__ import annotations

import msgspec

from basics.rooms import ROOMS, RoomPlace
from tests.support.containers import FEW, LISTED, MANY, grown, lengths
from tests.support.fakes.hash_runner import ALTERNATING
from tests.support.worker_rig import SETTINGS, Rig
from worker.link.outbox import Outbox


def test_containers_that_grow_with_requests_are_in_the_table() -> None:
    """State of as many owners, with a grammar each: some decode, some have ended, and their reports wait."""
    settings = msgspec.structs.replace(SETTINGS, seats=4 * MANY, host_mem="8MiB", device_mem="8MiB")
    rig, outbox, looks = Rig(settings=settings), Outbox(1), []
    for number in range(MANY + 1):
        decodes = rig.coordinator.create(2 * number, 40, 300)
        ends = rig.coordinator.create(2 * number + 1, 40, 2, grammar=f"{ALTERNATING}\n// {number}\n")
        for life in (decodes, ends):
            life.rank = (0, number, life.number)
            assert rig.coordinator.admit(life, 64)
            outbox.hold(rig.coordinator._admit_command(life))
            outbox.add_tokens(life.number, life.placement, 0, [1], 40)
            outbox.add_event(rig.coordinator.events[-1] if rig.coordinator.events else None)
            outbox.count_swaps({life.placement: (1, 1)}, (1, 1, 1), {life.placement: (1, 1)})
        rig.run_until(lambda life=ends: bool(life.outcome))
        if number in (FEW, MANY):
            looks.append(lengths(rig.executor, outbox))
    assert sorted(grown(*looks) - LISTED) == [], "name their rooms in basics.rooms"
    assert {"Executor._requests", "PassedGrammars._answers", "Outbox._rows"} <= grown(*looks), "it can fail"
    use = rig.executor.room_use() | outbox.room_use()
    assert use.keys() == {it.name for it in ROOMS if it.place is RoomPlace.WORKER}
    assert (use["worker_requests"].used, use["worker_requests"].limit) == (len(rig.executor.held()), 4 * MANY)
    assert (use["worker_grammars"].used, use["worker_reports"].used) == (MANY + 1, 2 * (MANY + 1))
    assert use["worker_transfers"].used == 0
