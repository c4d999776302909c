"""Which round the ranks of a group run next. Pure. The same on every rank: a function of gathered wishes alone.

A *round* is what all ranks launch together: a unit of a prompt pass (worker/device/passes.py), or one decode step of
all. At the end of each round every rank says what it wishes to run later, and all ranks gather these wishes. Wishes of
round n are read by the host before round n + lag is launched, with lag = lookahead + 1: by then round n has run, so
that reading them waits for nothing.

    wishes of      n      n+1    n+2             (lag 2)
                    \\      \\
    rule round            n+2    n+3

Round n + lag follows the wishes of round n, or of the first later round whose wishes ask for anything that was not
launched since. When none of the rounds n to n + lag - 1 does, and no pass is open, the group sleeps before round n +
lag. A rank with work then wakes the others (worker/group/control.py), and round n + lag gathers wishes alone. So ranks
agree on the number of the round at which they sleep, and a wake names it.

A pass belongs to the group: all ranks are at the same layer of the same rows. It is opened by a round that names its
rows, the most that any rank wishes to bring; a rank brings as many at most, and pads what it lacks. A rank that comes
later waits for the next pass. While one pass is open a second one may be opened, of what ranks call urgent, and goes on
until it is over; the first one then goes on where it was left. Wishes that were made before a pass was opened ask for
no other one: what they asked for may be in it. The rows of a unit are the fewest that any rank wishes, and so are the
units between two decode rounds.

Where one rank alone has prompts for the next pass, and enough of them, all ranks *split* it: the round that opens it
names its owner, and the slab pages that every other rank lends. A rank that gets a prompt meanwhile brings it to the
next pass, or to one that preempts this one; neither is split.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from protocol.errors import InternalError
from worker.device.passes import NOT_SPLIT, PASSES_MAX, PassPlace, PassUnit


class RoundKind(Enum):
    WISHES = "wishes"
    PROMPT = "prompt"
    DECODE = "decode"


class Round(NamedTuple):
    """`size`: rows of the unit, or of the largest decode batch, padded; 0 for WISHES. Where steps draft, each of these
    rows brings its drafts: equally many on all ranks.

    Of a unit: the pass, by number, the rows of that on each rank, and where in it the unit begins. Of a split pass its
    owner; with the first unit, the `pages` of the slab that each rank has for it.
    """

    number: int
    kind: RoundKind
    size: int
    pass_number: int = 0
    pass_rows: int = 0
    layer: int = 0
    first: int = 0
    owner: int = NOT_SPLIT
    pages: int = 0

    @property
    def opens(self) -> bool:
        """Tell whether this is the first unit of its pass."""
        return self.kind is RoundKind.PROMPT and not self.layer and not self.first

    @property
    def unit(self) -> PassUnit:
        return PassUnit(self.layer, self.first, self.first + self.size)


class Wish(NamedTuple):
    """Work that a rank would bring: `rows` of a decode batch; `tokens` to the next pass, and `urgent` tokens to one
    that preempts the open one. `block`: rows of a unit at most; `units`: between two decode rounds at most. `pages` of
    the slab: what those tokens take, or what a rank without tokens lends to a split pass."""

    rows: int = 0
    tokens: int = 0
    urgent: int = 0
    block: int = 0
    units: int = 0
    pages: int = 0

    def __bool__(self) -> bool:
        return bool(self.rows or self.tokens or self.urgent)


#: int32 numbers of a wish.
WISH_NUMBERS: Final = len(Wish._fields)


class Agreement:
    """`learned` of each round in order, `next` before each launch, `launched` after the decision."""

    def __init__(
        self, *, lag: int, batch_sizes: Sequence[int], layers: int, fixed_block: int = 0, split_tokens: int = 0
    ) -> None:
        """`batch_sizes`: what decode batches are padded to; `layers` of the model. `fixed_block`: rows of every unit,
        to whose multiples passes are padded (deterministic mode); 0: as ranks wish. `split_tokens`: of a pass that is
        split, at least; 0: none is."""
        self.lag = lag
        self.number = 0  # of the next round
        self._batch_sizes, self._layers, self._fixed = sorted(batch_sizes), layers, fixed_block
        self._split_tokens = split_tokens
        self._units = 0  # since the last decode round
        self._gathered: deque[tuple[int, tuple[Wish, ...]]] = deque(maxlen=lag)  # round and wishes, as they were read
        self._open: list[PassPlace] = []
        self._passes = 0
        self._opened_at = 0  # the round that opened the last pass
        self._read = -1  # the last round whose wishes were read

    @property
    def unread(self) -> int:
        """Rounds launched whose wishes were not read."""
        return self.number - 1 - self._read

    def learned(self, wishes: Sequence[Wish]) -> None:
        """The wishes of the oldest round that was not read, by rank."""
        self._read += 1
        self._gathered.append((self._read, tuple(wishes)))

    def next(self) -> Round | None:
        """The next round; None while it depends on wishes that were not read, or when the group sleeps (`asleep`)."""
        for number, wishes in self._gathered:
            if number >= self.number - self.lag and (found := self._ruled_by(number, wishes)) is not None:
                return found
        return None

    @property
    def asleep(self) -> bool:
        """Whether the next round waits for a wake: all wishes were read, and none of the last `lag` asks for anything.

        Only while `next` gives None.
        """
        return self.unread == 0

    def wake(self) -> Round:
        """The round that gathers wishes after a sleep. InternalError unless the group sleeps."""
        if not self.asleep or self.next() is not None:
            raise InternalError("the group does not sleep", field="round", value=self.number)
        return Round(self.number, RoundKind.WISHES, 0)

    def launched(self, this: Round) -> None:
        """`this`, the round that was decided, was launched. InternalError for any other."""
        if this.number != self.number:
            raise InternalError(f"round {self.number} is next", field="round", value=this.number)
        if this.kind is RoundKind.DECODE:
            self._units = 0
        elif this.kind is RoundKind.PROMPT:
            self._launched_unit(this)
        self.number += 1

    def _launched_unit(self, this: Round) -> None:
        self._units += 1
        if this.opens:
            self._passes, self._opened_at = this.pass_number, this.number
            block = this.size if this.owner != NOT_SPLIT else 0
            self._open.append(PassPlace(this.pass_number, this.pass_rows, self._layers, owner=this.owner, block=block))
        place = self._open[-1]
        if place.number != this.pass_number:
            raise InternalError(f"pass {place.number} goes on", field="pass", value=this.pass_number)
        place.launched(this.unit)
        if place.is_over:
            self._open.pop()

    def _ruled_by(self, number: int, wishes: tuple[Wish, ...]) -> Round | None:
        """The next round by the wishes of round `number`; None when all that they ask for was launched since."""
        rows = max(wish.rows for wish in wishes)
        unit = self._next_unit(number, wishes)
        units = min((wish.units for wish in wishes if wish.units), default=1)
        if unit is not None and (not rows or self._units < units):
            return unit
        if rows:
            return Round(self.number, RoundKind.DECODE, _padded(self._batch_sizes, rows))
        return None

    def _next_unit(self, number: int, wishes: tuple[Wish, ...]) -> Round | None:
        """The unit that a prompt round would be: of a pass that they ask for, or of the open one."""
        place, pages = self._wished_pass(number, wishes) or (self._open[-1] if self._open else None, 0)
        if place is None:
            return None
        blocks = [wish.block for wish in wishes if wish.block]
        unit = place.unit(self._fixed or min(blocks, default=place.rows))
        about = place.number, place.rows, unit.layer, unit.first, place.owner, pages
        return Round(self.number, RoundKind.PROMPT, unit.rows, *about)

    def _wished_pass(self, number: int, wishes: tuple[Wish, ...]) -> tuple[PassPlace, int] | None:
        """The pass that the wishes of round `number` ask for, and the pages that ranks lend to it."""
        if number < self._opened_at or len(self._open) == PASSES_MAX:
            return None
        rows = max(wish.urgent if self._open else wish.tokens for wish in wishes)
        if not rows:
            return None
        owner, pages = self._split(wishes)
        if owner != NOT_SPLIT:
            rows = -(-rows // len(wishes))
        elif self._fixed:
            rows = -(-rows // self._fixed) * self._fixed
        return PassPlace(self._passes + 1, rows, self._layers, owner=owner), pages

    def _split(self, wishes: tuple[Wish, ...]) -> tuple[int, int]:
        """The owner of a pass that is split, and the pages that each of the others lends."""
        bringing = [rank for rank, wish in enumerate(wishes) if wish.tokens]
        if self._open or not self._split_tokens or len(bringing) != 1 or len(wishes) == 1:
            return NOT_SPLIT, 0
        owner, pages = bringing[0], min(wish.pages for wish in wishes if not wish.tokens)
        if wishes[owner].tokens < self._split_tokens or pages < wishes[owner].pages:
            return NOT_SPLIT, 0
        return owner, pages


def _padded(sizes: Sequence[int], wished: int) -> int:
    size = next((size for size in sizes if size >= wished), None)
    if size is None:
        raise InternalError(f"sizes end at {sizes[-1]}", field="wish", value=wished)
    return size
