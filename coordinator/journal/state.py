"""The state that the journal's records lead to. Pure. `replay` makes it, `note` updates it for each appended record.

    records ──replay──► JournalState and token log   at start; coordinator.turn.recovery continues from it
    append  ──note────► JournalState                 while running; ledgers and token log are the live ones, changed by
                                                     their owners
    JournalState ─────► coordinator.journal.summary  now and then, written again in fewer records

A forgotten request is removed. An epoch is removed once its node's ledger holds nothing of it.

A summary is spread over many commits, and replay handles two cases. When the earlier records still exist, the summary
repeats known facts. When they were deleted, a request begins as it was accepted, and has its state once the summary's
records of it were read. For a ledger, its parts as of the SummaryBegun and the changes since are collected; at the
SummaryEnded the ledger is made from the parts, and the changes are applied.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from coordinator.journal.ledger_image import epochs_of, ledger_from
from coordinator.journal.records import (
    DRAINS_MAX,
    LedgerChanged,
    NodePart,
    PoolOpened,
    Record,
    RequestAccepted,
    RequestEnded,
    RequestFacts,
    RequestHandedOver,
    RequestOrdered,
    RequestOutput,
    RequestPlaced,
    RequestPlacementEnded,
    RequestsForgotten,
    RequestsStruck,
    SummaryBegun,
    SummaryEnded,
    TokensAppended,
    WorkerDrained,
    WorkerJoined,
    WorkerUndrained,
    kept_facts,
    news_of,
)
from coordinator.memory.changes import Change, Reserve, apply
from coordinator.memory.ledger import EpochKey, Ledger, is_same_process
from coordinator.tokens.token_log import OutputPart, TokenLog
from protocol.arrays import unpack_int32
from protocol.errors import InternalError
from protocol.logprobs import row_words
from protocol.messages import NO_HOT_BUFFER, NO_TOKEN, FirstToken


def no_order(request_index: int) -> RequestOrdered:
    """Default orders: not held, hot size by policy, no end requested."""
    return RequestOrdered(request_index, held=False, forced_slots=NO_HOT_BUFFER)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Durable half of one request: what its records lead to. `placed` is its latest placement, None if it left nothing.

    `on_worker`: the placement has not ended. Otherwise `kept_tokens` rows of it are kept, and `first_token` behind
    them, drawn and not said yet. `strikes` are deaths of its workers in a row, at `mark` generated tokens; the last was
    that of `killed`. A request that is live has the other half, too (coordinator.state.request_state), whose owner
    writes orders, strikes, kept rows and first token before their records are appended.
    """

    facts: RequestFacts
    prompt: bytes = b""  # with the grammar, until it is over: then they are only in the journal
    grammar: str = ""
    ordered: RequestOrdered = field(init=False)  # replaced, never changed: the journal refers to the same record
    placed: RequestPlaced | None = None
    on_worker: bool = False
    kept_tokens: int = 0
    first_token: FirstToken = NO_TOKEN
    strikes: int = 0
    mark: int = -1
    killed: str = ""
    ended: RequestEnded | None = None

    def __post_init__(self) -> None:
        self.ordered = no_order(self.request_index)

    @property
    def request_index(self) -> int:
        return self.facts.request_index


