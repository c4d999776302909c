"""Groups of simulated workers: the ranks of one life run rounds together, and end together.

A round is decided by the real worker.group.agreement, one on each rank, and is run once every rank of the life has
launched it. Only then are its results read and its wishes gathered, by all ranks at once. A rank that is dead, stopped
or hung launches nothing, so the others wait: they beat on and name it, and end themselves after PEER_LIMIT_S.

`SimGroup` checks what must hold of rounds: all ranks launch the same sequence, no rank reads what has not run, and
prompt rounds stay within the bound while a rank wishes to decode.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from protocol.messages import GroupMember
from tests.sim.passes import LAYERS, SPLIT_TOKENS
from tests.sim.trace import Violation
from worker.group.agreement import Agreement, Round, RoundKind, Wish

#: Rounds after which wishes are known: one more than are launched ahead.
LAG: Final = 2
#: Units between two decode rounds while a rank wishes to decode: what every rank wishes.
UNITS_MAX: Final = 2
#: What decode batches are padded to, up to the most seats.
BATCH_SIZES: Final = (1, 2, 4, 8, 16)
#: Seconds after which a rank that waits says for which one, and after which it takes that one for lost.
AWAITS_S: Final = 0.5
PEER_LIMIT_S: Final = 3.0


@dataclass
class Launched:
    """A round, and the wishes of the ranks that launched it."""

    round: Round
    wishes: dict[int, Wish] = field(default_factory=dict)


class SimGroup:
    """One life of one group. `names` of its workers by rank; `rng` for what its processes draw."""

    def __init__(self, group: str, incarnation: int, names: tuple[str, ...], rng: random.Random) -> None:
        self.group, self.incarnation, self.names, self.rng = group, incarnation, names, rng
        self.is_ending = False
        self.woken_at = -1
        self.on_news: list[Callable[[], None]] = []
        self._rounds: list[Launched] = []
        self._prompt_rounds = 0  # run since the last decode round

    @property
    def size(self) -> int:
        return len(self.names)

    def member(self, rank: int) -> GroupMember:
        return GroupMember(self.group, rank, len(self.names), self.incarnation)

    def wake(self, number: int) -> None:
        """A rank has work for round `number`, at which the group sleeps."""
        self.woken_at = max(self.woken_at, number)
        self._tell()

    def launch(self, rank: int, this: Round, wish: Wish) -> None:
        """`rank` has launched `this`. It has run when all have."""
        if this.number == len(self._rounds):
            self._rounds.append(Launched(this))
        launched = self._rounds[this.number]
        if launched.round != this or rank in launched.wishes:
            raise Violation("rounds", f"{self.names[rank]} launches {this}, the others {launched.round}")
        launched.wishes[rank] = wish
        if len(launched.wishes) == len(self.names):
            self._check_bound(this)
            self._tell()

    def wishes(self, number: int) -> list[Wish]:
        """Of a round that has run, by rank."""
        self.check_ran(number)
        return [wish for _, wish in sorted(self._rounds[number].wishes.items())]

    def missing(self, number: int) -> list[str]:
        """Workers that have not launched round `number`."""
        if number >= len(self._rounds):
            return list(self.names)
        return [name for rank, name in enumerate(self.names) if rank not in self._rounds[number].wishes]

    def check_ran(self, number: int) -> None:
        """A result of round `number` is read."""
        if missing := self.missing(number):
            raise Violation("rounds", f"round {number} of {self.group} is read, and {missing} have not launched it")

    def _check_bound(self, this: Round) -> None:
        """One of the last LAG rounds has the wishes that decided `this`."""
        if this.kind is RoundKind.DECODE:
            self._prompt_rounds = 0
        elif this.kind is RoundKind.PROMPT:
            self._prompt_rounds += 1
            before = self._rounds[max(0, this.number - LAG) : this.number]
            decodes = all(any(wish.rows for wish in it.wishes.values()) for it in before)
            if self._prompt_rounds > UNITS_MAX and decodes:
                raise Violation("rounds", f"{self._prompt_rounds} prompt rounds of {self.group} while ranks decode")

    def _tell(self) -> None:
        for tell in self.on_news:
            tell()


class RankRounds:
    """The rounds of one rank, as worker.loop.rounds has them.

    `awaited`: the round that must run before this rank goes on, since `awaited_since`; None: it goes on.
    """

    def __init__(self, group: SimGroup, rank: int) -> None:
        self.group = group
        self.awaited: int | None = None
        self.awaited_since = 0.0
        self.rank = rank
        self._read = 0  # rounds whose wishes were
        self._agreement = Agreement(lag=LAG, batch_sizes=BATCH_SIZES, layers=LAYERS, split_tokens=SPLIT_TOKENS)

    def has_run(self, number: int) -> bool:
        return not self.group.missing(number)

    def waits_for(self, number: int) -> bool:
        """Whether round `number` has not run yet: then this rank waits for it."""
        if self.has_run(number):
            self.awaited = None
            return False
        if self.awaited != number:
            self.awaited, self.awaited_since = number, trio.current_time()
        return True

    @property
    def awaits(self) -> str:
        """The worker that is awaited, once that has lasted; empty: none."""
        if self.awaited is None or trio.current_time() < self.awaited_since + AWAITS_S:
            return ""
        return next((name for name in self.group.missing(self.awaited) if name != self.group.names[self.rank]), "")

    @property
    def has_lost_a_peer(self) -> bool:
        return self.awaited is not None and trio.current_time() > self.awaited_since + PEER_LIMIT_S

    def next(self, *, has_work: bool) -> Round | None:
        """The round to launch; None: the group sleeps, or this rank waits (`awaited`) for wishes that decide it."""
        agreement = self._agreement
        while (found := agreement.next()) is None and agreement.unread:
            if self.waits_for(self._read):
                return None
            agreement.learned(self.group.wishes(self._read))
            self._read += 1
        if found is not None:
            return found
        if has_work:
            self.group.wake(agreement.number)
        return agreement.wake() if self.group.woken_at >= agreement.number else None

    def launch(self, this: Round, wish: Wish) -> None:
        self._agreement.launched(this)
        self.group.launch(self.rank, this, wish)
