"""The state that the journal's records amount to. Pure: `replay` makes it, `note` keeps it true while records are
appended, `summarize` writes it down in few records.

    records ──replay──► Book and token log        at start (coordinator.journal.recovery makes the actors' states of it)
    append  ──note────► Book                      while running; ledgers and token log are the live ones, changed
                                                  by their owners
    Book    ──summarize► Summary, images, outputs  now and then, so that a journal is as long as what it tells

A request that is forgotten is gone from here; an epoch is forgotten when its node's ledger has nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from coordinator.arrays import unpack_int32
from coordinator.gateway.token_log import TokenLog
from coordinator.journal.records import (
    Accepted,
    Admission,
    Changed,
    Departed,
    Ended,
    Forgotten,
    HandedOver,
    Joined,
    NodeImage,
    Ordered,
    Output,
    PoolOpened,
    Record,
    Summary,
    Tokens,
)
from coordinator.memory.changes import apply
from coordinator.memory.ledger import EpochKey, Ledger
from coordinator.memory.ledger_image import epochs_of, image_of, ledger_from
from coordinator.messages import NO_HOT_BUFFER, NO_TOKEN
from coordinator.scheduling.live import digest


def no_order(slot: int) -> Ordered:
    """Nobody wants anything of a request but its output."""
    return Ordered(slot, held=False, forced_slots=NO_HOT_BUFFER)


@dataclass(slots=True)
class Known:
    """One request. `stay` is its latest admission; `on_worker` until it departed, else `kept_tokens` rows may be left
    of it, or nothing (then `stay` is None). Once it has ended, its prompt is only in the journal."""

    accepted: Accepted
    prompt_tokens: int
    ordered: Ordered
    stay: Admission | None = None
    on_worker: bool = False
    kept_tokens: int = 0
    first_token: int = NO_TOKEN
    ended: Ended | None = None
    prompt_digest: bytes = b""

    def end(self, ended: Ended) -> None:
        self.ended, self.prompt_digest = ended, digest(self.accepted.prompt)
        self.accepted = msgspec.structs.replace(self.accepted, prompt=b"")


@dataclass(slots=True)
class Book:
    """`ledgers` by node are the live ones; the highest numbers given out so far are for those who give out more."""

    ledgers: dict[str, Ledger] = field(default_factory=dict)
    pools: dict[str, PoolOpened] = field(default_factory=dict)
    workers: dict[EpochKey, Joined] = field(default_factory=dict)
    requests: dict[int, Known] = field(default_factory=dict)
    arrivals: int = 0
    admissions: int = 0

    def note(self, record: Record) -> None:
        """A record was appended. Ledgers and tokens are noted by their owners."""
        match record:
            case Accepted(slot):
                self.requests[slot] = Known(record, len(record.prompt) // 4, no_order(slot))
                self.arrivals = max(self.arrivals, record.arrival)
            case Joined():
                self.workers[record.worker, record.epoch] = record
            case PoolOpened():
                self.pools[record.node] = record
            case Forgotten(slots, arrivals):
                self.arrivals = max(self.arrivals, arrivals)
                for slot in unpack_int32(slots, "slots").tolist():
                    self.requests.pop(slot, None)
            case Admission():
                self.admissions = max(self.admissions, record.admission)
                self._note_of_request(record)
            case Ordered() | HandedOver() | Departed() | Ended():
                self._note_of_request(record)

    def _note_of_request(self, record: Ordered | Admission | HandedOver | Departed | Ended) -> None:
        known = self.requests.get(record.slot)
        if known is None:
            return
        match record:
            case Ordered():
                known.ordered = record
            case Admission():
                known.stay, known.on_worker, known.kept_tokens, known.first_token = record, True, 0, NO_TOKEN
            case HandedOver(slot, ticket, node, worker, epoch, kept_tokens, first_token):
                known.stay = Admission(slot, ticket, node, worker, epoch, kept_tokens, prefills_only=True)
                known.on_worker, known.kept_tokens, known.first_token = False, kept_tokens, first_token
            case Departed(_, kept_tokens, first_token):
                known.stay = known.stay if kept_tokens else None
                known.on_worker, known.kept_tokens, known.first_token = False, kept_tokens, first_token
            case Ended():
                known.end(record)

    def joined(self, node: str) -> list[Joined]:
        """Epochs of `node` of which anything is left."""
        left = epochs_of(self.ledgers[node])
        return [it for key, it in self.workers.items() if it.node == node and key in left]

    def summarize(self, token_log: TokenLog) -> list[Record]:
        """What `replay` makes this very book of, given the Accepted, Output and Ended records that are kept."""
        self.workers = {(it.worker, it.epoch): it for node in self.ledgers for it in self.joined(node)}
        live = [known for known in self.requests.values() if known.ended is None]
        stays = [known.stay for known in self.requests.values() if known.stay is not None]
        left = [known for known in self.requests.values() if known.stay is not None and not known.on_worker]
        ordered = [known.ordered for known in live if known.ordered != no_order(known.ordered.slot)]
        departed = [Departed(known.accepted.slot, known.kept_tokens, known.first_token) for known in left]
        records: list[Record] = [
            Summary(self.arrivals, self.admissions, tuple(ordered), tuple(stays), tuple(departed)),
        ]
        records += [self.pools[node] for node in self.ledgers]
        records += self.workers.values()
        records += [image_of(node, ledger) for node, ledger in self.ledgers.items()]
        return records + token_log.take_outputs([stay.slot for stay in stays])


def replay(records: Iterable[Record], token_log: TokenLog) -> Book:
    """The state that `records` amount to; tokens go into `token_log`, which must be empty.

    Raises CapacityError when the token log is too small for them.
    """
    book = Book()
    for record in records:
        _replay(record, book, token_log)
    token_log.recovered()
    return book


def _replay(record: Record, book: Book, token_log: TokenLog) -> None:
    match record:
        case Accepted():
            token_log.reopen(record)
        case Forgotten(slots):
            for slot in unpack_int32(slots, "slots").tolist():
                if slot in book.requests:
                    token_log.close(slot)
        case Tokens():
            token_log.recover(record)
        case Output():
            token_log.recover_output(record)
        case Admission(slot) if slot in book.requests:
            token_log.set_durable(slot, record.durable_tokens)
        case PoolOpened():
            book.ledgers[record.node] = Ledger(record.capacity.host_pages)
        case NodeImage():
            book.ledgers[record.node] = ledger_from(record)
        case Changed(node, changes):
            for change in changes:
                apply(book.ledgers[node], change)
        case Summary():
            _begin_anew(record, book, token_log)
    book.note(record)


def _begin_anew(summary: Summary, book: Book, token_log: TokenLog) -> None:
    """Everything but what the requests were and how they ended comes again."""
    book.ledgers, book.pools, book.workers = {}, {}, {}
    book.arrivals, book.admissions = summary.arrivals, summary.admissions
    for slot, known in book.requests.items():
        known.ordered = no_order(slot)
        known.stay, known.on_worker, known.kept_tokens, known.first_token = None, False, 0, NO_TOKEN
    for ordered in summary.ordered:
        book.note(ordered)
    for stay in summary.stays:
        book.note(stay)
        token_log.set_durable(stay.slot, stay.durable_tokens)
    for departed in summary.departed:
        book.note(departed)
