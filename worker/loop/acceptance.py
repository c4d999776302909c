"""Which rows of a step hold, and how far a request is while its steps are in flight. Pure.

A step that begins at row p takes up to 1 + n rows of a request (worker/device/step_rows.py). Plain decoding is n = 0,
and goes by the same rules.

    row p + i    is fed    the token at position p + i: one that is known, or a draft of it
                 draws     the token at position p + i + 1
                 holds     when i = 0; or when row p + i - 1 holds, its own selection was admitted, and its token is
                           known or the one that row p + i - 1 drew

DraftStep (drafting.py) finds these rows on the device. Rows that hold are those of plain decoding, since each was fed
what plain decoding feeds, and so are the tokens that they drew. The next step begins behind the last of them and writes
all others again. A row that does not hold is never selected, published, or counted durable.

A device knows where each step begins; the host learns it when it reads the step. Until then it has two bounds, which
are equal where steps take one row:

    0 ........ settled ........ certain ........ position ........ rows_max
    rows of steps that    one row of each      what steps in        no step
    were read, that hold  step in flight       flight may write     writes

The host launches while `position` leaves room, and parks a request when `certain` leaves none: in between it waits for
what it reads next.

Source of the rule: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023), for draws that
are a function of seed and position: then a draft is accepted exactly where it is what the model draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.arrays import Int32Array
from protocol.units import SEAT_ROWS_MAX


@dataclass(slots=True)
class RowProgress:
    """How far one request is: counts of rows, from the first of its prompt. `rows_max` is the first row that no step
    may write, `durable` how many were seen in host memory, `step_rows` how many a step takes at most, `rows_in_flight`
    how many the steps in flight take at most."""

    settled: int
    position: int
    durable: int
    step_rows: int
    rows_max: int = 0
    in_flight: int = 0
    rows_in_flight: int = 0

    @property
    def certain(self) -> int:
        """Rows that hold once every step in flight has run, at least."""
        return self.settled + self.in_flight

    @property
    def has_room(self) -> bool:
        """Whether a step may write the next row."""
        return self.position < self.rows_max

    def starved(self, rows_wanted: int) -> bool:
        """Whether only memory keeps a request that wants so many rows from its next step, whatever the steps in flight
        bring."""
        return self.rows_max <= self.certain < rows_wanted

    @property
    def rows_end(self) -> int:
        """The first row that the next step may not write; with drafts, those for the step behind it need a row too."""
        return self.rows_max if self.step_rows > 1 else min(self.rows_max, self.position + 1)

    def settle(self, accepted: int, rows: int = 0) -> None:
        """The oldest step in flight, of `rows` rows (0: `step_rows`), has `accepted` that hold."""
        rows = rows or self.step_rows
        self.in_flight -= 1
        self.rows_in_flight -= rows
        self.settled += accepted
        if rows > accepted:  # where it is not, the bound was exact
            self.position = min(self.position, self.settled + self.rows_in_flight)


def known_tokens(prompt: Int32Array, generated: Sequence[int], forced: int, start: int, count: int) -> list[int]:
    """Tokens from position `start` on, `count` at most, of a prompt and the first `forced` of what was `generated`."""
    stop, prompt_tokens = start + count, len(prompt)
    tokens: list[int] = prompt[start:stop].tolist()
    return [*tokens, *generated[max(0, start - prompt_tokens) : max(0, min(stop - prompt_tokens, forced))]]


def drafts_in_step(accepted: int, drafted: int, right: int) -> tuple[range, range]:
    """Depths of the drafts that a step verified for a request, and of those that hold: numbers of rows, so that the
    first draft has depth 1. Of its rows, `accepted` hold, `drafted` were fed a draft, behind those that were fed known
    tokens, and `right` are both."""
    first = accepted - right
    return range(first, first + drafted), range(first, accepted)


def drafts_kept(right: int, surplus: int) -> int:
    """Drafts that are tokens of the output, of `right` ones in a step whose last `surplus` tokens lie past its end.
    What the last row drew was no draft."""
    return max(0, right - max(0, surplus - 1))


class StepProgress:
    """What one launched step does for the progress of its requests: it is read once, and once seen in host memory, in
    either order. The decode loop makes one for each step: its loops are short on purpose."""

    __slots__ = ("_is_durable", "_progress", "_rows", "_stops")

    def __init__(self, progress: list[RowProgress], rows: int = SEAT_ROWS_MAX) -> None:
        """The step is launched for these, each of which has room. It takes `rows` of each at most."""
        self._progress, self._rows = progress, rows
        self._is_durable = False
        self._stops = stops = list[int]()  # first row behind those that are known to hold
        for it in progress:
            taken = it.step_rows if it.step_rows < rows else rows
            position = it.position + taken
            it.position = position if position < it.rows_max else it.rows_max
            it.rows_in_flight += taken
            it.in_flight = in_flight = it.in_flight + 1
            stops.append(it.settled + in_flight)

    def withdraw(self, place: int) -> None:
        """Before the step is read: the request at `place` draws nothing. It is where it was, and the step is to be
        launched again for it."""
        it = self._progress[place]
        it.settle(0, min(it.step_rows, self._rows))
        self._stops[place] = 0

    def read(self, accepted: Sequence[int]) -> list[int]:
        """The step was read: so many rows hold, by request, 0 for those withdrawn. Returns the row that it began with,
        by request; meaningless for those withdrawn."""
        firsts = [it.settled for it in self._progress]
        for place, (it, count) in enumerate(zip(self._progress, accepted, strict=True)):
            if it.step_rows == count == 1:  # as `settle` has it; the bound that `_stops` has was exact
                it.in_flight -= 1
                it.rows_in_flight -= 1
                it.settled += 1
            elif count:
                it.settle(count, min(it.step_rows, self._rows))
                self._stops[place] = it.settled
                if self._is_durable:
                    it.durable = max(it.durable, it.settled)
        return firsts

    def note_durable(self) -> None:
        """What the step wrote was seen in host memory. Until the step is read, its first row alone is known to hold."""
        self._is_durable = True
        for it, stop in zip(self._progress, self._stops, strict=True):
            if stop > it.durable:  # noqa: PLR1730, a call for each row of every step
                it.durable = stop
