"""Comparison of workers and ledgers, again and again while they run: do they agree on who holds what? Pure.

    Audit (a command, numbered) ──► the worker says, at the step boundary where it applies it, what every placement
    holds and what is free ──► Inventory (an event, in the order of reports) ──► compared with the ledger

Numbers do most of the work: an inventory is what all commands before the Audit and all reports before the Inventory
lead to. What crosses them on the way (a grant decided and not yet sent, a Released not yet heard) looks like a
difference, once: it is gone or another one by the next audit. So only what two audits in a row see alike counts. The
same thing may cross two of them, a short placement before its Admit has come and after its Released went, a grant while
its journal entry is written and while its Request sends it: so what was absent when the Audit was sent is not missed.

    kind           the worker says                       the ledger says                repaired by
    stray          it holds a placement                  no such one in that epoch      Withdraw to the worker
    unreleased     it holds nothing of a placement       its memory is still given      Released in its name
    orphan         (nothing: off every worker)           kept pages no request awaits   Release
    host_pages     other pages, or another number        its page list                  nothing: who is right?
    index_pages, hot_chunks, seats                       likewise                       nothing
    accounts       (nothing)                             does not add up (I1)           nothing

A repair is made where only one side still has anything to lose. Cost: a worker with 625 requests of 63 pages takes
0.5 ms for its inventory and the coordinator 3 ms to compare it; a ledger of 10,000 requests and a million pages takes
60 ms, once an interval. Page lists are compared by a CRC-32, at most PAGES_MAX pages an audit, in rotation.

Rejected: mirroring each worker in the coordinator from commands and events (a second ledger to keep right, which would
agree with the first in what both get wrong); stopping the world to compare.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from coordinator.memory.ledger import EpochKey, Ledger
from protocol.inventory import UNCHECKED, InventoryRow, digest_of, unpack_rows
from protocol.messages import Inventory, WorkerCapacity
from protocol.sizing import Memory

#: An audit that was not answered for this long is asked anew: its worker is in a very long step, or gone.
ANSWER_LIMIT_S: Final = 10.0
#: Differences of one worker that are told.
DIFFERENCES_MAX: Final = 256

STRAY: Final = "stray"
UNRELEASED: Final = "unreleased"
ORPHAN: Final = "orphan"
ACCOUNTS: Final = "accounts"


class Difference(NamedTuple):
    """Disagreement of two sides about one thing. `placement` 0: of the worker as a whole."""

    kind: str
    placement: int
    ledger: str
    worker: str


# ---------------------------------------------------------------- comparing


def compare(
    ledger: Ledger, key: EpochKey, inventory: Inventory, at_ask: Mapping[int, Memory], resizing: Callable[[int], bool]
) -> list[Difference]:
    """Return differences of `inventory`, of the epoch `key`, and the ledger of its node, at most DIFFERENCES_MAX.

    `at_ask` is what the epoch's placements held when the Audit was sent: one that came, or was given more, later may
    cross it and is not compared. `resizing` tells of a placement that its hot buffer is between two sizes. Raises
    ProtocolError when the inventory's rows cannot be read.
    """
    rows = {row.placement: row for row in unpack_rows(inventory.rows)}
    given = ledger.placements_of(key)
    found = [Difference(STRAY, placement, "nothing", "holds it") for placement in rows.keys() - given]
    missing = (given & at_ask.keys()) - rows.keys()
    found += [Difference(UNRELEASED, placement, "holds it", "nothing") for placement in missing]
    for placement, row in rows.items():
        if placement in given and at_ask.get(placement) == ledger.held(placement):
            found += _compare_row(ledger, placement, row, is_resizing=resizing(placement))
    found += _compare_free(ledger.budget(key[0]).capacity, rows, inventory)
    return sorted(found)[:DIFFERENCES_MAX]


def _compare_row(ledger: Ledger, placement: int, row: InventoryRow, *, is_resizing: bool) -> list[Difference]:
    ours = ledger.held(placement)
    pairs = [
        ("host_pages", ours.host_pages, row.host_pages),
        ("index_pages", ours.index_pages, row.index_pages),
    ]
    if not is_resizing:
        pairs.append(("hot_chunks", ours.hot_chunks, row.hot_chunks))
    differ = operator.lt if row.is_leaving else operator.ne
    found = [Difference(kind, placement, str(a), str(b)) for kind, a, b in pairs if differ(a, b)]
    if row.host_pages == ours.host_pages and row.digest != UNCHECKED:
        digest = digest_of(ledger.pages_of(placement))
        if digest != row.digest:
            found.append(Difference("host_pages", placement, f"{digest:08x}", f"{row.digest:08x}"))
    return found


def _compare_free(capacity: WorkerCapacity, rows: Mapping[int, InventoryRow], inventory: Inventory) -> list[Difference]:
    """Return a difference for each kind of memory in which held + free is not the worker's capacity."""
    index_pages, chunks = sum(row.index_pages for row in rows.values()), sum(row.chunks for row in rows.values())
    triples = (
        ("seats", capacity.seats, len(rows) + inventory.seats_free),
        ("index_pages", capacity.index_pages, index_pages + inventory.index_pages_free),
        ("hot_chunks", capacity.hot_chunks, chunks + inventory.chunks_free),
    )
    return [Difference(kind, 0, str(total), str(found)) for kind, total, found in triples if total != found]


