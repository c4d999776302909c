"""Rows that go to another node: what a transfer holds there, and who is told what when either side fails."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from coordinator.memory.changes import Keep, Release, Reserve, apply
from coordinator.memory.ledger import Ledger
from coordinator.policy.decisions import AdmitDecision, DemoteDecision
from coordinator.policy.policy import STRANDED_LIMIT_S
from coordinator.state.events import (
    DemoteOrder,
    EndOrder,
    PlacementEnded,
    PlacementProgressed,
    RetractOrder,
    Stage,
)
from coordinator.state.worker_entry import WorkerEntry
from coordinator.turn.dispatch import NOTHING, TRANSFER_PAUSE_S, TRANSFERS_FAILED_MAX, Dispatch, Effects
from protocol.messages import BOTH, DECODE, DIRECT, PREFILL, Exited, Withdraw
from protocol.sizing import Memory
from protocol.units import PAGE_TOKENS
from tests.support.facts import add_request
from tests.support.fakes.fake_cluster import MODEL, FakePort, capacity
from worker.transfer.handover import Incoming, Outgoing

SLOT = 7
PROMPT = 130


class Desk:
    """p0 and p1 prefill on node a, d0 and d1 decode on node b; steps are applied as they come."""

    def __init__(self, *, workers: str = "p0 p1 d0 d1") -> None:
        self.ledgers = {"a": Ledger(64), "b": Ledger(64)}
        self.dispatch = Dispatch(self.ledgers, 96)
        self.placement_table = self.dispatch.placement_table
        self.workers: dict[str, WorkerEntry] = {}
        for name in workers.split():
            self.join(name)
        self.entry = add_request(self.placement_table, SLOT, 0, PROMPT, 300)
        self.now = 0.0

    def join(self, name: str, role: str = "", epoch: int = 1) -> WorkerEntry:
        role = role or (PREFILL if name[0] == "p" else DECODE)
        size = msgspec.structs.replace(capacity(role, host_pages=64), sends=True, receives=True)
        node = "a" if name[0] == "p" else "b"
        worker = WorkerEntry(name, node, epoch, size, MODEL, FakePort(), receiver=b"there", pid=4711)
        self.workers[name] = worker
        self.hear(self.dispatch.worker_up(worker))
        return worker

    def settle(self) -> list[AdmitDecision]:
        self.dispatch.dirty = True
        plan = self.dispatch.plan(self.now)
        for decision in plan:
            for step in (self.dispatch.transfer_step(decision), self.dispatch.step(decision)):
                if step is not None:
                    apply(self.ledgers[step.node], step.change)
        self.check()
        return [decision for decision in plan if isinstance(decision, AdmitDecision)]

    def hear(self, heard: Effects) -> Effects:
        for step in heard.steps:
            apply(self.ledgers[step.node], step.change)
        self.check()
        return heard

    def check(self) -> None:
        self.placement_table.check_invariants(self.ledgers.__getitem__)
        for ledger in self.ledgers.values():
            ledger.check_invariants()

    # what workers say

    def staged(self) -> None:
        self.hear(self.dispatch.progressed(PlacementProgressed(SLOT, self.entry.placement, Stage.STAGED)))

    def sent(self, durable_tokens: int = PROMPT) -> Effects:
        event = PlacementEnded(SLOT, self.entry.placement, durable_tokens)
        return self.hear(self.dispatch.placement_ended(event, 1 if durable_tokens else 0))

    def closed(self, transfer_id: int, durable_tokens: int = PROMPT) -> Effects:
        it = self.placement_table.transfers[transfer_id]
        return self.hear(self.dispatch.transfer_closed(it.worker, it.epoch, transfer_id, durable_tokens))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def begin(desk: Desk) -> int:
    """The request is on its way; returns its transfer."""
    (admit,) = desk.settle()
    assert admit.transfer is not None
    return admit.transfer.transfer_id


def changes(heard: Effects) -> list[object]:
    return [step.change for step in heard.steps]


def test_pages_of_both_nodes_are_reserved_at_once(desk: Desk) -> None:
    """I7. Where it is decoded with room to go on, and a seat; where it is prefilled for the prompt alone."""
    (admit,) = desk.settle()
    assert admit.transfer is not None
    there = desk.dispatch.transfer_step(admit)
    assert there is not None
    assert there.change == Reserve(admit.transfer.transfer_id, admit.transfer.worker.name, Memory(admit.transfer.pages))
    assert (there.node, admit.worker.node, admit.memory.host_pages) == ("b", "a", 3)
    assert admit.transfer.pages > 3
    assert desk.ledgers["b"].budget(admit.transfer.worker.name).free.seats == 2


def test_local_node_is_preferred(desk: Desk) -> None:
    desk.join("p2", BOTH)
    desk.entry.facts = replace(desk.entry.facts, prefill_mode=DIRECT)
    (admit,) = desk.settle()
    assert admit.transfer is None
    assert admit.decoder == "p2"


@pytest.mark.parametrize("first", ["sent", "arrived"])
def test_request_is_placed_once_its_transfer_is_complete(desk: Desk, first: str) -> None:
    transfer_id = begin(desk)
    pages = desk.placement_table.transfers[transfer_id].pages
    desk.staged()
    if first == "sent":
        assert changes(desk.sent()) == [Release(desk.entry.came_with + transfer_id + 1)]
        assert desk.settle() == [], "the other side has not said that all is there"
        assert changes(desk.closed(transfer_id)) == [Keep(transfer_id, pages)]
    else:
        assert changes(desk.closed(transfer_id)) == [Keep(transfer_id, pages)]
        assert desk.settle() == []
        desk.sent()
    (admit,) = desk.settle()
    assert (admit.worker.node, admit.take_over, admit.durable_tokens) == ("b", transfer_id, PROMPT)
    assert (desk.entry.transfer_id, desk.placement_table.transfers) == (0, {})
    assert desk.ledgers["a"].pages_free == 64


def test_lost_sender_costs_no_time_and_frees_no_page(desk: Desk) -> None:
    """I2: the request goes to another prefill worker at once; where it was to go, pages wait for that worker's word."""
    transfer_id = begin(desk)
    name, held = desk.entry.worker, 64 - desk.ledgers["b"].pages_free
    desk.hear(desk.dispatch.worker_down(desk.workers[name], proved_exit=False))
    heard = desk.sent(0)
    assert [(send.worker, send.command) for send in heard.sends] == [
        (desk.placement_table.transfers[transfer_id].worker, Withdraw(transfer_id))
    ]
    (again,) = desk.settle()
    assert again.worker.name != name
    assert again.transfer is not None
    assert 64 - desk.ledgers["b"].pages_free == held + again.transfer.pages
    assert changes(desk.closed(transfer_id, 0)) == [Release(transfer_id)]
    assert 64 - desk.ledgers["b"].pages_free == again.transfer.pages


