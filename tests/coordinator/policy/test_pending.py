"""What a waiting request waits for: one text for each kind, in listings and in histories."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from basics.request_states import UNSERVED, PendingKind
from coordinator.policy.pending import NOTES_MAX, PendingReason, PendingReasons, unserved
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import WorkerDrain
from coordinator.turn.dispatch import TRANSFER_PAUSE_S
from protocol.messages import BOTH, DECODE, DIRECT, PREFILL
from tests.coordinator.turn.test_inbound_transfers import SLOT, Desk
from tests.support.fakes.fake_cluster import FakeCluster
from tests.support.scheduler_rig import open_rig

PLENTY = {"seats": 4, "hot_chunks": 64, "index_pages": 64, "prompt_max_tokens": 2_048}


def cluster(workers: int = 1, *, host_pages: int = 64, **counts: int) -> FakeCluster:
    fake = FakeCluster(1, ("n0", "n1"), host_pages)
    for number in range(workers):
        fake.add_worker(f"w{number}", "n0", **PLENTY | counts)
    return fake


def explained(fake: FakeCluster, request_index: int) -> PendingReason:
    fake.settle()
    return fake.pending.explain(fake.entry(request_index), fake.now)


def replan(fake: FakeCluster) -> None:
    fake.dispatch.dirty = True
    fake.settle()


def running(fake: FakeCluster, *prompts: int, max_tokens: int = 1_000) -> None:
    """Slots 0, 1, … run."""
    for request_index, prompt in enumerate(prompts):
        fake.submit(request_index, prompt, max_tokens, full=True)
    for _ in range(4):
        fake.round()
    assert {str(fake.live[request_index].state.state) for request_index in range(len(prompts))} == {"RUNNING"}


# ---------------------------------------------------------------- short of memory

SHORT = {
    PendingKind.SEATS: ({"seats": 1}, "needs 1 seat, w0 has 0 of 1 free"),
    PendingKind.HOST_PAGES: ({"host_pages": 5}, "needs 3 host pages, n0 has 2 of 5 free"),
    PendingKind.HOT_CHUNKS: ({"hot_chunks": 5}, "needs 3 hot chunks, w0 has 2 of 5 free"),
    PendingKind.INDEX_PAGES: ({"index_pages": 5}, "needs 3 index pages, w0 has 2 of 5 free"),
}


@pytest.mark.parametrize("kind", SHORT)
def test_missing_memory_is_named_with_arithmetic(kind: PendingKind) -> None:
    counts, text = SHORT[kind]
    fake = cluster(**counts)
    running(fake, 100, max_tokens=60)
    fake.submit(7, 100, 60)
    assert explained(fake, 7) == (kind, text)


def test_all_shortages_of_the_nearest_worker_are_named() -> None:
    fake = cluster(seats=1, index_pages=4)
    fake.add_worker("w1", "n0", **PLENTY | {"seats": 1})
    running(fake, 100, 100, max_tokens=60)
    fake.submit(7, 100, 60)
    reason = explained(fake, 7)
    assert reason == (PendingKind.SEATS, "needs 1 seat, w1 has 0 of 1 free (the nearest of 2 choices)")


def test_quarantined_pages_are_named() -> None:
    fake = cluster(host_pages=6)
    running(fake, 100, max_tokens=60)
    fake.lose_worker("w0", proved=False)
    fake.add_worker("w2", "n0", **PLENTY)
    fake.submit(7, 180, 60)
    reason = explained(fake, 7)
    assert reason.kind is PendingKind.HOST_PAGES
    assert "in quarantine" in reason.text


def test_memory_promised_to_an_earlier_request_is_listed() -> None:
    """A prompt under way on p0 is to be decoded by d0, whose memory is free until then."""
    fake = cluster(0)
    fake.add_worker("p0", "n0", PREFILL, **PLENTY)
    fake.add_worker("d0", "n0", DECODE, **PLENTY | {"index_pages": 5})
    fake.submit(0, 100, 60)
    fake.submit(7, 100, 60)
    expected = "needs 3 index pages, d0 has 5 of 5 free, 2 after requests ahead of it"
    assert explained(fake, 7) == (PendingKind.INDEX_PAGES, expected)


# ---------------------------------------------------------------- no worker


def test_no_worker_is_connected() -> None:
    fake = cluster(0)
    fake.submit(7, 100, 60)
    assert explained(fake, 7) == (PendingKind.NO_WORKER, "no worker is connected")


def test_kept_rows_wait_for_a_worker_of_their_node() -> None:
    fake = cluster()
    fake.add_worker("w1", "n1", **PLENTY)
    fake.dispatch.drain(fake.dispatch.placement_table.workers["w1"], WorkerDrain(1e9, False))
    running(fake, 100)
    fake.lose_worker("w0", proved=True)
    kept = fake.entry(0).kept_tokens
    expected = f"no worker of node n0, where its {kept} rows are kept, is connected"
    assert explained(fake, 0) == (PendingKind.NO_WORKER, expected)


def test_draining_and_awaited_workers_are_named() -> None:
    fake = cluster(3)
    placement_table = fake.dispatch.placement_table
    fake.submit(7, 100, 60)
    for worker in placement_table.workers.values():
        worker.awaited = True
    assert explained(fake, 7).kind is PendingKind.RECONNECT
    for name in ("w0", "w1"):
        fake.dispatch.drain(placement_table.workers[name], WorkerDrain(1e9, False))
    expected = "no worker takes requests: 2 draining (w0, w1), 1 awaited after a restart (w2)"
    assert explained(fake, 7) == (PendingKind.DRAINING, expected)


def test_missing_role_is_named() -> None:
    fake = cluster(0)
    fake.add_worker("p0", "n0", PREFILL, **PLENTY)
    fake.add_worker("d0", "n0", DECODE, **PLENTY)
    fake.dispatch.drain(fake.dispatch.placement_table.workers["d0"], WorkerDrain(1e9, False))
    fake.submit(7, 100, 60)
    assert explained(fake, 7) == (PendingKind.ROLE, "no worker that takes requests decodes; 1 draining (d0)")


def test_nodes_without_a_transfer_path_are_named() -> None:
    fake = cluster(0)
    fake.add_worker("p0", "n0", PREFILL, **PLENTY)
    fake.add_worker("d0", "n1", DECODE, **PLENTY)
    fake.submit(7, 100, 60, prefill_mode=DIRECT)
    expected = "no worker that takes requests can hand its prompt to another"
    assert explained(fake, 7) == (PendingKind.ROLE, expected)


def test_request_that_fits_an_absent_worker_only_says_so() -> None:
    fake = cluster(hot_chunks=64)
    fake.add_worker("w1", "n1", **PLENTY | {"prompt_max_tokens": 64})
    fake.lose_worker("w0", proved=True)
    fake.submit(7, 100, 60)
    assert explained(fake, 7) == (
        PendingKind.TOO_LARGE,
        "needs 100 prompt tokens in a pass, w1 has 64",
    )


ROLES = {
    "none": ((), "no worker is connected"),
    "both": ((BOTH,), None),
    "decode only": ((DECODE,), "no worker that takes requests prefills"),
    "prefill only": ((PREFILL,), "no worker that takes requests decodes"),
    "a pair": ((PREFILL, DECODE), None),
}


@pytest.mark.parametrize("roles", ROLES)
def test_a_new_request_is_served_by_workers_of_all_roles_it_needs(roles: str) -> None:
    present, text = ROLES[roles]
    fake = cluster(0)
    for number, role in enumerate(present):
        fake.add_worker(f"w{number}", "n0", role, **PLENTY)
    reason = unserved(list(fake.dispatch.placement_table.workers.values()))
    assert (reason.text if reason else None) == text
    fake.submit(7, 100, 60)
    fake.settle()
    kind = fake.pending.explain(fake.entry(7), fake.now).kind
    assert (kind in UNSERVED) == bool(text), "the rule and the reason of a request agree"


def test_a_new_request_is_not_served_by_workers_that_take_none() -> None:
    fake = cluster(2)
    workers = list(fake.dispatch.placement_table.workers.values())
    fake.dispatch.drain(workers[0], WorkerDrain(1e9, False))
    assert unserved(workers) is None
    workers[1].awaited = True
    expected = "no worker takes requests: 1 draining (w0), 1 awaited after a restart (w1)"
    assert unserved(workers) == (PendingKind.DRAINING, expected)


def test_a_new_request_is_not_served_by_a_pair_without_a_path() -> None:
    fake = cluster(0)
    fake.add_worker("p0", "n0", PREFILL, **PLENTY)
    fake.add_worker("d0", "n1", DECODE, **PLENTY)
    expected = "no worker that takes requests can hand its prompt to another"
    assert unserved(list(fake.dispatch.placement_table.workers.values())) == (PendingKind.ROLE, expected)


# ---------------------------------------------------------------- others, operators, transfers


def test_queued_request_names_the_first_and_its_shortage() -> None:
    fake = cluster(seats=1)
    running(fake, 100)
    for request_index in (5, 6, 7):
        fake.submit(request_index, 100, 60)
    expected = "2 waiting ahead of it, first r5: needs 1 seat, w0 has 0 of 1 free"
    assert explained(fake, 7) == (PendingKind.BEHIND, expected)
    fake.submit(8, 100, 60, 3)
    assert explained(fake, 5).text.startswith("1 waiting ahead of it, first r8: ")


def test_held_by_an_operator() -> None:
    fake = cluster()
    running(fake, 100)
    fake.take(fake.dispatch.retract(fake.entry(0), keep=True, hold=True, reason="test"))
    fake.round()
    kept = fake.entry(0).kept_tokens
    assert kept > 100
    expected = f"held by an operator, its {kept} rows kept: hisparse resume lets it go on"
    assert explained(fake, 0) == (PendingKind.HELD, expected)


def test_suspect_waits_for_progress_of_others() -> None:
    fake = cluster()
    running(fake, 100)
    fake.entry(0).strikes, fake.entry(0).mark = 2, 1_000
    fake.dispatch.placement_table.poison_detector.recover(fake.entry(0))
    fake.submit(7, 100, 60)
    assert explained(fake, 7).kind is PendingKind.SUSPECT
    assert "has a request with which workers died" in explained(fake, 7).text


def test_room_on_a_barred_worker_does_not_count() -> None:
    fake = cluster(2, index_pages=4)
    running(fake, 100, max_tokens=60)
    fake.entry(0).strikes, fake.entry(0).mark = 2, 1_000
    fake.dispatch.placement_table.poison_detector.recover(fake.entry(0))
    fake.submit(1, 128, 60)
    fake.submit(7, 128, 60)
    worker, other = fake.entry(0).worker, "w1" if fake.entry(0).worker == "w0" else "w0"
    reason = explained(fake, 7)
    assert worker not in reason.text
    assert (reason.kind, other in reason.text) == (PendingKind.INDEX_PAGES, True)


def test_rows_on_their_way_and_a_transfer_that_failed() -> None:
    desk = Desk()
    pending = PendingReasons(desk.placement_table, desk.dispatch.policy, str)
    desk.settle()
    transfer = desk.placement_table.transfers[desk.entry.transfer_id]
    desk.staged()
    desk.sent()
    expected = f"its 130 rows are on their way to {transfer.pages} host pages of {transfer.worker} on node b"
    assert pending.explain(desk.entry, 0.0) == (PendingKind.TRANSFER, expected)
    desk.closed(transfer.placement, 0)
    assert pending.explain(desk.entry, 0.0) == (
        PendingKind.PAUSED,
        f"transfer 1 failed, the next in {TRANSFER_PAUSE_S:.1f} s",
    )
    assert desk.entry.request_index == SLOT


# ---------------------------------------------------------------- histories


def test_due_names_each_request_once_in_a_wait() -> None:
    fake = cluster(seats=1)
    running(fake, 100)
    fake.submit(5, 100, 60)
    fake.submit(7, 100, 60)
    replan(fake)
    pending = fake.pending
    assert kinds(pending.due(fake.now)) == {5: "seats", 7: "behind"}
    replan(fake)
    assert pending.due(fake.now) == []
    fake.lose_worker("w0", proved=True)
    replan(fake)
    assert kinds(pending.due(fake.now)) == {0: "no_worker"}, "the first of all; the others stay behind it"
    fake.add_worker("w0", "n0", **PLENTY | {"seats": 1})
    replan(fake)
    assert pending.due(fake.now) == []


def kinds(found: list[tuple[RequestState, PendingReason]]) -> dict[int, str]:
    return {entry.request_index: str(reason.kind) for entry, reason in found}


def test_queue_lines_are_spread_over_several_ticks() -> None:
    fake = cluster(seats=1)
    running(fake, 100)
    for request_index in range(10, 10 + NOTES_MAX + 20):
        fake.submit(request_index, 100, 60)
    replan(fake)
    pending = fake.pending
    assert [len(pending.due(fake.now)) for _ in range(3)] == [NOTES_MAX, 20, 0]


async def test_rows_and_history_of_a_queued_request_agree(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0", seats=1)
        await rig.submit("r!", 100, 1_000)
        await rig.run_until("r!", "RUNNING")
        await rig.submit("waits", 100, 60)
        await rig.submit("last", 100, 60)
        await rig.run_until("last", "QUEUED")
        for _ in range(3):
            rig.round()
            await trio.sleep(0.3)
            await rig.settle()
        rows = {row.request_id: row for row in rig.scheduler.request_rows(10)}
        assert rows["waits"].reason == "needs 1 seat, w0 has 0 of 1 free"
        row, history = rig.scheduler.describe("waits")
        assert row.reason == rows["waits"].reason == history[-1].reason
        assert [line.event for line in history] == ["submitted", "waits"]
        assert rows["last"].reason.startswith("1 waiting ahead of it, first waits: needs 1 seat")
        await rig.scheduler.abort(("r!", "last"), "test")
        await rig.run_until("waits", "FINISHED")
        _, history = rig.scheduler.describe("waits")
        assert [line.event for line in history][:3] == ["submitted", "waits", "admitted"]
