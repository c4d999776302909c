"""Replaying any prefix of what was committed rebuilds the state that was true then: ledgers, requests, tokens.

A state machine lives a coordinator's life on the records alone: submissions, stays, growth, retraction, lost workers,
tokens, ends, slots used again, summaries. After each step a prefix is replayed, once from every record and once from
those that the store keeps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.journal import ledger_image, summary
from coordinator.journal.ledger_image import parts_of
from coordinator.journal.records import (
    LedgerChanged,
    PoolOpened,
    Record,
    RequestEnded,
    RequestOrdered,
    RequestPlaced,
    RequestPlacementEnded,
    RequestsForgotten,
    SummaryEnded,
    WorkerDrained,
    WorkerJoined,
    WorkerUndrained,
    decode,
    encode,
    struck_of,
    tokens_of,
)
from coordinator.journal.state import JournalState, replay
from coordinator.journal.summary import Summarizing
from coordinator.memory.changes import (
    AddWorker,
    Change,
    Extend,
    Keep,
    LoseWorker,
    ProveExit,
    Release,
    Reserve,
    Shrink,
    apply,
)
from coordinator.memory.ledger import Ledger
from coordinator.tokens.token_log import TokenLog
from protocol.errors import CapacityError
from protocol.logprobs import row_words
from protocol.messages import NO_TOKEN
from protocol.sizing import Memory
from tests.support.facts import make_accepted
from tests.support.fakes.fake_cluster import MODEL, capacity
from tests.support.fakes.journal import kept_of
from tests.support.progress import RequestEntry, progress

SLOTS = 6
PAGES = 40
MAX_TOKENS = 100
PROMPT = np.arange(70, dtype=np.int32)

Picture = tuple[object, ...]


def picture_of(state: JournalState, log: TokenLog) -> Picture:
    """All that a replay must bring back."""
    outputs = {
        request_index: (
            log.tokens(request_index, 0),
            log.durable(request_index) if it.placed else 0,
            rows_in(log, request_index),
        )
        for request_index, it in state.requests.items()
    }
    requests = {
        request_index: (it.facts, it.prompt, it.placed, it.on_worker, it.kept_tokens, it.first_token, it.ended)
        for request_index, it in state.requests.items()
    }
    live = {request_index: it for request_index, it in state.requests.items() if it.ended is None}
    orders = {request_index: (it.ordered, it.strikes, it.mark, it.killed) for request_index, it in live.items()}
    images = {node: list(parts_of(node, ledger)) for node, ledger in state.ledgers.items()}
    workers = {node: [it.epoch for it in state.joined(node)] for node in state.ledgers}
    return images, state.pools, workers, dict(state.drains), requests, orders, outputs, state.arrivals, state.placements


def rows_in(log: TokenLog, request_index: int) -> list[int]:
    """Of all its tokens: rows of log-probabilities, if it asks for them."""
    index, stop = np.array([request_index], np.int32), np.array([log.length(request_index)], np.int32)
    found = log.gather_logprobs(index, np.zeros(1, np.int32), stop)
    return [] if found is None else found.rows.tolist()


def new_log(*, journalled: bool) -> TokenLog:
    return TokenLog(SLOTS, 1 << 12, journalled=journalled)


@pytest.fixture(scope="module", autouse=True)
def small_steps() -> Iterator[None]:
    """A summary takes many groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "REQUESTS_EACH", 1)
        patch.setattr(summary, "TOKENS_EACH", 4)
        patch.setattr(ledger_image, "PART_HOLDINGS", 1)
        patch.setattr(ledger_image, "PART_PAGES", 16)
        yield


class JournalMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = JournalState()
        self.log = new_log(journalled=True)
        self.records: list[Record] = []
        self.pictures: list[tuple[int, Picture]] = []
        self.epochs = 0
        self.names = 0
        self.summarizing: Summarizing | None = None
        self.write(PoolOpened("n0", capacity(host_pages=PAGES), MODEL))
        self.state.ledgers["n0"] = self.ledger = Ledger(PAGES)

    # ---------------------------------------------------------------- the journal's side

    def write(self, *records: Record) -> None:
        """As GroupCommit does, with a group for each append: tokens first."""
        news = self.log.take_news()
        for record in records:
            self.state.note(record)
        group = ([tokens_of(news)] if news else []) + list(records) + self.more()
        self.records += [decode(encode(record)) for record in group]

    def more(self) -> list[Record]:
        """Of the summary under way, if there is one."""
        records = self.summarizing.more() if self.summarizing else []
        self.summarizing = None if records and isinstance(records[-1], SummaryEnded) else self.summarizing
        return records

    def change(self, change: Change, *notes: Record) -> None:
        apply(self.ledger, change)
        self.write(LedgerChanged("n0", (change,)), *notes)

    @invariant()
    def a_prefix_rebuilds_what_was_true(self) -> None:
        self.log.check_invariants()
        log = self.log
        if (log.lengths == log._taken).all() and (log._durable == log._durable_taken).all():
            self.pictures.append((len(self.records), picture_of(self.state, self.log)))
        at, picture = self.pictures[(7 * len(self.records)) % len(self.pictures)]
        for records in (self.records[:at], kept_of(self.records[:at])):
            log = new_log(journalled=True)
            state = replay(records, log)
            assert picture_of(state, log) == picture
            log.check_invariants()
            assert log.take_news() is None
            for ledger in state.ledgers.values():
                ledger.check_invariants()

    # ---------------------------------------------------------------- workers

    @property
    def live(self) -> list[WorkerJoined]:
        return [it for it in self.state.joined("n0") if self.ledger.has_live(it.worker) and self._is_live(it)]

    def _is_live(self, joined: WorkerJoined) -> bool:
        return self.ledger.budget(joined.worker).epoch == joined.epoch

    @rule(name=st.sampled_from(["w0", "w1"]))
    def join(self, name: str) -> None:
        if not self.ledger.has_live(name):
            self.epochs += 1
            first = self.epochs - self.epochs % 3
            process = 4711, 5, "boot", None, first
            joined = WorkerJoined("n0", name, self.epochs, capacity(host_pages=PAGES), MODEL, *process)
            self.change(AddWorker(name, self.epochs, joined.capacity), joined)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0), proved=st.booleans())
    def lose(self, pick: int, proved: bool) -> None:
        joined = self.live[pick % len(self.live)]
        self.change(LoseWorker(joined.worker, joined.epoch, proved))
        for request_index, record in list(self.state.requests.items()):
            if (
                record.on_worker
                and record.placed is not None
                and (record.placed.worker, record.placed.epoch)
                == (
                    joined.worker,
                    joined.epoch,
                )
            ):
                self.end_placement(request_index, keep=True, full_pages=not proved)

    @rule()
    def prove(self) -> None:
        for worker, epoch in self.ledger.quarantines:
            self.change(ProveExit(worker, epoch))

    # ---------------------------------------------------------------- requests

    def pick_slot(self, pick: int, **wanted: bool) -> int | None:
        request_indices = [
            request_index
            for request_index, it in self.state.requests.items()
            if {"on_worker": it.on_worker, "ended": it.ended is not None} | wanted
            == {"on_worker": it.on_worker, "ended": it.ended is not None}
        ]
        return request_indices[pick % len(request_indices)] if request_indices else None

    @rule(priority=st.integers(-2, 2))
    def submit(self, priority: int) -> None:
        """Two of three ask for log-probabilities."""
        logprobs = self.names % 3 - 1
        try:
            request_index = self.log.open(MAX_TOKENS, row_words(logprobs))
        except CapacityError:
            return
        self.names += 1
        name, rank = f"r{self.names}", (-priority, 0, self.names)
        accepted = make_accepted(
            request_index, PROMPT.tobytes(), MAX_TOKENS, request_id=name, rank=rank, logprobs=logprobs
        )
        self.write(accepted)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0), pages=st.integers(2, 5))
    def admit(self, pick: int, pages: int) -> None:
        request_index = self.pick_slot(pick, on_worker=False, ended=False)
        if request_index is None:
            return
        record, joined = self.state.requests[request_index], self.live[pick % len(self.live)]
        take_over = record.placed.placement if record.placed else None
        number, want = self.state.placements + 1, Memory(pages, 2, pages, 1)
        if self.ledger.shortfall(joined.worker, want):
            return
        placed = RequestPlaced(request_index, number, "n0", joined.worker, joined.epoch, record.kept_tokens)
        self.change(Reserve(number, joined.worker, want, take_over), placed)
        self.log.begin_placement(request_index, number, len(PROMPT), 1 << 20, record.kept_tokens)
        self.log.bind(request_index, 1)

    @rule(pick=st.integers(0), count=st.integers(0, 9), durable=st.integers(0, 200))
    def say(self, pick: int, count: int, durable: int) -> None:
        request_index = self.pick_slot(pick, on_worker=True, ended=False)
        if request_index is None:
            return
        start, placed = self.log.length(request_index), self.state.requests[request_index].placed
        assert placed is not None
        tokens = list(range(start, min(start + count, MAX_TOKENS)))
        words = row_words(self.state.requests[request_index].facts.sampling.logprobs)
        rows = [1_000 * (request_index + 1) + token for token in tokens for _ in range(words)]
        entry = RequestEntry(request_index, placed.placement, start, tokens, durable, words, rows)
        self.log.append(progress(entry), 1)

    @rule(pick=st.integers(0))
    def grow(self, pick: int) -> None:
        request_index = self.pick_slot(pick, on_worker=True)
        more = Memory(1, 0, 1)
        if (
            request_index is not None
            and (placed := self.state.requests[request_index].placed)
            and self.ledger.pages_free
        ):
            if not self.ledger.has_live(placed.worker) or self.ledger.shortfall(placed.worker, more):
                return
            self.change(Extend(placed.placement, more))
            self.change(
                Shrink(placed.placement, Memory(hot_chunks=min(1, self.ledger.held(placed.placement).hot_chunks)))
            )

    @rule(pick=st.integers(0), keep=st.booleans())
    def retract(self, pick: int, keep: bool) -> None:
        request_index = self.pick_slot(pick, on_worker=True)
        if request_index is not None:
            self.end_placement(request_index, keep=keep)

    def end_placement(self, request_index: int, *, keep: bool, full_pages: bool = False) -> None:
        """`full_pages`: a process not proved gone may still write the last one."""
        placed = self.state.requests[request_index].placed
        assert placed is not None
        held = self.ledger.held(placed.placement).host_pages
        kept = min(self.log.durable(request_index), held * 64) if keep else 0
        kept = kept // 64 * 64 if full_pages else kept
        change: Change = Keep(placed.placement, -(-kept // 64)) if kept else Release(placed.placement)
        self.log.end_placement(request_index)
        self.change(change, RequestPlacementEnded(request_index, kept, kept if kept else NO_TOKEN))

    @rule(pick=st.integers(0), held=st.booleans(), outcome=st.sampled_from(["", "ABORTED"]))
    def order(self, pick: int, held: bool, outcome: str) -> None:
        request_index = self.pick_slot(pick, ended=False)
        if request_index is not None:
            self.write(RequestOrdered(request_index, held, -1, outcome, "because"))

    @rule(pick=st.integers(0), strikes=st.integers(1, 6))
    def strike(self, pick: int, strikes: int) -> None:
        request_index = self.pick_slot(pick, ended=False)
        if request_index is not None:
            self.write(struck_of("w0", [(request_index, strikes, self.log.length(request_index))]))

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0), undrain=st.booleans())
    def drain(self, pick: int, undrain: bool) -> None:
        """Some are joined again by the same process, and stay drained."""
        joined = self.live[pick % len(self.live)]
        self.write(
            WorkerUndrained(joined.worker)
            if undrain
            else WorkerDrained(joined.worker, joined.epoch, 7.5, handover=True)
        )

    @rule(pick=st.integers(0))
    def end(self, pick: int) -> None:
        request_index = self.pick_slot(pick, on_worker=False, ended=False)
        if request_index is not None:
            record = self.state.requests[request_index]
            if record.placed is not None:
                self.change(Release(record.placed.placement), RequestPlacementEnded(request_index, 0))
            self.write(RequestEnded(request_index, "FINISHED", "eos", self.log.length(request_index), "tail", 2.5))
            record.prompt = b""  # as its owner does

    @rule(pick=st.integers(0))
    def forget(self, pick: int) -> None:
        request_index = self.pick_slot(pick, ended=True)
        if request_index is not None:
            self.write(RequestsForgotten(np.array([request_index], np.int32).tobytes(), self.state.arrivals))
            self.log.close(request_index)

    @precondition(lambda self: self.summarizing is None)
    @rule()
    def begin_summary(self) -> None:
        """It goes on with every group that is written from now on."""
        self.summarizing = Summarizing(self.state, self.log)
        self.write(self.summarizing.begun)

    @rule()
    def pass_over(self) -> None:
        self.write()

    def summarize(self) -> None:
        self.begin_summary()
        while self.summarizing:
            self.write()