def test_proved_exit_is_sent_to_transfer_receivers(desk: Desk) -> None:
    transfer_id = begin(desk)
    heard = desk.hear(desk.dispatch.worker_down(desk.workers[desk.entry.worker], proved_exit=True, died=True))
    assert [send.command for send in heard.sends] == [Exited(desk.entry.worker, 4711)]
    assert heard.sends[0].worker == desk.placement_table.transfers[transfer_id].worker


def test_rows_of_a_lost_sender_count_only_where_they_arrived(desk: Desk) -> None:
    transfer_id = begin(desk)
    desk.staged()
    desk.closed(transfer_id)
    desk.hear(desk.dispatch.worker_down(desk.workers[desk.entry.worker], proved_exit=True))
    desk.sent()
    (admit,) = desk.settle()
    assert (admit.take_over, admit.durable_tokens) == (transfer_id, PROMPT)


def test_lost_receiver_quarantines_pages_of_its_transfer(desk: Desk) -> None:
    transfer_id = begin(desk)
    pages, taker = desk.placement_table.transfers[transfer_id].pages, desk.placement_table.transfers[transfer_id].worker
    heard = desk.hear(desk.dispatch.worker_down(desk.workers[taker], proved_exit=False))
    assert Release(transfer_id) in changes(heard)
    assert desk.ledgers["b"].count_pages().quarantined == pages
    assert [type(tell.event) for tell in heard.tells] == [RetractOrder]
    desk.sent(0)
    (again,) = desk.settle()
    assert again.decoder != taker
    assert desk.entry.transfers_failed == 0, "it was not the transfer's fault"


