"""Search for the request that kills its worker, without failing those that were merely there. Pure.

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

The ranks of a group step together, so any of their requests may be what ended any of their processes, and each end
brings those of the other ranks with it. The unit is therefore one life of a group (coordinator.state.worker_entry): its
first proved death strikes the requests of all its ranks, later ones strike none, and a suspect joins a rank only when
all requests of the group have come further. What a request of another rank brings in after that first death moves its
mark and is no second strike. A rank that had said that it leaves, and had emptied itself, strikes none, and the ranks
that end because it has left strike none either.

Rejected: failing requests that were on the worker N times (twenty kills by an operator fail all); halving the batch
until one is left (log2 n deaths more, and with two poisons it does not converge); an empty worker for each suspect (its
whole batch would be retracted for one token).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from basics.request_states import POISON_STRIKES
from coordinator.memory.ledger import EpochKey
from coordinator.state.request_state import RequestState
from coordinator.state.worker_entry import GroupLife

#: Strikes from which a request is kept apart from other suspects and from newcomers.
SUSPECT_STRIKES: Final = 2
#: Epochs that went down without proof whose passengers are remembered.
LOSSES_MAX: Final = 1_024
#: Lives of groups that have ended, and whose later deaths strike none.
ENDED_MAX: Final = 1_024

assert POISON_STRIKES - SUSPECT_STRIKES >= 2  # it takes more than one accident as the only suspect


class _Loss(NamedTuple):
    """An epoch that went down: its requests with their generated tokens, and the life of its group, if any."""

    passengers: list[tuple[RequestState, int]]
    life: GroupLife | None
    has_left: bool  # it said that it leaves, and had emptied itself


class PoisonDetector:
    """`RequestState.strikes` and `RequestState.mark` are kept here; `RequestState.generated` is as fresh as the
    caller made it."""

    def __init__(self) -> None:
        self._suspects: dict[int, RequestState] = {}
        self._losses: OrderedDict[EpochKey, _Loss] = OrderedDict()
        self._ended: OrderedDict[GroupLife, dict[int, RequestState]] = OrderedDict()  # with whom the first death struck

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def __contains__(self, entry: RequestState) -> bool:
        return entry.request_index in self._suspects

    def lost(
        self,
        key: EpochKey,
        passengers: Iterable[RequestState],
        life: GroupLife | None = None,
        *,
        is_leaving: bool = False,
    ) -> None:
        """An epoch went down with `passengers`, in `life` of its group; whether it died is not known yet."""
        noted = [(entry, entry.generated) for entry in passengers]
        self._losses[key] = _Loss(noted, life, is_leaving and not noted)
        if len(self._losses) > LOSSES_MAX:
            self._losses.popitem(last=False)

    def survived(self, key: EpochKey) -> None:
        """Its process had not died: it emptied itself."""
        self._losses.pop(key, None)

    def ended(self, life: GroupLife) -> None:
        """The group has ended in this life, as an earlier incarnation of the coordinator knew: no more strikes."""
        self._end(life, {})

    def life_of(self, key: EpochKey) -> GroupLife | None:
        """The life of its group in which an epoch went down, while its death is not proved."""
        loss = self._losses.get(key)
        return loss.life if loss else None

    def died(
        self, key: EpochKey, live: Mapping[int, RequestState], others: Iterable[RequestState] = ()
    ) -> list[RequestState]:
        """Its process is proved dead: strikes for who was there and is still `live`. Returns those whose strikes or
        mark have changed; those with POISON_STRIKES are to be failed. `others` are on the connected ranks of its
        group's life."""
        loss = self._losses.pop(key, None)
        if loss is None:
            return []
        if loss.life is None:
            return self._strike(loss.passengers, live)
        if loss.life in self._ended:
            return self._move_marks(loss.passengers, self._ended[loss.life], live)
        passengers = loss.passengers + [(entry, entry.generated) for entry in others]
        for peer in [peer for peer, it in self._losses.items() if it.life == loss.life]:
            passengers += self._losses.pop(peer).passengers
        struck = [] if loss.has_left else self._strike(passengers, live)
        self._end(loss.life, {entry.request_index: entry for entry in struck})
        return struck

    def _end(self, life: GroupLife, struck: dict[int, RequestState]) -> None:
        self._ended[life] = struck
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def _strike(
        self, passengers: Iterable[tuple[RequestState, int]], live: Mapping[int, RequestState]
    ) -> list[RequestState]:
        struck: dict[int, RequestState] = {}
        for entry, generated in passengers:
            if live.get(entry.request_index) is not entry or entry.request_index in struck:
                continue
            entry.strikes = entry.strikes + 1 if generated <= entry.mark else 1
            self._mark(entry, generated)
            struck[entry.request_index] = entry
        return list(struck.values())

    def _move_marks(
        self,
        passengers: Iterable[tuple[RequestState, int]],
        struck: Mapping[int, RequestState],
        live: Mapping[int, RequestState],
    ) -> list[RequestState]:
        """Tokens that came from a rank after the first death of its group were computed before it."""
        moved: list[RequestState] = []
        for entry, generated in passengers:
            index = entry.request_index
            if live.get(index) is entry and struck.get(index) is entry and generated > entry.mark:
                self._mark(entry, generated)
                moved.append(entry)
        return moved

    def _mark(self, entry: RequestState, generated: int) -> None:
        entry.mark = generated
        if SUSPECT_STRIKES <= entry.strikes < POISON_STRIKES and entry.generated <= generated:
            self._suspects[entry.request_index] = entry

    def recover(self, entry: RequestState) -> None:
        """Suspect it again, by the strikes that it had in an earlier incarnation."""
        if entry.strikes >= SUSPECT_STRIKES and entry.generated <= entry.mark:
            self._suspects[entry.request_index] = entry

    def clear(self) -> None:
        """PoisonDetector that have come further than where they were struck are none any more."""
        for request_index, entry in list(self._suspects.items()):
            if entry.generated > entry.mark:
                del self._suspects[request_index]

    def forget(self, entry: RequestState) -> None:
        self._suspects.pop(entry.request_index, None)

    def may_join(self, entry: RequestState, present: Iterable[RequestState]) -> bool:
        """Return whether `entry` may be admitted where `present` are."""
        if not self._suspects:
            return True
        is_suspect = entry in self
        return not any(other in self or (is_suspect and other.generated <= other.came_with) for other in present)


def poison_reason(entry: RequestState, worker: str) -> str:
    return (
        f"its worker died {entry.strikes} times without its coming further (poison limit {POISON_STRIKES}), "
        f"{entry.strikes - SUSPECT_STRIKES} times as the only suspect; the last was {worker}"
    )
