"""What cached pages change in plans: which request waits for which, where it goes, what it reserves, and what leaves
the index. Dispatch and ledgers without actors; workers do what each test says."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from basics.request_states import POISON_STRIKES, PendingKind, State
from coordinator.memory.changes import GIVING, Reserve, apply, pages_taken
from coordinator.memory.ledger import Ledger
from coordinator.memory.prefix_index import Chain
from coordinator.policy import decisions
from coordinator.policy.following import FOLLOW_LIMIT_S
from coordinator.policy.pending import PendingReasons
from coordinator.policy.prefix_reuse import PrefixReuse
from coordinator.state.events import LedgerStep, LinkStats, PlacementEnded, PlacementProgressed, Stage
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import WorkerDrain, WorkerEntry
from coordinator.turn.dispatch import Dispatch, Effects
from protocol.messages import BOTH, DECODE, PREFILL, Command, ModelInfo
from protocol.sizing import Memory
from protocol.units import PAGE_TOKENS
from tests.support.facts import make_facts
from tests.support.fakes.fake_cluster import capacity

MODEL = ModelInfo("f", "m", 8_192, 1_000, 4, 128, (0,), "bytes", "")
PLENTY = {"seats": 20, "hot_chunks": 200, "index_pages": 200, "prompt_max_tokens": 6_400}


class FakePort:
    def __init__(self, step_us: float) -> None:
        self.step_us = step_us

    def send(self, command: Command) -> None:
        """Nothing obeys."""

    def step_s(self) -> float:
        return self.step_us * 1e-6

    def stats(self) -> LinkStats:
        return LinkStats(int(self.step_us > 0), self.step_us, 0, 0, 0.0, 0.0)


class Planner:
    def __init__(self, mode: str = "own", nodes: Sequence[str] = ("n0",), host_pages: int = 60) -> None:
        self.ledgers = {node: Ledger(host_pages) for node in nodes}
        self.reuse = PrefixReuse(mode, b"k" * 32)
        for node in nodes:
            self.reuse.open(node)
        self.dispatch = Dispatch(self.ledgers, PAGE_TOKENS, self.reuse)
        self.table, self.policy = self.dispatch.placement_table, self.dispatch.policy
        self.pending = PendingReasons(self.table, self.policy, lambda request_index: f"r{request_index}")
        self.now = 0.0

    def add_worker(self, name: str, node: str, role: str = BOTH, step_us: float = 0.0, **counts: int) -> None:
        size = capacity(role, host_pages=self.ledgers[node].pages_total, **(PLENTY | counts))
        size = msgspec.structs.replace(size, sends=True, receives=True)
        worker = WorkerEntry(name, node, 1, size, MODEL, FakePort(step_us), receiver=b"r")
        self.take(self.dispatch.worker_up(worker))

    def submit(
        self, number: int, contents: str, *, more: int = 1, user: str = "ann", salt: str = "", priority: int = 0
    ) -> RequestState:
        """A prompt of a page for each letter, and `more` tokens."""
        tokens = np.array([ord(it) for it in contents for _ in range(PAGE_TOKENS)] + [1] * more, dtype=np.int32)
        facts = make_facts(number, len(tokens), 8, rank=self.table.next_rank(priority, (user, "")), user=user)
        entry = self.table.add(facts)
        scope = self.reuse.scope(user, "", salt)
        root = self.reuse.root(MODEL, scope)
        entry.chain = Chain(root, self.reuse.digests(root, tokens.tobytes()), scope)
        entry.chain = entry.chain if self.reuse.is_on else None
        self.dispatch.dirty = True
        return entry

    def take(self, effects: Effects) -> None:
        for step in effects.steps:
            self._apply(step)

    def plan(self) -> list[decisions.Decision]:
        plan = self.dispatch.plan(self.now, tick=True)
        for decision in plan:
            for step in (self.dispatch.transfer_step(decision), self.dispatch.step(decision)):
                if step is not None:
                    self._make_room(step)
                    self._apply(step)
            if isinstance(decision, decisions.AdmitDecision):
                self.reuse.use(decision.entry, decision.worker.node, decision.share.size)
        self.check()
        return plan

    def _apply(self, step: LedgerStep) -> None:
        ledger = self.ledgers[step.node]
        free_before = ledger.pages_free
        apply(ledger, step.change)
        self.reuse.by_node[step.node].given_out(lambda: ledger.moved(free_before)[0])

    def _make_room(self, step: LedgerStep) -> None:
        """As the HostPool does."""
        ledger, shared = self.ledgers[step.node], frozenset[int]()
        if isinstance(step.change, GIVING):
            if isinstance(step.change, Reserve):
                shared = frozenset(step.change.shared.tolist())
            missing = pages_taken(step.change) - ledger.pages_free
            if missing > 0:
                ledger.evict(self.reuse.by_node[step.node].evict(missing, ledger.is_idle, shared))

    def admitted(self) -> dict[int, decisions.AdmitDecision]:
        return {it.entry.request_index: it for it in self.plan() if isinstance(it, decisions.AdmitDecision)}

    def compute(self, entry: RequestState, pages: int) -> None:
        self.take(self.dispatch.prompt_rows(entry, pages * PAGE_TOKENS))
        self.check()

    def stage(self, entry: RequestState, took_s: float = 0.0) -> None:
        for stage in (Stage.STAGED, Stage.STARTED):
            self.take(
                self.dispatch.progressed(PlacementProgressed(entry.request_index, entry.placement, stage, took_s))
            )
        entry.state = State.RUNNING
        self.check()

    def leave(self, entry: RequestState, cacheable: int = 0, *, is_suspect: bool = False) -> None:
        self.table.leave(entry, frees_pages=True)
        entry.state = State.FAILED if is_suspect else State.FINISHED
        ended = PlacementEnded(entry.request_index, entry.placement, 0, -1, b"", cacheable, is_suspect)
        self.take(self.dispatch.placement_ended(ended, 0))
        self.check()

    def cached_by(self, number: int, contents: str, **about: str) -> None:
        """A request has come and gone."""
        entry = self.submit(number, contents, **about)  # type: ignore[arg-type]
        assert number in self.admitted()
        self.stage(entry)
        self.leave(entry)

    def check(self) -> None:
        for node, ledger in self.ledgers.items():
            ledger.check_invariants()
            self.reuse.by_node[node].check_invariants(ledger.cached_pages())


def one_worker(mode: str = "own") -> Planner:
    planner = Planner(mode)
    planner.add_worker("w0", "n0")
    return planner


# ---------------------------------------------------------------- both at once


def test_second_request_with_a_new_prefix_waits_for_its_pages_and_holds_nothing() -> None:
    planner = one_worker()
    leader, follower = planner.submit(0, "abcd"), planner.submit(1, "abce")
    other = planner.submit(2, "xyz", user="bob")
    free = planner.ledgers["n0"].pages_free
    assert set(planner.admitted()) == {0, 2}, "it blocks no request behind it"
    assert planner.ledgers["n0"].pages_free == free - leader.pages - other.pages
    assert planner.ledgers["n0"].budget("w0").holders == 2
    planner.compute(leader, 2)
    assert planner.admitted() == {}
    reason = planner.pending.explain(follower, planner.now)
    assert reason.kind is PendingKind.PREFIX
    assert reason.text == "r0 computes the first 192 tokens of its prompt on w0, 128 are there"
    planner.compute(leader, 3)
    assert planner.admitted()[1].prefix_tokens == 192, "while its leader still computes"
    assert planner.ledgers["n0"].pages_of(follower.placement)[:3].tolist() == (
        planner.ledgers["n0"].pages_of(leader.placement)[:3].tolist()
    )


@pytest.mark.parametrize("why", ["another owner", "another salt", "ranked lower", "nothing in common", "off"])
def test_request_does_not_wait(why: str) -> None:
    planner = one_worker("off" if why == "off" else "own")
    leader = planner.submit(0, "abcd")
    assert 0 in planner.admitted()
    planner.submit(
        1,
        "xbcd" if why == "nothing in common" else "abcd",
        user="bob" if why == "another owner" else "ann",
        salt="s" if why == "another salt" else "",
        priority=1 if why == "ranked lower" else 0,
    )
    assert planner.admitted()[1].prefix_tokens == 0
    assert leader.worker
    assert not leader.runs


def test_in_mode_all_pages_of_others_are_reused_and_not_waited_for() -> None:
    planner = one_worker("all")
    leader = planner.submit(0, "abcd")
    assert 0 in planner.admitted()
    planner.compute(leader, 2)
    planner.submit(1, "abcd", user="bob")
    assert planner.admitted()[1].prefix_tokens == 128


@pytest.mark.parametrize("end", ["retracted", "aborted", "dead", "bound"])
def test_follower_goes_on_alone_when_its_leader_does_not(end: str) -> None:
    planner = one_worker()
    planner.add_worker("w1", "n0")
    leader, follower = planner.submit(0, "abcd"), planner.submit(1, "abcd")
    assert set(planner.admitted()) == {0}
    planner.compute(leader, 1)
    assert planner.admitted() == {}
    match end:
        case "retracted":
            planner.take(planner.dispatch.retract(leader, keep=True, hold=True, reason="test"))
        case "aborted":
            planner.take(planner.dispatch.end(leader, "ABORTED", "test"))
        case "dead":
            worker = planner.table.workers[leader.worker]
            planner.take(planner.dispatch.worker_down(worker, proved_exit=True))
        case "bound":
            planner.now = FOLLOW_LIMIT_S
    assert planner.admitted()[1].prefix_tokens == 64, "with what is there by then"
    assert not follower.goes_alone


def test_bound_begins_anew_with_each_page() -> None:
    planner = one_worker()
    leader, _ = planner.submit(0, "abcd"), planner.submit(1, "abcd")
    assert set(planner.admitted()) == {0}
    for pages in (1, 2, 3):
        planner.now += FOLLOW_LIMIT_S - 1
        planner.compute(leader, pages)
        assert planner.admitted() == {}
    planner.now += FOLLOW_LIMIT_S
    assert planner.admitted()[1].prefix_tokens == 192


def test_other_owners_prompts_change_neither_matches_nor_waiting() -> None:
    """In `own`, with room for all: the third request waits for the first, whatever others do."""
    seen = []
    for with_other in (False, True):
        planner, decided = one_worker(), []
        for step, contents in enumerate(("abc", "abd", "abc")):
            if with_other:
                planner.submit(100 + step, contents, user="bob")
                decided += [it for it in planner.plan() if it.entry.facts.user == "ann"]
            planner.submit(step, contents)
            decided += [it for it in planner.plan() if it.entry.facts.user == "ann"]
            for entry in list(planner.table.computing.values()):
                planner.compute(entry, 2)
            decided += [it for it in planner.plan() if it.entry.facts.user == "ann"]
        seen.append([(it.entry.request_index, it.prefix_tokens) for it in decided])  # type: ignore[union-attr]
    assert seen[0] == seen[1] == [(0, 0), (1, 128)]


# ---------------------------------------------------------------- where it goes, and what it takes


def test_a_prompt_whose_every_page_matches_still_computes_its_last_token() -> None:
    planner = one_worker()
    planner.cached_by(0, "abc")
    planner.submit(1, "abc", more=0)
    assert planner.admitted()[1].prefix_tokens == 128


def test_victims_are_counted_as_a_set() -> None:
    """Two sharers each free little alone, and everything together."""
    planner = Planner(host_pages=12)
    planner.add_worker("w0", "n0")
    planner.cached_by(0, "abcdef")
    sharers = [planner.submit(number, "abcdef", priority=-1) for number in (1, 2)]
    assert len(planner.admitted()) == 2
    for entry in sharers:
        planner.stage(entry)
    ledger = planner.ledgers["n0"]
    before = ledger.pages_available
    planner.submit(3, "uvwxyz")
    planner.plan()
    assert all(it.leaving for it in sharers)
    for entry in sharers:
        planner.leave(entry, 6 * PAGE_TOKENS)
    assert ledger.pages_available == 12 > before
    assert 3 in planner.admitted()


def test_a_match_is_weighed_against_prompts_ahead() -> None:
    planner = Planner(nodes=("n0", "n1"))
    planner.add_worker("w0", "n0")
    planner.add_worker("w1", "n1")
    planner.cached_by(0, "abcd")
    home = next(node for node, index in planner.reuse.by_node.items() if len(index))
    again = planner.submit(1, "abcde")
    (decision,) = planner.admitted().values()
    assert (decision.worker.node, decision.prefix_tokens) == (home, 256)
    planner.stage(again)
    crowd = [planner.submit(10 + number, contents) for number, contents in enumerate(("pqrs", "tuvwx"))]
    for entry in crowd:
        worker = next(it for it in planner.table.workers.values() if it.node == home)
        planner.table.workers = {worker.name: worker}
        planner.plan()
        assert entry.node == home
    planner.add_worker("w2", "n1" if home == "n0" else "n0")
    planner.submit(2, "abcdf")
    (decision,) = planner.admitted().values()
    assert (decision.worker.node != home, decision.prefix_tokens) == (True, 0), "ten pages are ahead there, four saved"


def test_short_rest_takes_decode_steps_where_that_was_measured_to_be_cheaper() -> None:
    planner = Planner()
    planner.add_worker("w0", "n0", step_us=1_000.0)
    entry = planner.submit(0, "abc")
    assert 0 in planner.admitted()
    planner.stage(entry, took_s=0.020)
    for number, (contents, more, by_steps) in enumerate([("abc", 9, True), ("abc", 30, False), ("abcd", 1, False)]):
        planner.submit(number + 1, contents, more=more)
        decision = planner.admitted()[number + 1]
        is_computing = number + 1 in planner.table.computing
        assert (decision.entry.by_steps, is_computing) == (by_steps, not by_steps)
        assert decision.prefix_tokens == 192
    planner.reuse.with_generated = False  # deterministic mode
    planner.submit(9, "abc", more=9)
    assert not planner.admitted()[9].entry.by_steps


def test_without_a_measure_a_short_rest_is_prefilled() -> None:
    planner = one_worker()
    planner.cached_by(0, "abc")
    planner.submit(1, "abc", more=9)
    assert not planner.admitted()[1].entry.by_steps


# ---------------------------------------------------------------- prefill apart


def test_prefill_worker_of_the_same_node_begins_behind_what_is_cached() -> None:
    planner = Planner()
    planner.add_worker("p0", "n0", PREFILL)
    planner.add_worker("d0", "n0", DECODE)
    entry = planner.submit(0, "abc")
    assert planner.admitted()[0].decoder == "d0"
    planner.compute(entry, 3)
    planner.submit(1, "abcd")
    decision = planner.admitted()[1]
    assert (decision.decoder, decision.transfer, decision.prefix_tokens) == ("d0", None, 192)


def test_transfer_leaves_out_what_its_receiver_has_and_rows_never_travel_back() -> None:
    """The decode node has three pages of the prompt cached, the prefill node one: two are computed and not sent."""
    planner = Planner(nodes=("p", "d"))
    planner.add_worker("p0", "p", PREFILL)
    planner.add_worker("d0", "d", DECODE)
    for node, contents in (("p", "a"), ("d", "abc")):
        worker = "p0" if node == "p" else "d0"
        entry = planner.submit({"p": 0, "d": 1}[node], contents)
        ledger = planner.ledgers[node]
        placement = 1_000 + entry.request_index
        ledger.reserve(placement, worker, Memory(len(contents)))
        entry.node, entry.placement = node, placement
        planner.take(Effects(planner.reuse.keep_prompt(entry, ledger)))
        ledger.release(placement)
        entry.node, entry.placement = "", 0
        planner.table.order_end(entry, "ABORTED", "")
        planner.table.remove(entry)
    free = {node: ledger.pages_free for node, ledger in planner.ledgers.items()}
    entry = planner.submit(2, "abcde")
    decision = planner.admitted()[2]
    assert decision.transfer is not None
    assert (decision.prefix_tokens, decision.transfer.share.size) == (64, 3)
    assert decision.transfer.pages == planner.ledgers["d"].held(decision.transfer.transfer_id).host_pages
    assert planner.ledgers["d"].pages_free == free["d"] - decision.transfer.pages + 3
    assert planner.ledgers["p"].pages_free == free["p"] - 6 + 1


# ---------------------------------------------------------------- what leaves the index


def test_pages_of_a_placement_that_faulted_leave_and_shared_ones_stay() -> None:
    planner = one_worker()
    planner.cached_by(0, "ab")
    entry = planner.submit(1, "abcd")
    assert planner.admitted()[1].prefix_tokens == 128
    planner.compute(entry, 4)
    assert len(planner.reuse.by_node["n0"]) == 4
    planner.leave(entry, is_suspect=True)
    assert len(planner.reuse.by_node["n0"]) == 2


def test_pages_of_an_epoch_leave_when_its_death_is_one_too_many_for_a_request() -> None:
    planner = one_worker()
    planner.cached_by(0, "ab")
    poison = planner.submit(1, "xyz")
    assert 1 in planner.admitted()
    planner.stage(poison)
    poison.strikes, poison.mark = POISON_STRIKES - 1, poison.generated
    worker = planner.table.workers["w0"]
    planner.take(planner.dispatch.worker_down(worker, proved_exit=True, died=True))
    assert poison.is_ending
    assert len(planner.reuse.by_node["n0"]) == 0


def test_what_a_distrusted_epoch_still_writes_does_not_enter() -> None:
    planner = one_worker()
    entry = planner.submit(0, "abc")
    assert 0 in planner.admitted()
    planner.compute(entry, 1)
    planner.take(Effects(planner.reuse.distrust_epoch(("w0", 1))))
    planner.compute(entry, 3)
    assert len(planner.reuse.by_node["n0"]) == 0


@pytest.mark.parametrize("kept_tokens", [3 * PAGE_TOKENS, 3 * PAGE_TOKENS + 1])
def test_kept_pages_of_a_distrusted_epoch_do_not_enter_under_the_name_of_the_next(kept_tokens: int) -> None:
    """A request was beside one that is failed for its worker's death. It goes on behind the pages that it kept."""
    planner = one_worker()
    beside = planner.submit(0, "abc")
    assert 0 in planner.admitted()
    planner.stage(beside)
    poison = planner.submit(1, "xyz")
    assert 1 in planner.admitted()
    poison.strikes, poison.mark = POISON_STRIKES - 1, poison.generated
    planner.take(planner.dispatch.worker_down(planner.table.workers["w0"], proved_exit=True, died=True))
    index = planner.reuse.by_node["n0"]
    assert poison.is_ending
    assert len(index) == 0
    lost = PlacementEnded(0, beside.placement, kept_tokens, cacheable_tokens=kept_tokens)
    planner.take(planner.dispatch.placement_ended(lost, 1))
    planner.add_worker("w1", "n0")
    assert planner.admitted()[0].take_over is not None
    planner.stage(beside)
    planner.leave(beside, 3 * PAGE_TOKENS + 1)
    assert len(index) == 0
    planner.cached_by(2, "abc")
    assert len(index) == 3, "pages that were free between are new ones"