def test_transfer_that_does_not_arrive_is_given_up(desk: Desk) -> None:
    transfer_id = begin(desk)
    desk.staged()
    desk.sent()
    heard = desk.closed(transfer_id, 0)
    assert changes(heard) == [Release(transfer_id)]
    assert [type(tell.event) for tell in heard.tells] == [DemoteOrder]
    assert (desk.entry.waits, desk.entry.pages) == (True, 0)
    assert desk.ledgers["b"].pages_free == 64


@pytest.mark.parametrize("side", ["sends", "takes in"])
def test_repeated_transfer_failures_fail_the_request(desk: Desk, side: str) -> None:
    """I8. Each pause is twice as long as the one before."""
    for failed in range(TRANSFERS_FAILED_MAX):
        if failed:
            pause = TRANSFER_PAUSE_S * 2 ** (failed - 1)
            desk.now += pause * 0.99
            assert desk.settle() == []
            desk.now += pause * 0.02
        transfer_id = begin(desk)
        if side == "sends":
            heard = desk.sent(0)
            desk.closed(transfer_id, 0)
        else:
            heard = desk.closed(transfer_id, 0)
            desk.sent(0)
    ends = [tell.event for tell in heard.tells if isinstance(tell.event, EndOrder)]
    assert ends[0].outcome == "FAILED"
    assert f"{TRANSFERS_FAILED_MAX} transfers failed" in ends[0].reason
    assert [ledger.pages_free for ledger in desk.ledgers.values()] == [64, 64]


@pytest.mark.parametrize("moment", ["sending", "sent", "arrived"])
def test_abort_at_any_moment_frees_all_pages_in_time(desk: Desk, moment: str) -> None:
    """I2: not before the taker's word."""
    transfer_id = begin(desk)
    if moment != "sending":
        desk.staged()
        desk.sent()
    if moment == "arrived":
        desk.closed(transfer_id)
    heard = desk.hear(desk.dispatch.end(desk.entry, "ABORTED", "client"))
    if moment == "sending":
        heard = heard.plus(desk.sent(0))
    if moment != "arrived":
        assert Withdraw(transfer_id) in [send.command for send in heard.sends]
        assert desk.ledgers["b"].pages_free < 64
        desk.closed(transfer_id, 0)
    assert [ledger.pages_free for ledger in desk.ledgers.values()] == [64, 64]
    assert desk.placement_table.transfers == {}


def test_transfer_is_closed_once(desk: Desk) -> None:
    transfer_id = begin(desk)
    it = desk.placement_table.transfers[transfer_id]
    key = it.worker, it.epoch
    assert desk.dispatch.transfer_closed(it.worker, it.epoch + 1, transfer_id, PROMPT) == NOTHING
    assert desk.dispatch.transfer_closed("p0", 1, transfer_id, PROMPT) == NOTHING
    desk.closed(transfer_id)
    assert desk.dispatch.transfer_closed(*key, transfer_id, PROMPT) == NOTHING
    assert desk.dispatch.transfer_closed(*key, transfer_id, 0) == NOTHING
    desk.staged()
    desk.sent()
    assert desk.dispatch.transfer_closed(*key, transfer_id, 0) == NOTHING


def test_rows_in_a_lost_pool_are_not_handed_over(desk: Desk) -> None:
    """Seed 8272: its node is booted anew while the sender has yet to leave."""
    transfer_id = begin(desk)
    desk.staged()
    desk.closed(transfer_id)
    heard = desk.hear(desk.dispatch.close_transfer(desk.placement_table.transfers[transfer_id], "gone", is_lost=True))
    assert [type(tell.event) for tell in heard.tells] == [RetractOrder]
    desk.sent()
    assert (desk.entry.waits, desk.entry.pages, desk.entry.transfer_id) == (True, 0, 0)


def test_pages_in_transfer_are_not_demoted(desk: Desk) -> None:
    """A better-ranked request waits rather than take pages that are still written."""
    transfer_id = begin(desk)
    desk.staged()
    desk.sent()
    add_request(desk.placement_table, 8, 5, 64 * 24, 100, DIRECT)
    desk.settle()
    assert transfer_id in desk.placement_table.transfers
    assert desk.entry.pages > 0


def test_workers_of_other_page_sizes_are_not_paired(desk: Desk) -> None:
    for name in ("d0", "d1"):
        size = msgspec.structs.replace(desk.workers[name].capacity, page_bytes=4096)
        desk.workers[name].capacity = size
    assert desk.settle() == []