def check_node(ledger: Ledger, waiting: Iterable[int]) -> list[Difference]:
    """Return what is wrong with a ledger by itself: I1, and kept pages whose placement is none of `waiting`."""
    found = [
        Difference(ORPHAN, placement, f"{ledger.held(placement).host_pages} pages kept", "off every worker")
        for placement in ledger.kept_placements() - set(waiting)
    ]
    if mismatch := ledger.find_mismatch():
        found.append(Difference(ACCOUNTS, 0, mismatch, ""))
    return sorted(found)[:DIFFERENCES_MAX]


# ---------------------------------------------------------------- rounds


@dataclass
class AuditRound:
    """Audits of one epoch, or of one node. `number` is that of the latest one asked for; times are of one clock."""

    due_at: float = 0.0
    number: int = 0
    asked_at: float | None = None
    wanted: int = 0
    last: frozenset[Difference] = frozenset()
    confirmed: frozenset[Difference] = frozenset()

    def ask(self, now: float, interval_s: float) -> int:
        self.number += 1
        self.asked_at, self.due_at = now, now + interval_s
        return self.number

    def hear(self, found: Iterable[Difference]) -> list[Difference]:
        """Take in what an audit found; returns what is seen for the second time in a row, and was not told before."""
        before, self.last = self.last, frozenset(found)
        news = (before & self.last) - self.confirmed
        self.confirmed = before & self.last
        self.asked_at, self.wanted = None, max(0, self.wanted - 1)
        return sorted(news)


class AuditRounds:
    """Order in which epochs are asked, and differences on which two audits in a row agree. `interval_s` 0: only when
    wanted."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._rounds: dict[EpochKey, AuditRound] = {}
        self._nodes: dict[str, AuditRound] = {}

    def due(self, live: Iterable[EpochKey], now: float) -> list[tuple[EpochKey, int]]:
        """Return the epochs of `live` to send an Audit now, with its number: all that are wanted, else one at a
        time."""
        self._rounds = {key: self._rounds.get(key) or AuditRound(now + self._interval_s) for key in live}
        idle = {key: it for key, it in self._rounds.items() if _is_idle(it, now)}
        chosen = [key for key, it in idle.items() if it.wanted]
        if not chosen and self._interval_s:
            chosen = sorted((key for key, it in idle.items() if it.due_at <= now), key=lambda key: idle[key].due_at)[:1]
        return [(key, self._rounds[key].ask(now, self._interval_s)) for key in chosen]

    def expects(self, key: EpochKey, number: int) -> bool:
        """Return whether an inventory of that number answers the audit that is under way."""
        audit = self._rounds.get(key)
        return audit is not None and audit.asked_at is not None and audit.number == number

    def hear(self, key: EpochKey, found: Iterable[Difference]) -> list[Difference]:
        """Do as `AuditRound.hear`, for an epoch that was asked."""
        return self._rounds[key].hear(found)

    def is_node_due(self, node: str, now: float) -> bool:
        """Return whether to look at a node again; if so, not for the next interval."""
        audit = self._nodes.setdefault(node, AuditRound())
        if now < audit.due_at:
            return False
        audit.due_at = now + self._interval_s
        return True

    def hear_node(self, node: str, found: Iterable[Difference]) -> list[Difference]:
        """Do as `AuditRound.hear`, for a node. The ledger alone answers for it; no worker is asked."""
        return self._nodes.setdefault(node, AuditRound()).hear(found)

    def want(self, live: Iterable[EpochKey]) -> None:
        """Audit each of `live` twice, as soon as may be."""
        for key in live:
            self._rounds.setdefault(key, AuditRound()).wanted = 2

    def wants(self, keys: Iterable[EpochKey]) -> bool:
        """Return whether one of `keys` that is still there has not been audited as wanted."""
        return any(self._rounds[key].wanted for key in keys if key in self._rounds)

    def confirmed(self, key: EpochKey) -> list[Difference] | None:
        """Return the differences on which the last two audits of an epoch agree; None: it has not answered, or is
        gone."""
        audit = self._rounds.get(key)
        return sorted(audit.confirmed) if audit is not None and not audit.wanted else None

    def confirmed_of(self, node: str) -> list[Difference]:
        return sorted(self._nodes.setdefault(node, AuditRound()).confirmed)


def _is_idle(audit: AuditRound, now: float) -> bool:
    return audit.asked_at is None or now - audit.asked_at > ANSWER_LIMIT_S
