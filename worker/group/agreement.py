"""Which round the ranks of a group run next. Pure. The same on every rank: a function of gathered wishes alone.

A *round* is what all ranks launch together: a prompt chunk of each rank that has one, or one decode step of all. At the
end of each round every rank says what it wishes to run later, and all ranks gather these wishes. Wishes of round n are
read by the host before round n + lag is launched, with lag = lookahead + 1: by then round n has run, so that reading
them waits for nothing.

    wishes of      n      n+1    n+2             (lag 2)
                    \\      \\
    rule round            n+2    n+3

Round n + lag follows the wishes of round n, or of the first later round whose wishes ask for anything that was not
launched since. When none of the rounds n to n + lag - 1 does, the group sleeps before round n + lag. A rank with work
then wakes the others (worker/group/control.py), and round n + lag gathers wishes alone. So ranks agree on the number of
the round at which they sleep, and a wake names it.

A wish lists the chunks that the rank would bring to its next `lag` prompt rounds: of two rounds that follow the same
wishes, the second one takes the second chunk. A rank may bring less than it wished, since a request may have ended
meanwhile; it never brings more than the size of the round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from protocol.errors import InternalError

#: int32 numbers of a wish before its chunks.
WISH_HEAD: Final = 1


class RoundKind(Enum):
    WISHES = "wishes"
    PROMPT = "prompt"
    DECODE = "decode"


class Round(NamedTuple):
    """`size`: tokens of the largest chunk, or rows of the largest batch, padded; 0 for WISHES. Where steps draft, each
    of these rows brings its drafts: equally many on all ranks.
    """

    number: int
    kind: RoundKind
    size: int


class Wish(NamedTuple):
    """What a rank would bring: `rows` of a decode batch, and `chunks`, tokens of its next chunks in order (0: none)."""

    rows: int = 0
    chunks: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rows or any(self.chunks))

    def pack(self, lag: int) -> list[int]:
        """int32[WISH_HEAD + lag]."""
        chunks = self.chunks[:lag]
        return [self.rows, *chunks, *[0] * (lag - len(chunks))]

    @classmethod
    def unpack(cls, numbers: Sequence[int]) -> Wish:
        return cls(numbers[0], tuple(numbers[WISH_HEAD:]))


class Agreement:
    """`learned` of each round in order, `next` before each launch, `launched` after the decision."""

    def __init__(
        self, *, lag: int, batch_sizes: Sequence[int], chunk_sizes: Sequence[int], prompt_rounds_max: int
    ) -> None:
        """`batch_sizes` and `chunk_sizes`: what decode batches and chunks are padded to. `prompt_rounds_max`: prompt
        rounds between two decode rounds while any rank wishes to decode."""
        self.lag = lag
        self.number = 0  # of the next round
        self._batch_sizes, self._chunk_sizes = sorted(batch_sizes), sorted(chunk_sizes)
        self._prompt_rounds_max = prompt_rounds_max
        self._prompt_rounds = 0  # since the last decode round
        self._gathered: deque[tuple[int, tuple[Wish, ...]]] = deque(maxlen=lag)  # round and wishes, as they were read
        self._prompt_numbers: deque[int] = deque(maxlen=lag)  # the last prompt rounds
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
            self._prompt_rounds = 0
        elif this.kind is RoundKind.PROMPT:
            self._prompt_rounds += 1
            self._prompt_numbers.append(this.number)
        self.number += 1

    def _ruled_by(self, number: int, wishes: tuple[Wish, ...]) -> Round | None:
        """The next round by the wishes of round `number`; None when all that they ask for was launched since."""
        rows = max(wish.rows for wish in wishes)
        taken = sum(prompt > number for prompt in self._prompt_numbers)
        chunk = max((tokens for wish in wishes for tokens in wish.chunks[taken : taken + 1]), default=0)
        if chunk and (not rows or self._prompt_rounds < self._prompt_rounds_max):
            return Round(self.number, RoundKind.PROMPT, _padded(self._chunk_sizes, chunk))
        if rows:
            return Round(self.number, RoundKind.DECODE, _padded(self._batch_sizes, rows))
        return None


def _padded(sizes: Sequence[int], wished: int) -> int:
    size = next((size for size in sizes if size >= wished), None)
    if size is None:
        raise InternalError(f"sizes end at {sizes[-1]}", field="wish", value=wished)
    return size


def chunk_sizes(chunk_tokens: int, *, deterministic: bool) -> list[int]:
    """What chunks are padded to: an eighth of `chunk_tokens`, doubled up to the whole; or the whole alone."""
    if deterministic:
        return [chunk_tokens]
    return sorted({max(1, chunk_tokens >> power) for power in range(4)})