# ---------------------------------------------------------------- pages


def test_full_pages_are_sent_during_prefill() -> None:
    out = Outgoing(1, 2 * PAGE_TOKENS + 5)
    assert list(out.take_ready(PAGE_TOKENS - 1)) == []
    assert list(out.take_ready(PAGE_TOKENS)) == [0]
    assert list(out.take_ready(PAGE_TOKENS)) == []
    assert list(out.take_ready(2 * PAGE_TOKENS + 4)) == [1]
    assert list(out.take_ready(2 * PAGE_TOKENS + 5)) == [2]
    assert not out.is_over


@pytest.mark.parametrize("tokens", [1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1])
def test_every_page_is_sent_once_and_counted_once(tokens: int) -> None:
    out = Outgoing(1, tokens)
    sent = [index for rows in range(tokens + 1) for index in out.take_ready(rows)]
    assert sent == list(range(out.pages))
    for index in (*sent, *sent):
        assert out.is_delivered == (len(out.delivered) == out.pages)
        out.delivered.add(index)
    assert out.is_delivered
    out = Outgoing(1, tokens, failure="cut")
    out.delivered |= set(range(out.pages))
    assert (out.is_over, out.is_delivered) == (True, False)


def test_received_pages_count_all_or_none() -> None:
    into = Incoming(PAGE_TOKENS + 1, [9, 5, 7])
    assert into.pages == [9, 5]
    into.arrived.add(1)
    assert (into.is_over, into.durable_tokens) == (False, 0)
    into.arrived.add(1)
    assert not into.is_over
    revoked = Incoming(PAGE_TOKENS + 1, [9, 5, 7], arrived={1}, is_revoked=True)
    assert (revoked.is_over, revoked.durable_tokens) == (True, 0)
    into.arrived.add(0)
    assert (into.is_over, into.durable_tokens) == (True, PAGE_TOKENS + 1)


def test_pages_that_the_receiver_has_are_neither_sent_nor_opened() -> None:
    """The sender has two pages of the prompt cached, the receiver one: rows that were loaded go as soon as any do."""
    out, into = Outgoing(1, 3 * PAGE_TOKENS + 5, unsent_pages=1), Incoming(3 * PAGE_TOKENS + 5, [9, 5, 7, 3, 8], 1)
    assert (out.pages, into.pages) == (3, [5, 7, 3])
    assert list(out.take_ready(2 * PAGE_TOKENS)) == [0]
    assert list(out.take_ready(3 * PAGE_TOKENS + 5)) == [1, 2]
    for index in range(3):
        assert not out.is_delivered
        assert not into.is_whole
        out.delivered.add(index)
        into.arrived.add(index)
    assert out.is_delivered
    assert into.durable_tokens == 3 * PAGE_TOKENS + 5


def test_nothing_goes_before_what_the_receiver_has_is_passed() -> None:
    out = Outgoing(1, 3 * PAGE_TOKENS + 5, parts=2, unsent_pages=2)
    assert list(out.take_ready(PAGE_TOKENS)) == []
    assert list(out.take_ready(2 * PAGE_TOKENS, 1)) == []
    assert list(out.take_ready(3 * PAGE_TOKENS, 1)) == [0]
    assert list(out.take_ready(3 * PAGE_TOKENS + 5, 0)) == [0, 1]


def test_prompt_kept_without_a_decode_worker_begins_anew(desk: Desk) -> None:
    """I5. Its transfer was forgotten (a coordinator went), its rows are kept where they were prefilled."""
    transfer = desk.placement_table.transfers[begin(desk)]
    desk.staged()
    desk.hear(desk.dispatch.revoke(transfer))
    desk.closed(transfer.placement, 0)
    desk.sent()
    assert (desk.entry.waits, desk.entry.node) == (True, "a")
    assert desk.entry.kept_tokens
    desk.dispatch.plan(100.0, tick=True)
    assert not any(isinstance(it, DemoteDecision) for it in desk.dispatch.plan(100.0 + STRANDED_LIMIT_S - 1, tick=True))
    assert any(isinstance(it, DemoteDecision) for it in desk.dispatch.plan(100.0 + STRANDED_LIMIT_S, tick=True))
