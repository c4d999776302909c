"""Prompts of this worker: which wait, which passes are open, and what is launched of them next.

Passes are a stack of PASSES_MAX: the last one goes on, and the hidden states of one below it stay where they are. A
pass is opened when none is, or when shorter prompts came (prompt_order.py). Its end is that of its parts: more pages of
a prompt on their way to host memory, or the first token of a prompt. A first token whose mask is late is drawn later,
and holds up nothing else.

In a group the rounds say which pass goes on and what opens (worker/group/agreement.py); a rank without prompts for a
pass pads its units, or takes its stripes of a pass that is split (guests.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Final, NamedTuple, cast

from protocol.units import pages_for
from worker.device.passes import NOT_SPLIT, PASSES_MAX, PassPlace, PassUnit
from worker.loop.batch import RunningRequest
from worker.loop.guests import Guests
from worker.loop.pace import Pacing
from worker.loop.prefill import LaunchedPass, Prefill
from worker.loop.prompt_order import PromptOrder, Taken, WaitingPrompt
from worker.loop.seats import Seats
from worker.loop.swap import Swap
from worker.runners.base import GroupRunner, PromptPass
from worker.streams import Fence, Streams

#: Passes whose hidden states wait for a mask, beside those that are open.
UNDRAWN_MAX: Final = 1
#: Units launched ahead of the one that runs, where no request decodes.
UNITS_AHEAD: Final = 3


class Wished(NamedTuple):
    """Offer of a rank to the next pass: `tokens`, `urgent` ones, and `pages` as in agreement.Wish."""

    tokens: int
    urgent: int
    pages: int


class PassSizes(NamedTuple):
    """Sizes of the passes of a worker: `layers` of the model, `tokens` of a pass at most."""

    layers: int
    tokens: int


class NextUnit(NamedTuple):
    """A unit, and the seconds that it takes with its wait for copies; 0: not known."""

    unit: PassUnit
    seconds: float


@dataclass(eq=False)
class OpenPass:
    """`launched` is None where this rank only pads, or has stripes of another rank's pass: then it has a `guest`.
    `tokens`: what the prompt of each part had left when the pass began; `preempting`: rows of passes that preempted
    this one; `covered_s`: seconds of the units launched since the copies began that the next layer waits for."""

    place: PassPlace
    launched: LaunchedPass | None
    tokens: tuple[int, ...] = ()
    preempting: int = 0
    covered_s: float = 0.0
    guest: PromptPass | None = None

    @property
    def split(self) -> PromptPass | None:
        """The pass, on whichever rank, where ranks split it and it has any row."""
        own = self.launched.prompts if self.launched is not None else None
        return None if self.place.owner == NOT_SPLIT else own or self.guest

    @property
    def own_rows(self) -> int:
        return self.launched.prompts.rows if self.launched is not None else 0

    @property
    def is_left(self) -> bool:
        """Tell whether all of its requests have left."""
        return not self.staying()

    def staying(self) -> list[int]:
        """Numbers of the parts whose request has not left."""
        return [] if self.launched is None else self.launched.staying()

    @property
    def lacks_mask(self) -> bool:
        """Tell whether the first token of a part could not be drawn now."""
        this = self.launched
        return this is not None and any(this.part(it).ends and this.requests[it].lacks_mask for it in self.staying())

    def wait_s(self, pace: Pacing) -> float:
        """Seconds that the next unit will wait for copies of rows, by `pace`; infinite where that is not known."""
        if self.launched is None or self.launched.may_enter(self.place.layer):
            return 0.0
        return max(0.0, pace.copy_s(self.launched.copied_rows) - self.covered_s)

    def requests(self) -> list[RunningRequest]:
        """Requests that have not left."""
        return [] if self.launched is None else [self.launched.requests[number] for number in self.staying()]


class Prompts:
    """Prompts that wait, and open passes. One thread uses them: the decode loop's."""

    def __init__(
        self,
        prefill: Prefill,
        order: PromptOrder,
        pace: Pacing,
        swap: Swap,
        seats: Seats,
        streams: Streams,
        sizes: PassSizes,
        *,
        may_launch: Callable[[RunningRequest], bool],
        clock: Callable[[], float],
        ran: Callable[[int, float], None],
        ended: Callable[[int], None],
        failed: Callable[[RunningRequest, Exception], None],
        guests: Guests | None = None,
    ) -> None:
        """`may_launch`: whether nothing would wait for a prompt's prefix. `ran` is told of units: rows and seconds;
        `ended` of passes: tokens; `failed` of the requests of a pass that raised, which leave. `guests`: of a rank that
        splits passes."""
        self._prefill, self._order, self._pace, self._swap, self._seats = prefill, order, pace, swap, seats
        self._streams, self._sizes = streams, sizes
        self._may_launch, self._clock = may_launch, clock
        self._ran, self._ended, self._failed, self._guests = ran, ended, failed, guests
        self._prompts: dict[int, RunningRequest] = {}  # by placement, until their last pass ended
        self._open: list[OpenPass] = []
        self._undrawn: list[tuple[LaunchedPass, int]] = []
        self._flying: deque[Fence] = deque(maxlen=UNITS_AHEAD)  # behind the units launched last
        self._numbers = 0

    # ---------------------------------------------------------------- requests

    def add(self, request: RunningRequest) -> None:
        self._prompts[request.placement] = request

    def leave(self, request: RunningRequest) -> None:
        """Nothing more is launched for `request`."""
        self._prompts.pop(request.placement, None)
        for opened in self._open:
            if opened.launched is not None:
                opened.launched.leave(request)
        self._undrawn = [(this, number) for this, number in self._undrawn if this.requests[number] is not request]

    def late(self) -> list[tuple[LaunchedPass, int]]:
        """Parts whose first token can be drawn now."""
        return [(this, number) for this, number in self._undrawn if not this.requests[number].lacks_mask]

    def drew(self, this: LaunchedPass, number: int) -> None:
        """The first token of a part that was late was launched."""
        self._undrawn.remove((this, number))

    def waiting_since(self) -> tuple[float, ...]:
        """Times, by the clock, at which prompts came whose first token was not launched yet."""
        late = [this.requests[number] for this, number in self._undrawn]
        return tuple(request.since_s for request in [*self._prompts.values(), *late])

    @property
    def has_work(self) -> bool:
        """Tell whether a unit could be launched."""
        return any(not it.is_left for it in self._open) or bool(self._eligible())

    @property
    def depth(self) -> int:
        """Open passes."""
        return len(self._open)

    def held(self) -> bool:
        """Tell whether as many units are launched and have not run as may be ahead where no request decodes."""
        return len(self._flying) == UNITS_AHEAD and not self._flying[0].done()

    # ---------------------------------------------------------------- one worker

    def next(self, *, beside_steps: bool, left_s: float = inf) -> NextUnit | None:
        """The unit to launch next, of the pass that goes on or is opened for it, which beside steps is to take `left_s`
        at most; None: no prompt can go on, or steps would wait for copies of its rows, none of which was measured."""
        while self._open and self._open[-1].is_left:
            self._open.pop()
        if not self._open:
            self._try_to_begin(self._compose(self._sizes.tokens))
        elif len(self._open) < PASSES_MAX:
            self._try_to_begin(self._preempting())
        if not self._open:
            return None
        this = self._open[-1]
        wait_s = this.wait_s(self._pace) if beside_steps else 0.0
        if wait_s == inf:
            return None
        unit = this.place.unit(self._pace.block(beside_steps=beside_steps, left_s=left_s - wait_s))
        return NextUnit(unit, wait_s + self._pace.unit_s(unit.rows))

    def launch(self, unit: PassUnit) -> list[tuple[LaunchedPass, int]]:
        """Launch `unit`, which `next` gave. Returns the parts whose first token is to be drawn now: with the last
        unit of their pass. The requests of a pass that fails leave, and those of the pass below it go on."""
        opened = self._open[-1]
        try:
            return self._launch(opened, unit, 0)
        except Exception as error:
            self._fail(opened.requests(), error)
            return []

    def _try_to_begin(self, taken: Sequence[Taken]) -> None:
        requests = [self._prompts[it.prompt] for it in taken]
        try:
            self._begin(taken)
        except Exception as error:
            self._fail(requests, error)

    def _fail(self, requests: Sequence[RunningRequest], error: Exception) -> None:
        for request in requests:
            self._failed(request, error)

    # ---------------------------------------------------------------- a rank of a group

    def wished(self) -> Wished:
        """Tell what this rank would bring to the next pass, to one that preempts the open one, or lend to another's."""
        taken = self._compose(self._sizes.tokens, behind_open=True)
        urgent = self._preempting() if len(self._open) == 1 else []
        pages = sum(pages_for(it.stop) for it in taken) if taken else self._seats.lendable_slab
        return Wished(_tokens(taken), _tokens(urgent), pages)

    def open(self, rows: int, owner: int = NOT_SPLIT, pages: int = 0) -> None:
        """A pass of `rows` on each rank opens, of what this rank has for it; or one of rank `owner` that all split, for
        which each has as many slab `pages`."""
        if owner != NOT_SPLIT:
            self._open_split(cast(Guests, self._guests), rows, owner, pages)
            return
        taken = self._preempting(rows) if self._open else self._compose(min(rows, self._sizes.tokens))
        if taken:
            self._begin(taken, self._place(rows))
        else:
            self._push(OpenPass(self._place(rows), None))

    def _open_split(self, guests: Guests, rows: int, owner: int, pages: int) -> None:
        place = self._place(rows)
        place.owner = owner
        if guests.rank != owner:
            self._push(OpenPass(place, None, guest=guests.begin(owner)))
            return
        taken = self._compose(min(rows * guests.ranks, self._sizes.tokens), pages_max=pages)
        if taken:
            self._begin(taken, place)
        else:
            self._push(OpenPass(place, None))
        this = self._open[-1].launched
        parts = this.prompts.parts if this is not None else ()
        requests = this.requests if this is not None else ()
        guests.tell(parts, [it.prompt[part.start : part.stop] for it, part in zip(requests, parts, strict=True)])

    def launch_round(self, runner: GroupRunner, unit: PassUnit) -> list[tuple[LaunchedPass, int]]:
        """Launch the unit of a round, or pad it. Returns as `launch` does; what it raises is the group's."""
        opened = self._open[-1]
        first, stop = min(unit.first, opened.own_rows), min(unit.stop, opened.own_rows)
        if opened.split is not None and self._guests is not None:
            return self._launch_split(opened, opened.split, unit, self._guests)
        if first < stop:
            return self._launch(opened, unit, unit.rows)
        runner.launch_padding(self._streams, unit.layer, unit.rows)
        opened.place.launched(unit)
        return self._close(opened) if opened.place.is_over else []

    # ---------------------------------------------------------------- passes

    def _compose(self, tokens: int, *, behind_open: bool = False, pages_max: int | None = None) -> list[Taken]:
        """Compose the next pass, of `tokens` and in `pages_max` of the slab at most. `behind_open`: as if the open
        passes had ended."""
        ending = [request for opened in self._open for request in opened.requests()] if behind_open else []
        pages = self._seats.lendable_slab if behind_open else self._seats.slab.free
        pages += sum(len(request.memory.slab) for request in ending)
        pages = pages if pages_max is None else min(pages, pages_max)
        return self._order.compose(self._eligible(behind_open=behind_open), tokens, pages)

    def _eligible(self, *, behind_open: bool = False) -> list[WaitingPrompt]:
        """Prompts that a pass may take now: those of no open pass. `behind_open`: or those that it may take when the
        open passes have ended."""
        now, stops = self._clock(), self._open_stops()
        found = []
        for number, request in self._prompts.items():
            start = stops.get(number, request.prefilled)
            may_take = (behind_open or number not in stops) and self._may_take(request)
            if may_take and start < request.prompt_tokens:
                waited = now - request.since_s
                found.append(WaitingPrompt(number, request.owner, start, request.prompt_tokens, waited))
        return found

    def _may_take(self, request: RunningRequest) -> bool:
        """Tell whether a pass may take `request` without states kept for too many masks, and whether neither that pass
        nor an open one would wait for a prefix."""
        if request.lacks_mask and self._passes_without_mask() >= UNDRAWN_MAX:
            return False
        return self._may_launch(request) and not (self._open and request.prefix_load)

    def _passes_without_mask(self) -> int:
        """Passes whose states wait for a mask, or will if it stays late."""
        late = {id(this) for this, _ in self._undrawn}
        return len(late) + sum(opened.lacks_mask for opened in self._open)

    def _open_stops(self) -> dict[int, int]:
        """Positions at which the next pass goes on with prompts of open ones, by placement."""
        return {
            opened.launched.requests[number].placement: opened.launched.part(number).stop
            for opened in self._open
            if opened.launched is not None
            for number in opened.launched.staying()
        }

    def _preempting(self, rows: int | None = None) -> list[Taken]:
        opened = self._open[-1]
        left = opened.place.rows_left
        tokens = min(self._sizes.tokens, opened.place.rows - opened.preempting)
        if rows is not None:
            tokens = min(tokens, rows)
        eligible = self._eligible()
        own = [opened.tokens[number] for number in opened.staying()]
        longer = max((it.tokens for it in eligible), default=0) + 1
        return self._order.preempting(eligible, own or [longer], left, tokens, self._seats.slab.free)

    def _begin(self, taken: Sequence[Taken], place: PassPlace | None = None) -> None:
        """Open a pass of what was `taken`, if anything was. `place`: of the group's pass."""
        if not taken:
            return
        requests = [(self._prompts[it.prompt], it.start, it.stop) for it in taken]
        tokens = sum(stop - start for _, start, stop in requests)
        left = tuple(request.prompt_tokens - request.prefilled for request, _, _ in requests)
        launched = self._prefill.begin(requests, len(self._open))
        self._push(OpenPass(place or self._place(tokens), launched, left))
        for request, start, stop in requests:
            self._order.took(request.owner, stop - start)

    def _push(self, opened: OpenPass) -> None:
        """Open a pass on top of those that are open."""
        if self._open:
            self._open[-1].preempting += opened.place.rows
        self._open.append(opened)

    def _place(self, rows: int) -> PassPlace:
        """The place of a pass that opens now."""
        self._numbers += 1
        return PassPlace(self._numbers, rows, self._sizes.layers)

    def _launch(self, opened: OpenPass, unit: PassUnit, rows: int) -> list[tuple[LaunchedPass, int]]:
        this = cast(LaunchedPass, opened.launched)
        own = unit._replace(stop=min(unit.stop, opened.own_rows))
        self._launch_timed(opened, own, partial(self._prefill.launch, this, own, rows))
        return self._launched(opened, unit, own.rows)

    def _launch_split(
        self, opened: OpenPass, prompts: PromptPass, unit: PassUnit, guests: Guests
    ) -> list[tuple[LaunchedPass, int]]:
        """Launch this rank's stripe of a unit, or pad it where no row of the pass lies in the unit."""
        span, owner = unit.span(guests.ranks, prompts.rows), opened.place.owner
        if not span.rows:
            guests.pad(unit)
        elif opened.launched is None:
            launch = partial(guests.launch, prompts, unit, owner)
            if not unit.first and prompts.has_earlier:  # its time is that of the owner's copies too
                launch()
            else:
                self._time(unit, launch)
        else:
            launch = partial(self._prefill.launch_split, opened.launched, unit, span, owner)
            self._launch_timed(opened, unit, launch)
        return self._launched(opened, unit, unit.rows)

    def _launch_timed(self, opened: OpenPass, unit: PassUnit, launch: Callable[[], None]) -> None:
        """Launch `unit`; what waits for copies has no time of its own."""
        if not opened.wait_s(self._pace) and not any(it.prefix_load for it in opened.requests()):
            self._time(unit, launch)
        else:
            launch()

    def _time(self, unit: PassUnit, launch: Callable[[], None]) -> None:
        """Launch `unit`; its time sets the pace."""
        self._streams.timed(launch, lambda seconds: self._ran(unit.rows, seconds))()

    def _launched(self, opened: OpenPass, unit: PassUnit, rows: int) -> list[tuple[LaunchedPass, int]]:
        """`unit` was launched, with so many `rows` of this rank. Returns as `launch` does."""
        self._flying.append(self._streams.compute.record("inputs_consumed"))
        opened.covered_s = (opened.covered_s if unit.first else 0.0) + self._pace.unit_s(rows)
        opened.place.launched(unit)
        return self._close(opened) if opened.place.is_over else []

    def _close(self, opened: OpenPass) -> list[tuple[LaunchedPass, int]]:
        """End a pass whose last unit was launched. Returns the parts whose first token is to be drawn."""
        self._open.remove(opened)
        this, drawn = opened.launched, list[tuple[LaunchedPass, int]]()
        if opened.guest is not None and self._guests is not None:
            self._guests.end()
        if this is None:
            return []
        self._ended(sum(this.part(number).tokens for number in this.staying()))
        for number in this.staying():
            request, part = this.requests[number], this.part(number)
            self._prefill.end(this, number)
            if not part.ends:
                request.prefilled = part.stop
                continue
            del self._prompts[request.placement]
            if request.lacks_mask:
                self._undrawn.append((this, number))
            else:
                drawn.append((this, number))
        unended = [number for number in this.staying() if not this.part(number).ends]
        if unended:
            staged = self._swap.staged()
            for number in unended:
                this.requests[number].chunk_marks.append((staged, this.part(number).stop))
        return drawn


def _tokens(taken: Sequence[Taken]) -> int:
    return sum(one.stop - one.start for one in taken)