@pytest.mark.parametrize("whole_epoch", [True, False])
def test_shared_pages_that_are_distrusted_do_not_enter_again_behind_those_who_share_them(whole_epoch: bool) -> None:
    planner = one_worker()
    leader = planner.submit(0, "ab")
    assert 0 in planner.admitted()
    planner.compute(leader, 2)
    planner.table.workers["w0"].drain = WorkerDrain(1e9, handover=False)
    planner.add_worker("w1", "n0")
    follower = planner.submit(1, "abcd")
    decision = planner.admitted()[1]
    assert (decision.worker.name, decision.prefix_tokens) == ("w1", 128)
    if whole_epoch:
        planner.take(Effects(planner.reuse.distrust_epoch(("w0", 1))))
    else:
        planner.leave(leader, is_suspect=True)
    planner.compute(follower, 4)
    assert len(planner.reuse.by_node["n0"]) == 0


@pytest.mark.parametrize("mode", ["own", "all"])
def test_flood_of_one_key_takes_no_cached_page_of_another(mode: str) -> None:
    planner = one_worker(mode)
    planner.cached_by(0, "abcdefghij", user="ann")
    for number in range(1, 20):
        planner.cached_by(number, "".join(chr(1_000 * number + place) for place in range(12)), user="eve")
    assert planner.reuse.by_node["n0"].owners()["ann", ""] == 10
    planner.submit(20, "abcdefghijk", user="ann")
    assert planner.admitted()[20].prefix_tokens == 10 * PAGE_TOKENS


