"""What must hold, looked at whenever every task of the simulation rests, and at each frame that a client gets.

    I1  every ledger adds up, from scratch
    I2  no page that a process may still touch is free, or another owner's; GPU counts are never overdrawn
        (tests.sim.fake_worker counts what a worker was given)
    I3  rows below a durable length are in host memory and are the right ones, whatever was written since
    I4  commands are applied by a worker, and reports by the coordinator, once and in the order in which they were
        numbered; no worker obeys a coordinator lower than one it has obeyed
    I5  each position once and in order on every connection; one end for each request, the same on all of them
    I7  what only asks changes nothing
    I8  every queue is within its bound; every request ends within LIVE_LIMIT_S once faults have stopped
    output  what a request says is what the oracle says
    staged  tests.sim.staged_rows
    groups  tests.sim.group_checker
    durable requests, nodes and committed tokens are what a replay of the disk leads to
    drains  a worker drains if, and only if, the journal says so of its process, in whichever life of the coordinator

I6 is about kernels, and there are none here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import trio
import trio._core._run

from coordinator.journal.ledger_image import parts_of
from coordinator.journal.records import RequestFacts, RequestOrdered
from coordinator.journal.state import JournalState, RequestRecord, replay
from coordinator.memory.ledger import Ledger
from coordinator.state.request_state import RequestState
from coordinator.tokens.logprob_rows import unpack_logprobs
from coordinator.tokens.token_log import TokenLog
from coordinator.workers.epoch_link import WorkerLink
from protocol import messages, units
from protocol.arrays import unpack_int32
from protocol.errors import InternalError
from protocol.logprobs import row_words
from tests.sim.fake_worker import EPOCHS_PER_PROCESS, Run, Transfer
from tests.sim.group_checker import GroupChecker
from tests.sim.oracle import Truth, logprobs_of
from tests.sim.staged_rows import check_staged
from tests.sim.trace import Violation
from worker.link.outbox import REPORTS_UNACKED_MAX

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster, CoordinatorLife, WorkerProcess

#: A coordinator's life by its number, a worker, its epoch.
Conversation: TypeAlias = tuple[int, str, int]
#: Simulated seconds in which every request must have ended after the last fault.
LIVE_LIMIT_S: Final = 150.0
#: Rounds of the event loop in one run; a few thousand are usual.
ROUNDS_MAX: Final = 150_000
#: Rows that are committed between two replays of the disk.
REPLAY_ROWS: Final = 60
#: Fields of a request that a replay leads to; a summary drops some of them once it has ended.
DURABLE: Final = frozenset(it.name for it in fields(RequestRecord))
OF_LIVE: Final = frozenset({"ordered", "strikes", "mark", "killed"})


@dataclass
class Readers:
    """One client connection: offsets asked for by tag, and by handle the request and the position that comes next."""

    asked: dict[int, int] = field(default_factory=dict)
    handles: dict[int, tuple[str, int]] = field(default_factory=dict)


class Checker(trio.abc.Instrument):
    """`violation` is the first one found by an instrument, which must not raise."""

    def __init__(self, cluster: Cluster) -> None:
        self.violation: BaseException | None = None
        self.expects_crashes = False
        self.checks = 0
        self.groups = GroupChecker()
        self._cluster = cluster
        self._endings: dict[str, messages.Ended] = {}
        self._given: dict[Conversation, list[messages.Command]] = defaultdict(list)
        self._obeyed: dict[Conversation, int] = defaultdict(int)
        self._reports: dict[tuple[str, int], list[messages.Report]] = defaultdict(list)
        self._effects: dict[Conversation, int] = {}
        self._incarnations: dict[int, int] = defaultdict(int)
        self.ledger_changes = 0
        self._checked_changes = 0  # of them, when ledgers were looked at last
        self._rows_seen: dict[int, tuple[int, ...]] = {}  # by slot, what the rows found right last depend on
        self._last_seen = -1
        self._turns_seen: dict[int, tuple[RequestFacts, RequestOrdered]] = {}  # live requests, by arrival
        self._arrived = 0  # the last request that was seen to arrive
        self._rounds = 0
        self._replayed = 0  # rows that the disk had seen at the last replay

    # ---------------------------------------------------------------- when

    def before_io_wait(self, timeout: float) -> None:
        """Look, when every task rests and something has happened since the last time."""
        self._rounds += 1
        if self._rounds == ROUNDS_MAX:
            self._found(Violation("I8", f"{ROUNDS_MAX} rounds of the event loop: tasks wake each other in a circle"))
        if trio._core._run.GLOBAL_RUN_CONTEXT.runner.runq:
            return
        if self.violation is not None or len(self._cluster.trace.entries) == self._last_seen:
            return
        try:
            self.check()
        except Exception as error:
            self._found(error)
        self._last_seen = len(self._cluster.trace.entries)

    def _found(self, violation: Exception) -> None:
        self.violation = violation
        self._cluster.abandon()

    def check(self) -> None:
        self.checks += 1
        life = self._cluster.coordinator
        for pool in self._cluster.pools.values():
            pool.settle()
        self._cluster.wire.settle()
        if life is not None:
            if self._checked_changes != self.ledger_changes:
                self._check_ledgers(life)
            for node, ledger in life.ledgers.items():
                self._check_pages(node, ledger)
            for entry in life.entries():
                self._check_rows(life, entry)
            self._check_drains(life)
            self._check_durable(life)
            if life.is_between_turns:
                self._check_turns(life)
        for process in self._cluster.processes():
            self._check_process(process)

    def _check_ledgers(self, life: CoordinatorLife) -> None:
        """Changes are few, and an error in a ledger is one of them."""
        if differences := life.audit_differences:
            raise Violation("I1", f"the audit has seen a worker and the ledger differ: {differences}")
        for ledger in life.ledgers.values():
            _as_invariant("I1", ledger.check_invariants)
        if life.is_between_turns:
            _as_invariant("I1", life.check_invariants)
            self._checked_changes = self.ledger_changes

    def _check_drains(self, life: CoordinatorLife) -> None:
        """A drain is of a process, through all its epochs, and outlives the coordinator that gave the order."""
        disk = self._cluster.disk
        if disk is None or not life.is_between_turns or not life.is_committed:
            return
        for name, epoch, drains in life.drains():
            told = disk.drained.get(name)
            if drains != (told is not None and _process_of(told) == _process_of(epoch)):
                does = "drains" if drains else "takes requests"
                raise Violation("drains", f"{name} {does} in epoch {epoch}, and was told to drain in {told}")

    def _check_durable(self, life: CoordinatorLife) -> None:
        """Replay the disk, once in a while."""
        disk = self._cluster.disk
        if disk is None or not life.is_between_turns or not life.is_committed:
            return
        if disk.rows_seen < self._replayed + REPLAY_ROWS:
            return
        self._replayed = disk.rows_seen
        log = TokenLog(life.token_log.request_indices, life.token_log.arena_tokens, journalled=True)
        replayed, live = replay(disk.read(), log), life.journal_state
        for what, after, has in (
            ("nodes", _nodes_of(replayed), _nodes_of(live)),
            ("requests", replayed.requests.keys(), live.requests.keys()),
            ("tokens", log.lengths.tolist(), life.token_log.committed.tolist()),
        ):
            if after != has:
                raise Violation("durable", f"{what} are {has}, and {after} after a replay")
        for request_index, state in live.requests.items():
            for name in DURABLE - OF_LIVE if state.ended else DURABLE:
                after, has = getattr(replayed.requests[request_index], name), getattr(state, name)
                if after != has and not (name == "ordered" and has.outcome):  # the coordinator's own are not written
                    found = f"{name} of {state.facts.request_id} is {has}, and {after} after a replay"
                    raise Violation("durable", found)

    def _check_turns(self, life: CoordinatorLife) -> None:
        """Check the ranks of requests that have arrived, in order, where arrivals are all that has changed, whatever
        came before: each order makes another object, so that a hold and its end between two looks are seen, and a
        request that has come and gone leaves a gap in the numbers."""
        now = {entry.facts.arrival: (entry.facts, entry.ordered) for entry in life.entries()}
        before, self._turns_seen = self._turns_seen, now
        new = sorted(now.keys() - before.keys())
        last, self._arrived = self._arrived, new[-1] if new else self._arrived
        same = (arrival in now and now[arrival][1] is orders for arrival, (_, orders) in before.items())
        if not all(same) or new != [*range(last + 1, self._arrived + 1)] or any(now[one][1].held for one in new):
            return
        present = [(facts, orders.held) for facts, orders in before.values()]
        for arrival in new:
            _check_turn(now[arrival][0], present)
            present.append((now[arrival][0], False))

    # ---------------------------------------------------------------- memory

    def _check_pages(self, node: str, ledger: Ledger) -> None:
        holders: dict[int, Run | Transfer] = {}
        refcounts = ledger._refcounts
        for process in self._cluster.processes_of(node):
            for run in (*process.executor.runs.values(), *process.executor.transfers.values()):
                for place, page in enumerate(run.pages):
                    if not refcounts[page]:
                        raise Violation(
                            "I2", f"page {page} of {node} is free while {process.name} may touch it for {run.placement}"
                        )
                    other = holders.setdefault(page, run)
                    if other is not run and not _may_share(other, run, place):
                        raise Violation(
                            "I2", f"page {page} of {node} is given to {other.placement} and {run.placement}"
                        )

    def _check_rows(self, life: CoordinatorLife, entry: RequestState) -> None:
        """What the coordinator counts as durable is there."""
        truth = life.truth_of(entry.request_index)
        if truth is None or not entry.node or not (ledger := life.ledgers[entry.node]).holds(entry.placement):
            return
        kept = not entry.worker
        durable = entry.kept_tokens if kept else life.durable(entry.request_index, entry.placement)
        pool = self._cluster.pools[entry.node]
        if not durable or life.pool_id(entry.node) != pool.id:
            return
        state = (life.incarnation, self.ledger_changes, entry.placement, durable, pool.id, pool.version)
        if self._rows_seen.get(entry.request_index) == state:
            return
        found = pool.read(ledger.pages_of(entry.placement).tolist(), durable)
        if not np.array_equal(found, truth.rows[:durable]):
            wrong = int(np.flatnonzero(found != truth.rows[:durable])[0])
            raise Violation("I3", f"row {wrong} of {truth.request_id} is below its durable length {durable} and wrong")
        self._rows_seen[entry.request_index] = state

    # ---------------------------------------------------------------- processes

    def _check_process(self, process: WorkerProcess) -> None:
        if process.outbox.in_flight > REPORTS_UNACKED_MAX:
            raise Violation("I8", f"{process.name} has {process.outbox.in_flight} reports in flight")
        process.state.check_invariants()
        if process.state.incarnation < self._incarnations[process.pid]:
            raise Violation(
                "I4", f"{process.name} obeys coordinator {process.state.incarnation} after a later one was obeyed"
            )
        self._incarnations[process.pid] = process.state.incarnation

    # ---------------------------------------------------------------- commands

    def given(self, link: WorkerLink, command: messages.Command) -> None:
        """The coordinator has numbered `command`. What it gives must be in the journal."""
        life, disk = self._cluster.coordinator, self._cluster.disk
        assert life is not None
        self._given[life.incarnation, link.name, link.state.epoch].append(command)
        if isinstance(command, messages.Admit):
            self._check_staged(life, command)
        if (
            disk is not None
            and self.expects_crashes
            and isinstance(command, (messages.Admit, messages.Grant, messages.Receive))
        ):
            ledger = disk.ledgers.get(link.state.node)
            held = ledger.pages_of(command.placement) if ledger and ledger.holds(command.placement) else ()
            if not set(unpack_int32(command.host_pages, "host_pages").tolist()) <= set(held):
                raise Violation("I4", f"{type(command).__name__} of {command.placement} is sent before it is committed")

    def _check_staged(self, life: CoordinatorLife, admit: messages.Admit) -> None:
        shape = self._cluster.shape
        live = life.scheduler._requests.by_index[admit.request_index]
        history, prompt_tokens = live.state.history(), live.state.facts.prompt_tokens
        check_staged(admit, history, prompt_tokens, lambda name: shape.capacity_of(name).prefills)

    def obeyed(self, worker: str, epoch: int, incarnation: int, command: messages.Command) -> None:
        """A worker applies `command` as the next one of its epoch."""
        key = (incarnation, worker, epoch)
        given, place = self._given[key], self._obeyed[key]
        if place >= len(given) or given[place] != command:
            raise Violation("I4", f"{worker} applies a {type(command).__name__} as command {place + 1}, and it is not")
        self._obeyed[key] += 1

    def made(self, worker: str, report: messages.Report) -> None:
        """A worker has numbered `report`."""
        reports = self._reports[worker, report.epoch]
        if report.number != len(reports) + 1:
            raise Violation("I4", f"{worker} makes report {report.number}, {len(reports) + 1} comes next")
        reports.append(report)

    def heard(self, worker: str, report: messages.Report) -> None:
        """The coordinator applies `report` as the next one of its epoch; a new life begins where the last one had
        come, or before."""
        life, reports = self._cluster.coordinator, self._reports[worker, report.epoch]
        assert life is not None
        last = self._effects.get((life.incarnation, worker, report.epoch))
        if last is None:
            last = min(
                report.number - 1,
                max((n for key, n in self._effects.items() if key[1:] == (worker, report.epoch)), default=0),
            )
        if report.number != last + 1 or reports[last] != report:
            raise Violation("I4", f"report {report.number} of {worker} is applied as its report {last + 1}")
        self._effects[life.incarnation, worker, report.epoch] = report.number

    # ---------------------------------------------------------------- clients

    def asked(self, readers: Readers, frame: bytes) -> None:
        match messages.decode_admin(frame):
            case messages.Submit(tag=tag):
                readers.asked[tag] = 0
            case messages.Attach(tag=tag, offset=offset):
                readers.asked[tag] = offset

    def told(self, readers: Readers, frame: bytes) -> None:
        """What the coordinator says to a client, at the moment when it says it."""
        disk = self._cluster.disk if self.expects_crashes else None
        match messages.decode_gateway(frame):
            case messages.Accepted(tag=tag, request_id=request_id, handle=handle):
                readers.handles[handle] = (request_id, readers.asked.pop(tag, 0))
                if disk is not None and request_id not in disk.tokens:
                    raise Violation("I5", f"{request_id} is acknowledged before it is committed")
            case messages.Delivery() as delivery:
                self._delivered(readers, delivery)
            case messages.Ended() as ended:
                self._ended(readers, ended)

    def _delivered(self, readers: Readers, delivery: messages.Delivery) -> None:
        disk = self._cluster.disk if self.expects_crashes else None
        tokens, at = unpack_int32(delivery.tokens, "tokens").tolist(), 0
        arrays = map(_ints, (delivery.handles, delivery.starts, delivery.counts))
        logprobs = unpack_logprobs(delivery.logprobs, unpack_int32(delivery.counts, "counts"))
        for entry, (handle, start, count) in enumerate(zip(*arrays, strict=True)):
            request_id, expected = readers.handles[handle]
            if start != expected:
                raise Violation("I5", f"{request_id} is delivered from position {start}, {expected} comes next")
            truth = self._cluster.truths[request_id]
            self.check_output(truth, start, tokens[at : at + count])
            rows = b"" if logprobs is None else logprobs.of(entry).tobytes()
            self.check_rows(truth, start, tokens[at : at + count], rows)
            readers.handles[handle] = (request_id, start + count)
            if disk is not None and disk.tokens[request_id] < start + count:
                raise Violation(
                    "I5", f"{request_id} is delivered to {start + count}, {disk.tokens[request_id]} are committed"
                )
            at += count

    @staticmethod
    def check_output(truth: Truth, start: int, tokens: list[int]) -> None:
        right = truth.tokens[start : start + len(tokens)]
        if tokens != right:
            place = next(
                (i for i, pair in enumerate(zip(tokens, right, strict=False)) if pair[0] != pair[1]), len(right)
            )
            raise Violation(
                "output",
                f"{truth.request_id} says {tokens[place : place + 3]} at position {start + place}, "
                f"the oracle {right[place : place + 3]}",
            )

    @staticmethod
    def check_rows(truth: Truth, start: int, tokens: list[int], rows: bytes) -> None:
        words = row_words(truth.sampling.logprobs)
        right = b"".join(logprobs_of(token, start + place, words) for place, token in enumerate(tokens))
        if rows != right:
            raise Violation("output", f"{truth.request_id} has wrong log-probabilities from position {start} on")

    def _ended(self, readers: Readers, ended: messages.Ended) -> None:
        request_id, position = readers.handles.pop(ended.handle)
        truth = self._cluster.truths[request_id]
        disk = self._cluster.disk if self.expects_crashes else None
        if disk is not None and disk.outcomes.get(request_id) != ended.outcome:
            raise Violation("I5", f"{request_id} is said to have ended {ended.outcome} before that is committed")
        if position != ended.generated_tokens:
            raise Violation("I5", f"{request_id} ends at {ended.generated_tokens} tokens, {position} were delivered")
        first = self._endings.setdefault(request_id, ended)
        if (first.outcome, first.generated_tokens) != (ended.outcome, ended.generated_tokens):
            raise Violation("I5", f"{request_id} ended {first.outcome} and then {ended.outcome}")
        if ended.outcome == "FINISHED" and (ended.generated_tokens, ended.reason) != (len(truth.tokens), truth.reason):
            raise Violation(
                "output",
                f"{request_id} ends by {ended.reason} after {ended.generated_tokens} tokens, "
                f"the oracle by {truth.reason} after {len(truth.tokens)}",
            )
        if ended.outcome != "FINISHED" and not self._cluster.may_end(request_id, ended):
            raise Violation("I5", f"{request_id} ended {ended.outcome}: {ended.reason}")

    # ---------------------------------------------------------------- the end

    def check_end(self, unfinished: Iterable[str]) -> None:
        """Faults stopped LIVE_LIMIT_S ago, or everything is over."""
        if waiting := sorted(unfinished):
            raise Violation("I8", f"{', '.join(waiting)} did not end within {LIVE_LIMIT_S:g} s after the last fault")
        life = self._cluster.coordinator
        assert life is not None
        for node, ledger in life.ledgers.items():
            index = life.scheduler._prefix_reuse.by_node[node]
            _as_invariant("I1", partial(index.check_invariants, ledger.cached_pages()))
            if ledger.pages_available != ledger.pages_total:
                raise Violation(
                    "I1",
                    f"{ledger.pages_total - ledger.pages_available} pages of {node} never came back: "
                    f"{ledger.holdings_count} holdings, quarantined by {ledger.quarantines}",
                )
        for process in self._cluster.processes():
            if held := [*process.executor.runs, *process.executor.transfers]:
                raise Violation("I1", f"{process.name} still holds {sorted(held)}")


def _nodes_of(state: JournalState) -> tuple[object, ...]:
    ledgers = {node: list(parts_of(node, ledger)) for node, ledger in state.ledgers.items()}
    return ledgers, state.pools, state.drains, state.arrivals, state.placements


def _check_turn(facts: RequestFacts, present: Iterable[tuple[RequestFacts, bool]]) -> None:
    """A request that arrives comes after as many of each other owner as its owner has ahead of it, and one more, and
    before the rest. `present`: those that arrived before, and whether they are held."""
    owners: dict[tuple[str, str], list[messages.Rank]] = defaultdict(list)
    for other, held in present:
        if other.priority == facts.priority and not held:
            owners[other.turn_owner].append(other.rank)
    depth = len(owners.pop(facts.turn_owner, ()))
    for ranks in owners.values():
        if sum(rank < facts.rank for rank in ranks) <= min(depth, len(ranks) - 1):
            raise Violation("turns", f"{facts.request_id} overtakes requests of another owner, {depth} ahead of it")
    own = [it.rank for it, _ in present if it.turn_owner == facts.turn_owner]
    is_first = not any(rank[0] == facts.rank[0] for rank in own)
    heads = [sorted(ranks)[:2] for ranks in owners.values()]
    if is_first and len(heads) == 1 and len(heads[0]) == 2 and heads[0][1] < facts.rank:
        raise Violation("turns", f"{facts.request_id}, its owner's first, is behind two requests of another owner")


def _may_share(one: Run | Transfer, other: Run | Transfer, place: int) -> bool:
    """A request goes on while a process that had it is not proved gone, and prompts may begin with the same cached
    pages: one of the two began when the page was full, and the rows in it are of the same tokens."""
    if one.pages[place : place + 1] != other.pages[place : place + 1]:
        return False
    transfers = [it for it in (one, other) if isinstance(it, Transfer)]
    if transfers:  # what is open for writing has one owner
        return all(place < it.admit.prefix_tokens // units.PAGE_TOKENS for it in transfers)
    end = (place + 1) * units.PAGE_TOKENS
    full = max(max(it.admit.durable_tokens, it.admit.prefix_tokens) for it in (one, other))
    assert isinstance(one, Run)
    assert isinstance(other, Run)
    is_same = one.admit.request_id == other.admit.request_id
    is_prefix = end <= min(len(one.prompt), len(other.prompt)) and np.array_equal(one.prompt[:end], other.prompt[:end])
    return end <= full and (is_same or is_prefix)


def _process_of(epoch: int) -> int:
    return epoch // EPOCHS_PER_PROCESS


def _ints(data: bytes) -> list[int]:
    values: list[int] = unpack_int32(data, "array").tolist()
    return values


def _as_invariant(invariant: str, check: Callable[[], None]) -> None:
    try:
        check()
    except InternalError as error:
        raise Violation(invariant, str(error)) from error