TestJournal = JournalMachine.TestCase
TestJournal.settings = settings(max_examples=60, stateful_step_count=40)


def test_summary_keeps_state_in_fewer_records() -> None:
    machine = JournalMachine()
    machine.join("w0")
    machine.submit(0)
    machine.admit(0, 3)
    for _ in range(50):
        machine.say(0, 1, 80)
        machine.write()
    machine.summarize()
    kept = [type(record).__name__ for record in kept_of(machine.records)]
    assert len(machine.records) > 60
    assert kept[:3] == ["RequestAccepted", "SummaryBegun", "NodePart"]
    assert (kept.count("NodePart"), kept.count("RequestPlaced"), kept[-1]) == (5, 13, "SummaryEnded")


def test_rows_kept_without_a_worker_survive_a_summary() -> None:
    machine = JournalMachine()
    machine.join("w0")
    for number in range(2):
        machine.submit(0)
        machine.admit(0, 3)
        machine.say(number, 9, 80)
    machine.retract(0, keep=True)
    machine.summarize()
    machine.retract(0, keep=True)
    for records in (machine.records, kept_of(machine.records)):
        log = new_log(journalled=True)
        assert picture_of(replay(records, log), log) == picture_of(machine.state, machine.log)
    assert [it.kept_tokens > 0 for it in machine.state.requests.values()] == [True, True]


def test_transfer_numbers_are_never_reused() -> None:
    """I1: its pages are reserved on its node, in a separate commit; the Admission that names it may be lost."""
    changes = AddWorker("w1", 1, capacity()), Reserve(7, "w1", Memory(host_pages=2))
    records: list[Record] = [PoolOpened("b", capacity(), MODEL), LedgerChanged("b", changes)]
    state = replay(records, new_log(journalled=True))
    assert state.ledgers["b"].placements() == {7}
    assert state.placements == 7
    released = replay([*records, LedgerChanged("b", (Release(7),))], new_log(journalled=True))
    assert released.placements == 7


def test_records_do_not_reach_the_next_owner_of_an_index() -> None:
    machine = JournalMachine()
    machine.join("w0")
    machine.submit(0)
    machine.admit(0, 3)
    machine.say(0, 9, 80)
    machine.retract(0, keep=False)
    machine.end(0)
    machine.forget(0)
    for _ in range(SLOTS):
        machine.submit(1)
    log = new_log(journalled=True)
    state = replay(kept_of(machine.records), log)
    assert sorted(state.requests) == list(range(SLOTS))
    assert log.lengths.tolist() == [0] * SLOTS