def test_a_user_without_the_right_to_name_tenants_has_one_share_for_all_it_names() -> None:
    """They keep its prefixes apart, and take one turn."""
    planner = one_worker()
    entry = planner.submit(0, "abc", user="ann")
    assert entry.chain is not None
    scope = planner.reuse.scope("ann", "shop", "")
    entry.chain = entry.chain._replace(scope=scope)
    assert 0 in planner.admitted()
    planner.compute(entry, 3)
    assert planner.reuse.by_node["n0"].owners() == {("ann", ""): 3}


def test_quarantined_pages_are_matched_and_neither_evicted_nor_counted_free() -> None:
    planner = one_worker()
    entry = planner.submit(0, "abc")
    assert 0 in planner.admitted()
    planner.compute(entry, 3)
    ledger, worker = planner.ledgers["n0"], planner.table.workers["w0"]
    held = ledger.held(entry.placement).host_pages
    planner.take(planner.dispatch.worker_down(worker, proved_exit=False))
    planner.leave(entry, 3 * PAGE_TOKENS)
    assert ledger.pages_available == ledger.pages_total - held
    assert planner.reuse.by_node["n0"].evict(9, ledger.is_idle).size == 0
    planner.add_worker("w1", "n0")
    planner.submit(1, "abcd")
    assert planner.admitted()[1].prefix_tokens == 192


def test_follower_goes_alone_where_its_longest_leader_is_on_a_node_that_cannot_take_it() -> None:
    """The question whether a request is plain must not begin the wait anew."""
    planner = Planner(nodes=("n0", "n1"), host_pages=200)
    planner.add_worker("w0", "n0")
    planner.submit(0, "abxx")
    planner.plan()
    planner.add_worker("w1", "n1", hot_chunks=900, index_pages=6, prompt_max_tokens=384)
    longest = planner.submit(1, "abc", priority=1)
    planner.plan()
    entry = planner.submit(2, "abcdefghij")
    planner.plan()
    assert (longest.worker, entry.worker) == ("w1", "")
    planner.now += FOLLOW_LIMIT_S / 2
    planner.plan()
    assert entry.follows is not None
    planner.now += FOLLOW_LIMIT_S / 2
    planner.plan()
    assert entry.worker == "w0"