@dataclass(slots=True)
class JournalState:
    """State of all requests, nodes and workers. `ledgers`, by node, are the live ones.

    `arrivals` and `placements` are the highest numbers given so far.
    """

    ledgers: dict[str, Ledger] = field(default_factory=dict)
    pools: dict[str, PoolOpened] = field(default_factory=dict)
    workers: dict[EpochKey, WorkerJoined] = field(default_factory=dict)
    drains: dict[str, WorkerDrained] = field(default_factory=dict)
    requests: dict[int, RequestRecord] = field(default_factory=dict)
    arrivals: int = 0
    placements: int = 0

    def note(self, record: Record) -> None:
        """Update the state for an appended record. Ledgers and tokens are updated by their owners."""
        match record:
            case RequestAccepted(facts, prompt):
                self.requests[facts.request_index] = RequestRecord(kept_facts(facts), prompt, facts.sampling.grammar)
                self.arrivals = max(self.arrivals, facts.arrival)
            case WorkerJoined() | PoolOpened() | WorkerDrained() | WorkerUndrained():
                self._note_of_node(record)
            case RequestsStruck():
                self._note_strikes(record)
            case SummaryBegun(arrivals, placements, pools, workers, drains):
                self.arrivals, self.placements = max(self.arrivals, arrivals), max(self.placements, placements)
                for opened in pools:
                    self.note(opened)
                for joined in workers:
                    self.note(joined)
                self.drains = {drained.worker: drained for drained in drains}
            case RequestsForgotten(request_indices, arrivals):
                self.arrivals = max(self.arrivals, arrivals)
                for request_index in unpack_int32(request_indices, "request_indices").tolist():
                    self.requests.pop(request_index, None)
            case LedgerChanged(changes=changes):  # its Reserves have all placement numbers, those of transfers too
                given = (change.placement for change in changes if isinstance(change, Reserve))
                self.placements = max(self.placements, *given, 0)
            case RequestOrdered() | RequestPlaced() | RequestHandedOver() | RequestPlacementEnded() | RequestEnded():
                self._note_of_request(record)

    def _note_of_node(self, record: WorkerJoined | PoolOpened | WorkerDrained | WorkerUndrained) -> None:
        match record:
            case PoolOpened(node):
                self.pools[node] = record
            case WorkerJoined(worker=worker, epoch=epoch):
                self.workers[worker, epoch] = record
                self._note_drain_of_next(record)
            case WorkerUndrained(worker):
                self.drains.pop(worker, None)
            case WorkerDrained(worker):
                self.drains.pop(worker, None)
                self.drains[worker] = record
                if len(self.drains) > DRAINS_MAX:
                    del self.drains[next(iter(self.drains))]

    def _note_drain_of_next(self, joined: WorkerJoined) -> None:
        """A drain continues with later epochs of the same process, and ends with another process."""
        drained = self.drains.get(joined.worker)
        if drained is not None and drained.epoch != joined.epoch:
            self.drains.pop(joined.worker)
            if is_same_process(drained.epoch, joined.epoch, joined.first_epoch):
                self.drains[joined.worker] = msgspec.structs.replace(drained, epoch=joined.epoch)

    def _note_strikes(self, struck: RequestsStruck) -> None:
        arrays = (unpack_int32(it, "struck").tolist() for it in (struck.request_indices, struck.strikes, struck.marks))
        for request_index, strikes, mark in zip(*arrays, strict=True):
            if record := self.requests.get(request_index):
                record.strikes, record.mark, record.killed = strikes, mark, struck.worker

    def _note_of_request(
        self, record: RequestOrdered | RequestPlaced | RequestHandedOver | RequestPlacementEnded | RequestEnded
    ) -> None:
        request = self.requests.get(record.request_index)
        if request is None:
            return
        match record:
            case RequestOrdered():
                request.ordered = record
            case RequestPlaced():
                request.placed, request.on_worker, request.kept_tokens, request.first_token = record, True, 0, NO_TOKEN
            case RequestHandedOver(request_index, transfer_id, node, worker, epoch, kept_tokens, first_token):
                request.placed = RequestPlaced(
                    request_index, transfer_id, node, worker, epoch, kept_tokens, prefills_only=True
                )
                request.on_worker, request.kept_tokens, request.first_token = False, kept_tokens, first_token
            case RequestPlacementEnded(_, kept_tokens, first_token):
                request.placed = request.placed if kept_tokens else None
                request.on_worker, request.kept_tokens, request.first_token = False, kept_tokens, first_token
            case RequestEnded():
                request.ended = record

    def open_pool(self, opened: PoolOpened) -> Ledger:
        """The empty ledger of a node's new pool. Only the node's HostPool changes it."""
        self.ledgers[opened.node] = ledger = Ledger(opened.capacity.host_pages)
        return ledger

    def joined(self, node: str) -> list[WorkerJoined]:
        """Epochs of `node` that its ledger still holds something of."""
        left = epochs_of(self.ledgers[node])
        return [it for key, it in self.workers.items() if it.node == node and key in left]


def replay(records: Iterable[Record], token_log: TokenLog) -> JournalState:
    """The state that `records` lead to. Tokens go into `token_log`, which must be empty.

    Raises CapacityError when the token log is too small, InternalError when the records contradict each other.
    """
    replaying = _Replay(token_log)
    for record in records:
        replaying.take(record)
    for request_index, request in replaying.state.requests.items():
        if request.ended is not None:
            token_log.cut(request_index)
    token_log.recovered()
    return replaying.state


class _Collected(NamedTuple):
    """Parts and changes of a node's ledger since the last SummaryBegun."""

    parts: list[NodePart]
    changes: list[Change]


@dataclass(slots=True)
class _Replay:
    token_log: TokenLog
    state: JournalState = field(default_factory=JournalState)
    collected: dict[str, _Collected] = field(default_factory=dict)

    def take(self, record: Record) -> None:
        state, token_log = self.state, self.token_log
        match record:
            case RequestAccepted(facts):
                words = row_words(facts.sampling.logprobs)
                token_log.reopen(facts.request_index, facts.sampling.max_tokens, words, owner=facts.turn_owner)
            case RequestsForgotten(request_indices):
                for request_index in unpack_int32(request_indices, "request_indices").tolist():
                    if request_index in state.requests:
                        token_log.close(request_index)
            case TokensAppended():
                token_log.recover(news_of(record))
            case RequestOutput():
                tokens, rows = unpack_int32(record.tokens, "tokens"), unpack_int32(record.logprobs, "logprobs")
                part = OutputPart(record.request_index, record.start, tokens, record.durable_tokens, rows)
                token_log.recover_output(part)
            case RequestPlaced(request_index) if request_index in state.requests:
                token_log.set_durable(request_index, record.durable_tokens)
            case _:
                self._take_of_node(record)
        state.note(record)
        if isinstance(record, RequestEnded) and (request := state.requests.get(record.request_index)):
            request.prompt, request.grammar = b"", ""

    def _take_of_node(self, record: Record) -> None:
        ledgers = self.state.ledgers
        match record:
            case PoolOpened(node):
                self.state.open_pool(record)
                self.collected.pop(node, None)
            case SummaryBegun(pools=pools):
                self.collected = {opened.node: _Collected([], []) for opened in pools}
            case NodePart(node):
                if node in self.collected:
                    self.collected[node].parts.append(record)
            case LedgerChanged(node, changes):
                self._change(node, changes)
            case SummaryEnded():
                for node, collected in self.collected.items():
                    ledgers[node] = ledger_from(collected.parts)
                    _apply_all(ledgers[node], collected.changes)
                self.collected = {}

    def _change(self, node: str, changes: Iterable[Change]) -> None:
        ledger, collected = self.state.ledgers.get(node), self.collected.get(node)
        if ledger is None and collected is None:
            raise InternalError("its ledger changes before its pool was opened", field="node", value=node)
        if ledger is not None:
            _apply_all(ledger, changes)
        if collected is not None:
            collected.changes.extend(changes)


def _apply_all(ledger: Ledger, changes: Iterable[Change]) -> None:
    for change in changes:
        apply(ledger, change)
