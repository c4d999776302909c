"""Carries audits out, within the Scheduler's turns: asks workers, compares, tells, repairs. The reasons are in
coordinator.memory.audit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from coordinator.actor import Reply
from coordinator.journal import records as journal
from coordinator.memory.audit import ORPHAN, STRAY, UNRELEASED, AuditRounds, Difference, check_node, compare
from coordinator.memory.changes import Release
from coordinator.memory.ledger import EpochKey, Ledger
from coordinator.policy.prefix_reuse import PrefixReuse
from coordinator.state.events import LedgerStep
from coordinator.state.placement_table import PlacementTable
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import WorkerEntry
from coordinator.tokens.token_log import TokenLog
from coordinator.turn.dispatch import Effects
from coordinator.turn.request_table import RequestTable
from metrics.state import CoordinatorCounters
from protocol.errors import ProtocolError
from protocol.logs import fields, logger
from protocol.messages import Audit, AuditedRow, DifferenceRow, Inventory, Released, Withdraw
from protocol.sizing import Memory

#: An audit that an operator waits for is answered by then, even if some workers have not answered.
ASK_LIMIT_S: Final = 5.0
#: Lines of a request's history in the log.
HISTORY_LINES: Final = 8
REPAIRED: Final = frozenset({STRAY, UNRELEASED, ORPHAN})

log = logger("coordinator.turn.auditor")


#: Who was audited, and what two audits in a row found.
AuditRows: TypeAlias = tuple[tuple[AuditedRow, ...], tuple[DifferenceRow, ...]]


@dataclass
class _Asked:
    keys: list[EpochKey]
    reply: Reply[AuditRows]
    give_up_at: float


class Auditor:
    """One per Scheduler, called in its turns. `ledgers` are read; they change through the steps that are returned."""

    def __init__(
        self,
        placement_table: PlacementTable,
        ledgers: Mapping[str, Ledger],
        requests: RequestTable,
        token_log: TokenLog,
        counters: CoordinatorCounters,
        interval_s: float,
        prefix_reuse: PrefixReuse,
    ) -> None:
        self._prefix_reuse = prefix_reuse
        self._placement_table = placement_table
        self._ledgers = ledgers
        self._requests = requests
        self._token_log = token_log
        self._counters = counters
        self._rounds = AuditRounds(interval_s)
        self._at_ask: dict[EpochKey, dict[int, Memory]] = {}
        self._asked: list[_Asked] = []

    def expects(self, worker: str, epoch: int, number: int) -> bool:
        """Return whether that inventory was asked for; others are dropped."""
        return self._rounds.expects((worker, epoch), number)

    # ---------------------------------------------------------------- asking

    def tick(self, now: float) -> None:
        """Ask whom it is time to ask; answer those who waited for it."""
        live = self._live()
        for key, number in self._rounds.due(live, now):
            ledger = self._ledgers[live[key].node]
            given = ledger.placements_of(key)
            self._at_ask[key] = {it: ledger.held(it) for it in given}
            live[key].port.send(Audit(number))
        self._at_ask = {key: placements for key, placements in self._at_ask.items() if key in live}
        for asked in [it for it in self._asked if now >= it.give_up_at or not self._rounds.wants(it.keys)]:
            self._asked.remove(asked)
            asked.reply.set(self._rows(asked.keys))

    def begin(self, reply: Reply[AuditRows], now: float) -> None:
        """Audit all workers and nodes twice. `reply` comes when they have answered, or after ASK_LIMIT_S."""
        live = self._live()
        self._rounds.want(live)
        for node, ledger in self._ledgers.items():
            self._rounds.hear_node(node, check_node(ledger, self._awaited(node)))
        self._asked.append(_Asked(list(live), reply, now + ASK_LIMIT_S))

    def _live(self) -> dict[EpochKey, WorkerEntry]:
        return {
            (worker.name, worker.epoch): worker
            for worker in self._placement_table.workers.values()
            if not worker.awaited and self._ledgers[worker.node].has_live(worker.name)
        }

    # ---------------------------------------------------------------- hearing

    def hear(self, key: EpochKey, inventory: Inventory, now: float) -> Effects:
        """Compare; what two audits agree on is told, counted and, where that is safe, repaired by what is returned."""
        worker, steps = self._live().get(key), list[LedgerStep]()
        if worker is None or not self._rounds.expects(key, inventory.number):
            return Effects()
        self._counters.audits += 1
        ledger = self._ledgers[worker.node]
        try:
            found = compare(ledger, key, inventory, self._at_ask.get(key, {}), self._is_resizing)
        except ProtocolError as error:
            log.warning("inventory dropped", extra=fields(worker=worker.name, error=error))
            return Effects()
        agreed = self._rounds.hear(key, found)
        steps += self._prefix_reuse.distrust_epoch(key) if agreed else ()
        for difference in agreed:
            steps += self._tell(worker.name, worker.node, worker, difference)
        if self._rounds.is_node_due(worker.node, now):
            for difference in self._rounds.hear_node(worker.node, check_node(ledger, self._awaited(worker.node))):
                steps += self._tell(worker.node, worker.node, None, difference)
        return Effects(tuple(steps))

    def _is_resizing(self, placement: int) -> bool:
        live = self._requests.by_placement.get(placement)
        return live is not None and live.resizing is not None

    def _awaited(self, node: str) -> list[int]:
        kept = [entry.placement for entry in self._placement_table.kept.values() if entry.node == node]
        return kept + [it.placement for it in self._placement_table.transfers.values() if it.node == node]

    def _tell(self, name: str, node: str, worker: WorkerEntry | None, difference: Difference) -> list[LedgerStep]:
        self._counters.audit_differences[difference.kind] += 1
        live = self._requests.by_placement.get(difference.placement)
        log.error(
            "audit: a worker and the ledger differ",
            extra=fields(
                of=name,
                kind=difference.kind,
                placement=difference.placement,
                ledger=difference.ledger,
                worker=difference.worker,
                repaired=difference.kind in REPAIRED,
                request=live.facts.request_id if live else "",
                history=_history(live),
            ),
        )
        return self._repair(node, worker, difference, live)

    def _repair(
        self, node: str, worker: WorkerEntry | None, difference: Difference, live: RequestState | None
    ) -> list[LedgerStep]:
        """Only where one side has nothing left to lose: the worker holds what was never given, or has let go of all."""
        placement = difference.placement
        if difference.kind == STRAY and worker is not None:
            worker.port.send(Withdraw(placement))
        elif difference.kind == UNRELEASED and live is not None:
            self._requests.by_index[live.request_index].tell(
                Released(placement, self._token_log.durable(live.request_index))
            )
        elif difference.kind in (UNRELEASED, ORPHAN):
            note = journal.RequestPlacementEnded(live.request_index, 0) if live is not None else None
            return [LedgerStep(node, Release(placement), note)]
        return []

    # ---------------------------------------------------------------- rows

    def _rows(self, keys: list[EpochKey]) -> AuditRows:
        audited: list[AuditedRow] = []
        differences: list[DifferenceRow] = []
        live = self._live()
        for name, epoch in keys:
            found, worker = self._rounds.confirmed((name, epoch)), live.get((name, epoch))
            held = self._ledgers[worker.node].placements_of((name, epoch)) if worker else set()
            pages = sum(self._ledgers[worker.node].held(it).host_pages for it in held) if worker else 0
            audited.append(AuditedRow(name, epoch, found is not None, len(held), pages, len(found or ())))
            differences += [self._row(name, difference) for difference in found or ()]
        for node, ledger in self._ledgers.items():
            self._rounds.hear_node(node, check_node(ledger, self._awaited(node)))
            found = self._rounds.confirmed_of(node)
            owned = ledger.pages_total - ledger.pages_available
            audited.append(AuditedRow(node, 0, True, ledger.holdings_count, owned, len(found)))
            differences += [self._row(node, difference) for difference in found]
        return tuple(audited), tuple(differences)

    def _row(self, name: str, difference: Difference) -> DifferenceRow:
        kind, placement, ours, theirs = difference
        live = self._requests.by_placement.get(placement)
        request_id = live.facts.request_id if live else ""
        return DifferenceRow(name, kind, placement, request_id, ours, theirs, kind in REPAIRED)


def _history(live: RequestState | None) -> str:
    lines = live.history()[-HISTORY_LINES:] if live is not None else ()
    return " | ".join(f"{line.event} -> {line.state} {line.reason}".rstrip() for line in lines)
