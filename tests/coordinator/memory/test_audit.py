"""The audit: silent while everything only crosses everything, loud about each planted difference."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from coordinator.memory.audit import AuditRounds, Difference, compare
from coordinator.memory.ledger import Ledger
from coordinator.turn.auditor import Auditor
from protocol.errors import ProtocolError
from protocol.inventory import PAGES_MAX, UNCHECKED, InventoryRow, digest_of, unpack_rows
from protocol.messages import AuditedRow, DifferenceRow
from protocol.sizing import Memory
from tests.sim import shape
from tests.sim.run import simulate
from tests.support.fakes.fake_cluster import capacity
from tests.support.scheduler_rig import SETTINGS, FakeLink, SchedulerRig, open_rig
from worker.device.inventory import FreeDeviceMemory, take_inventory

NOTHING = Memory()
KEY = ("w0", 1)
AUDITED = msgspec.structs.replace(SETTINGS, audit_interval_s=0.3)


# ---------------------------------------------------------------- comparing


@pytest.fixture
def ledger() -> Ledger:
    it = Ledger(32)
    it.add_worker("w0", 1, capacity())
    it.reserve(7, "w0", Memory(host_pages=3, hot_chunks=4, index_pages=3))
    it.reserve(8, "w0", Memory(host_pages=2, hot_chunks=3, index_pages=2))
    return it


#: The row of an admission, and the ids of its host pages.
Held: TypeAlias = tuple[InventoryRow, list[int]]


def held_rows(ledger: Ledger) -> list[Held]:
    given = sorted(ledger.placements_of(KEY))
    return [row_of(it, ledger.pages_of(it).tolist(), ledger.held(it)) for it in given]


def row_of(placement: int, pages: list[int], given: Memory = NOTHING) -> Held:
    row = InventoryRow(
        placement,
        len(pages),
        given.hot_chunks,
        index_pages=given.index_pages,
        chunks=given.hot_chunks,
    )
    return row, pages


def changed(held: Held, **changes: Any) -> Held:
    """`held` with `changes` of its row, or other `pages`."""
    row, before = held
    pages = changes.pop("pages", before)
    return replace(row, **{"host_pages": len(pages), **changes}), pages


def free_beside(held: list[Held]) -> FreeDeviceMemory:
    size = capacity()
    chunks = size.hot_chunks - sum(row.chunks for row, _ in held)
    return FreeDeviceMemory(size.seats - len(held), chunks, size.index_pages - sum(row.index_pages for row, _ in held))


def differences(ledger: Ledger, held: list[Held], free: FreeDeviceMemory | None = None) -> list[tuple[str, int]]:
    inventory = take_inventory(1, held, free or free_beside(held))
    return [(it.kind, it.placement) for it in compare(ledger, KEY, inventory, asked(ledger), lambda placement: False)]


def asked(ledger: Ledger) -> dict[int, Memory]:
    """What all held when they were asked: as much as now."""
    return {placement: ledger.held(placement) for placement in ledger.placements_of(KEY)}


def test_equal_views_have_no_difference(ledger: Ledger) -> None:
    assert differences(ledger, held_rows(ledger)) == []


PLANTED: dict[str, tuple[Callable[[Held], Held], tuple[str, int]]] = {
    "one page is another's": (lambda it: changed(it, pages=[31, *it[1][1:]]), ("host_pages", 7)),
    "order of pages": (lambda it: changed(it, pages=it[1][::-1]), ("host_pages", 7)),
    "a page too many": (lambda it: changed(it, pages=[*it[1], 31]), ("host_pages", 7)),
    "an index page too many": (lambda it: changed(it, index_pages=4), ("index_pages", 7)),
    "a chunk too few": (lambda it: changed(it, hot_chunks=3), ("hot_chunks", 7)),
}


@pytest.mark.mutation
@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_difference_of_a_request_is_found(ledger: Ledger, name: str) -> None:
    plant, expected = PLANTED[name]
    first, *others = held_rows(ledger)
    held = [plant(first), *others]
    assert differences(ledger, held, free_beside(held)) == [expected]


@pytest.mark.mutation
def test_placements_on_a_single_side_are_found(ledger: Ledger) -> None:
    first, second = held_rows(ledger)
    assert differences(ledger, [first, second, changed(first, placement=9)]) == [("stray", 9)]
    assert differences(ledger, [second]) == [("unreleased", 7)]


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("part", "kind"), [("seats", "seats"), ("chunks", "hot_chunks"), ("index_pages", "index_pages")]
)
@pytest.mark.parametrize("by", [-1, 1])
def test_memory_neither_held_nor_free_is_found(ledger: Ledger, part: str, kind: str, by: int) -> None:
    held = held_rows(ledger)
    free = free_beside(held)
    assert differences(ledger, held, free._replace(**{part: getattr(free, part) + by})) == [(kind, 0)]


def test_a_hot_buffer_between_two_sizes_is_not_compared(ledger: Ledger) -> None:
    first, second = held_rows(ledger)
    inventory = take_inventory(1, [changed(first, hot_chunks=1), second], free_beside([first, second]))
    assert compare(ledger, KEY, inventory, asked(ledger), lambda placement: placement == 7) == []


def test_grants_to_a_leaving_request_may_be_missing(ledger: Ledger) -> None:
    first, second = held_rows(ledger)
    leaving = changed(first, is_leaving=True)
    ledger.extend(7, Memory(host_pages=1, hot_chunks=1, index_pages=1))
    assert [name for name, _ in differences(ledger, [first, second])] == ["host_pages", "hot_chunks", "index_pages"]
    assert differences(ledger, [leaving, second]) == []
    more = changed(leaving, pages=list(range(5)), index_pages=5, hot_chunks=6, chunks=6)
    held = [name for name, _ in differences(ledger, [more, second])]
    assert held == ["host_pages", "hot_chunks", "index_pages"]


def test_grants_after_the_audit_was_sent_are_not_compared(ledger: Ledger) -> None:
    """Found by seed 721 of the simulated cluster: a grant crossed two audits while its journal entry was written."""
    before, held = asked(ledger), held_rows(ledger)
    ledger.extend(7, Memory(host_pages=1, hot_chunks=1, index_pages=1))
    inventory = take_inventory(1, held, free_beside(held))
    assert compare(ledger, KEY, inventory, before, lambda placement: False) == []
    late = compare(ledger, KEY, inventory, asked(ledger), lambda placement: False)
    assert [it.kind for it in late] == ["host_pages", "hot_chunks", "index_pages"]


def test_placement_after_the_audit_was_sent_is_not_missed(ledger: Ledger) -> None:
    inventory = take_inventory(1, [], free_beside([]))
    assert [it.placement for it in compare(ledger, KEY, inventory, {8: ledger.held(8)}, lambda placement: False)] == [8]


def test_an_unreadable_inventory_is_the_workers_fault(ledger: Ledger) -> None:
    inventory = take_inventory(1, held_rows(ledger), free_beside(held_rows(ledger)))
    with pytest.raises(ProtocolError, match="inventory"):
        compare(ledger, KEY, msgspec.structs.replace(inventory, rows=bytes(7)), asked(ledger), lambda placement: False)


def test_page_ids_are_checked_in_rotation() -> None:
    """I8: what one inventory costs is bounded; every request's turn comes."""

    def digests(number: int, held: list[Held]) -> list[int]:
        return [row.digest for row in unpack_rows(take_inventory(number, held, FreeDeviceMemory(0, 0, 0)).rows)]

    looked_at: set[int] = set()
    for number in range(5):
        found = digests(number, [row_of(i, list(range(PAGES_MAX // 2))) for i in range(5)])
        seen = {i for i, digest in enumerate(found) if digest != UNCHECKED}
        assert len(seen) == 2
        looked_at |= seen
    assert looked_at == set(range(5))
    alone = digests(0, [row_of(0, list(range(2 * PAGES_MAX)))])
    assert alone == [digest_of(np.arange(2 * PAGES_MAX, dtype=np.int32))]


# ---------------------------------------------------------------- rounds

A, B, C = (Difference("host_pages", i, "1", "2") for i in range(3))


def test_difference_is_reported_once_after_two_equal_audits() -> None:
    rounds = AuditRounds(1.0)
    rounds.due([KEY], 0.0)
    rounds.due([KEY], 1.0)
    assert rounds.hear(KEY, [A, B]) == []
    assert rounds.hear(KEY, [B, C]) == [B]
    assert rounds.hear(KEY, [B, A]) == []
    assert rounds.confirmed(KEY) == [B]
    assert rounds.hear(KEY, []) == []
    assert rounds.hear(KEY, [B]) == []
    assert rounds.hear(KEY, [B]) == [B], "it came back"


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.integers(1, 400))
@settings(max_examples=50)
def test_audit_asks_each_worker_in_turn_once_an_interval(pauses: list[int], workers: int) -> None:
    keys, rounds, now, asked = [(f"w{i}", 1) for i in range(min(workers, 12))], AuditRounds(5.0), 0.0, set()
    for tick in range(200):
        now += 0.25 * pauses[tick % len(pauses)]
        due = rounds.due(keys, now)
        assert len(due) <= 1
        for key, number in due:
            assert rounds.expects(key, number)
            assert not rounds.expects(key, number + 1)
            asked.add(key)
            rounds.hear(key, [])
            assert not rounds.expects(key, number), "asked once, heard once"
    assert asked == set(keys)


def test_audit_retries_silent_worker() -> None:
    rounds = AuditRounds(0.0)
    assert rounds.due([KEY], 0.0) == []
    rounds.want([KEY])
    assert rounds.due([KEY], 0.0) == [(KEY, 1)]
    assert rounds.due([KEY], 5.0) == []
    assert rounds.due([KEY], 11.0) == [(KEY, 2)]
    rounds.hear(KEY, [A])
    assert rounds.wants([KEY])
    assert rounds.confirmed(KEY) is None
    assert rounds.due([KEY], 12.0) == [(KEY, 3)]
    rounds.hear(KEY, [A])
    assert not rounds.wants([KEY])
    assert rounds.confirmed(KEY) == [A]
    assert rounds.due([], 13.0) == []
    assert rounds.confirmed(KEY) is None, "gone"


# ---------------------------------------------------------------- in the coordinator


async def play(rig: SchedulerRig, rounds: int, *, answer: bool = True) -> None:
    for _ in range(rounds):
        if answer:
            rig.round()
        await trio.sleep(0.3)
        await rig.settle()


async def running(rig: SchedulerRig) -> FakeLink:
    link = await rig.add_worker("w0")
    await rig.submit("r", prompt=100, max_tokens=1_500)
    await rig.run_until("r", "RUNNING")
    await play(rig, 4)
    assert rig.scheduler._counters.audits > 0
    assert not rig.scheduler._counters.audit_differences
    return link


def forget_released(rig: SchedulerRig, link: FakeLink) -> None:
    """The worker has let go, and its Released is lost."""
    link.worker.runs.clear()


def hold_a_stranger(rig: SchedulerRig, link: FakeLink) -> None:
    (run,) = link.worker.runs.values()
    other = replace(run, admit=msgspec.structs.replace(run.admit, placement=99), pages=[40, 41], index_pages=2)
    other.hot_slots, other.hot_chunks = 0, 2
    link.worker.runs[99] = other


def keep_for_no_request(rig: SchedulerRig, link: FakeLink) -> None:
    ledger = rig.scheduler._ledgers["n0"]
    ledger.reserve(500, "w0", Memory(host_pages=2))
    ledger.keep(500, 2)


def give_without_telling(rig: SchedulerRig, link: FakeLink) -> None:
    (placement,) = rig.scheduler._ledgers["n0"].placements_of(("w0", 1))
    rig.scheduler._ledgers["n0"].extend(placement, Memory(hot_chunks=1))


def write_elsewhere(rig: SchedulerRig, link: FakeLink) -> None:
    (run,) = link.worker.runs.values()
    run.pages[0] = 60


def leak_a_page(rig: SchedulerRig, link: FakeLink) -> None:
    ledger = rig.scheduler._ledgers["n0"]
    ledger._refcounts[ledger._free[0]] += 1


IN_THE_COORDINATOR = {
    "unreleased": (forget_released, "unreleased", True),
    "stray": (hold_a_stranger, "stray", True),
    "orphan": (keep_for_no_request, "orphan", True),
    "given, not told": (give_without_telling, "hot_chunks", False),
    "another page": (write_elsewhere, "host_pages", False),
    "leaked page": (leak_a_page, "accounts", False),
}


@pytest.mark.mutation
@pytest.mark.parametrize("name", IN_THE_COORDINATOR)
async def test_planted_difference_is_reported_counted_and_repaired(
    autojump_clock: MockClock, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("hisparse"), "propagate", True)
    plant, kind, is_repaired = IN_THE_COORDINATOR[name]
    async with open_rig(settings=AUDITED, host_pages=64) as rig:
        link = await running(rig)
        plant(rig, link)
        for _ in range(8):  # the request stands still: every command and report has arrived
            while link.downlink:
                link.obey()
            for placement in [it for it, run in link.worker.runs.items() if run.phase == "leaving"]:
                link.worker.advance(placement)
            while link.uplink:
                link.hear()
            await play(rig, 1, answer=False)
        counted = rig.scheduler._counters.audit_differences
        assert counted[kind] == 1, counted
        lines = [record for record in caplog.records if record.getMessage().startswith("audit:")]
        assert kind in {record.fields["kind"] for record in lines}  # type: ignore[attr-defined]
        if kind in ("unreleased", "hot_chunks", "host_pages"):
            assert any("submitted" in record.fields["history"] for record in lines)  # type: ignore[attr-defined]
        if is_repaired:
            await rig.run_until("r", "FINISHED")
            rig.check_nothing_leaked()
            assert len(rig.tokens("r")) == rig.scheduler.describe("r")[0].generated_tokens


@pytest.mark.parametrize("seed", range(8))
async def test_audit_reports_nothing_while_messages_cross(autojump_clock: MockClock, seed: int) -> None:
    """Admissions, growth, retraction, losses and returns: no difference is one."""
    rng = random.Random(seed)
    async with open_rig(seed, settings=AUDITED, host_pages=60) as rig:
        links = [await rig.add_worker("w0"), await rig.add_worker("w1")]
        for i in range(14):
            await rig.submit(f"r{i}", prompt=rng.randint(10, 300), max_tokens=rng.randint(5, 600))
        for step in range(600):
            if step % 60 == 59:
                name = rng.choice(sorted(rig.links))
                rig.lose_worker(name, proved=rng.random() < 0.5)
                links.append(await rig.add_worker(name))
                for zombie in list(rig.zombies):
                    rig.prove_exit(zombie)
            for link in list(rig.links.values()):
                for _ in range(rng.randint(0, 20)):
                    rng.choice((link.obey, link.hear))()
                for placement in list(link.worker.runs):
                    if rng.random() < 0.7:
                        link.worker.advance(placement)
            await trio.sleep(rng.uniform(0.0, 0.2))
            await rig.settle()
        counters = rig.scheduler._counters
        assert counters.audits > 20
        assert not counters.audit_differences, counters.audit_differences


async def test_operator_audit_lists_all_workers_and_differences(autojump_clock: MockClock) -> None:
    async with open_rig(host_pages=64, settings=msgspec.structs.replace(SETTINGS, audit_interval_s=0.0)) as rig:
        link = await rig.add_worker("w0")
        await rig.add_worker("w1")
        await rig.submit("r", prompt=100, max_tokens=1_500)
        await rig.run_until("r", "RUNNING")
        write_elsewhere(rig, rig.links[rig.scheduler.describe("r")[0].worker])
        leak_a_page(rig, link)
        answers: list[tuple[tuple[AuditedRow, ...], tuple[DifferenceRow, ...]]] = []

        async def ask() -> None:
            answers.append(await rig.scheduler.audit("test"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while not answers:
                for each in rig.links.values():
                    while each.downlink:
                        each.obey()
                    while each.uplink:
                        each.hear()
                await trio.sleep(0.1)
        audited, found = answers[0]
        assert [(row.name, row.answered) for row in audited] == [("w0", True), ("w1", True), ("n0", True)]
        rows: dict[str, DifferenceRow] = {row.kind: row for row in found}
        assert set(rows) == {"host_pages", "accounts"}
        assert (rows["host_pages"].request_id, rows["host_pages"].repaired) == ("r", False)


async def test_operator_audit_names_silent_workers(autojump_clock: MockClock) -> None:
    async with open_rig() as rig:
        await rig.add_worker("w0")
        began = trio.current_time()
        audited, found = await rig.scheduler.audit("test")
        assert [(row.name, row.answered) for row in audited] == [("w0", False), ("n0", True)]
        assert found == ()
        assert trio.current_time() - began < 6


@pytest.mark.sim
def test_audit_reports_nothing_in_the_simulated_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills, restarts, cut links, journals that lose their end, pools that vanish: ledger and workers agree."""
    often = msgspec.structs.replace(shape.SETTINGS, audit_interval_s=0.5)
    monkeypatch.setattr(shape, "SETTINGS", often)
    found: list[Difference] = []
    heard: list[int] = []

    def tell(self: Auditor, name: str, node: str, worker: object, difference: Difference) -> list[object]:
        found.append(difference)
        return []

    def hear(self: AuditRounds, *arguments: object) -> list[Difference]:
        heard.append(1)
        return real(self, *arguments)

    real: Callable[..., list[Difference]] = AuditRounds.hear
    monkeypatch.setattr(Auditor, "_tell", tell)
    monkeypatch.setattr(AuditRounds, "hear", hear)
    for seed in range(7_000, 7_010):
        assert simulate(seed).violation is None
    assert found == []
    assert len(heard) > 60
