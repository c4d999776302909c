"""Which request kills its worker: found without failing those that were merely there. Pure.

A process dies and everything on it is suspect. One or two deaths are normal: an operator's kill, a bad moment. So a
*strike* counts only when the request has come no further than at its last one; a token more and it starts over:

    1 strike    readmitted like any request: recovery is not slowed down for what happens once
    2 strikes   a *suspect*: it joins a worker only when all requests there have come further since they came, and no
                other joins until it has too. Both take about one token, so suspects of a large batch are through in
                seconds
    6 strikes   failed (poison). Four of them were its own: it was the only suspect there, and no other request was new

So what kills deterministically gets there in six deaths. An innocent gets there if chance strikes six times in a row
before it has come one token further. Under constant random kills of all processes (tests/sim) one run in 6 gave some
request two strikes, one in 45 three, 1 of 560 four: hence six, not four. Strikes are given when a death is proved: a
link that is cut proves none.

Rejected: failing requests that were on the worker N times (twenty kills by an operator fail all); halving the batch
until one is left (log2 n deaths more, and with two poisons it does not converge); an empty worker for each suspect (its
whole batch would be retracted for one token).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

from coordinator.memory.ledger import EpochKey
from coordinator.scheduling.entries import RequestEntry

#: Strikes from which a request is kept apart from other suspects and from newcomers.
SUSPECT_STRIKES: Final = 2
#: Strikes at which it is failed.
POISON_STRIKES: Final = 6
#: Epochs that went down without proof whose passengers are remembered.
LOSSES_MAX: Final = 1_024

assert POISON_STRIKES - SUSPECT_STRIKES >= 2  # it takes more than one accident as the only suspect


class PoisonDetector:
    """`RequestEntry.strikes` and `RequestEntry.mark` are kept here; `RequestEntry.generated` is as fresh as the
    caller made it."""

    def __init__(self) -> None:
        self._suspects: dict[int, RequestEntry] = {}
        self._losses: OrderedDict[EpochKey, list[tuple[RequestEntry, int]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def __contains__(self, entry: RequestEntry) -> bool:
        return entry.request_index in self._suspects

    def lost(self, key: EpochKey, passengers: Iterable[RequestEntry]) -> None:
        """An epoch went down with `passengers`; whether it died is not known yet."""
        self._losses[key] = [(entry, entry.generated) for entry in passengers]
        if len(self._losses) > LOSSES_MAX:
            self._losses.popitem(last=False)

    def survived(self, key: EpochKey) -> None:
        """Its process had not died: it emptied itself."""
        self._losses.pop(key, None)

    def died(self, key: EpochKey, live: Mapping[int, RequestEntry]) -> list[RequestEntry]:
        """Its process is proved dead: strikes for who was there and is still `live`. Returns them; those with
        POISON_STRIKES are to be failed."""
        struck: list[RequestEntry] = []
        for entry, generated in self._losses.pop(key, ()):
            if live.get(entry.request_index) is not entry:
                continue
            entry.strikes = entry.strikes + 1 if generated <= entry.mark else 1
            entry.mark = generated
            struck.append(entry)
            if SUSPECT_STRIKES <= entry.strikes < POISON_STRIKES and entry.generated <= generated:
                self._suspects[entry.request_index] = entry
        return struck

    def recover(self, entry: RequestEntry, strikes: int, mark: int) -> None:
        """Restore the strikes and the mark that it had in an earlier incarnation."""
        entry.strikes, entry.mark = strikes, mark
        if strikes >= SUSPECT_STRIKES and entry.generated <= mark:
            self._suspects[entry.request_index] = entry

    def clear(self) -> None:
        """PoisonDetector that have come further than where they were struck are none any more."""
        for request_index, entry in list(self._suspects.items()):
            if entry.generated > entry.mark:
                del self._suspects[request_index]

    def forget(self, entry: RequestEntry) -> None:
        self._suspects.pop(entry.request_index, None)

    def may_join(self, entry: RequestEntry, present: Iterable[RequestEntry]) -> bool:
        """Whether `entry` may be admitted where `present` are."""
        if not self._suspects:
            return True
        is_suspect = entry in self
        return not any(other in self or (is_suspect and other.generated <= other.came_with) for other in present)


def poison_reason(entry: RequestEntry, worker: str) -> str:
    return (
        f"its worker died {entry.strikes} times without its coming further (poison limit {POISON_STRIKES}), "
        f"{entry.strikes - SUSPECT_STRIKES} times as the only suspect; the last was {worker}"
    )
