"""Prompts of this worker: which wait, which passes are open, and what is launched of them next.

Passes are a stack of PASSES_MAX: the last one goes on, and the hidden states of one below it stay where they are. A
pass is opened when none is, or when shorter prompts came (prompt_order.py). Its end is that of its parts: more pages of
a prompt on their way to host memory, or the first token of a prompt. A first token whose mask is late is drawn later,
and holds up nothing else.

In a group the rounds say which pass goes on and what opens (worker/group/agreement.py); a rank without prompts for a
pass pads its units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

from worker.loop.batch import RunningRequest
from worker.loop.pace import Pacing
from worker.loop.passes import PassPlace, PassUnit
from worker.loop.prefill import PASSES_MAX, LaunchedPass, Prefill
from worker.loop.prompt_order import PromptOrder, Taken, WaitingPrompt
from worker.loop.swap import Swap
from worker.runners.base import GroupRunner
from worker.streams import Fence, Streams

#: Passes whose hidden states wait for a mask, beside those that are open.
UNDRAWN_MAX: Final = 1
#: Units launched ahead of the one that runs, where nobody decodes.
UNITS_AHEAD: Final = 3


class PassSizes(NamedTuple):
    """What passes of a worker are made of. `layers` of the model; `tokens` of a pass at most."""

    layers: int
    tokens: int


@dataclass(eq=False)
class OpenPass:
    """`launched` is None where this rank only pads. `tokens`: what each of its prompts had left when the pass began;
    `preempting`: tokens of passes that preempted this one."""

    place: PassPlace
    launched: LaunchedPass | None
    tokens: tuple[int, ...] = ()
    preempting: int = 0

    @property
    def own_rows(self) -> int:
        return self.launched.prompts.rows if self.launched is not None else 0

    @property
    def is_left(self) -> bool:
        """Whether nobody waits for the rest of it."""
        return self.launched is None or not self.launched.staying()


class Prompts:
    """Used by the decode loop's thread."""

    def __init__(
        self,
        prefill: Prefill,
        order: PromptOrder,
        pace: Pacing,
        swap: Swap,
        streams: Streams,
        sizes: PassSizes,
        *,
        may_launch: Callable[[RunningRequest], bool],
        clock: Callable[[], float],
        ran: Callable[[int, float], None],
        ended: Callable[[int], None],
    ) -> None:
        """`may_launch`: whether nothing would wait for a prompt's prefix. `ran` is told of units: rows and seconds;
        `ended` of passes: tokens."""
        self._prefill, self._order, self._pace, self._swap, self._streams = prefill, order, pace, swap, streams
        self._sizes = sizes
        self._may_launch, self._clock, self._ran, self._ended = may_launch, clock, ran, ended
        self._prompts: dict[int, RunningRequest] = {}  # by placement, until their last pass ended
        self._open: list[OpenPass] = []
        self._undrawn: list[tuple[LaunchedPass, int]] = []
        self._flying: list[Fence] = []
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

    def waiting(self) -> list[float]:
        """When each prompt that is not whole yet came, by the clock."""
        return [request.since_s for request in self._prompts.values()]

    @property
    def has_work(self) -> bool:
        """Whether a unit could be launched."""
        return any(not it.is_left for it in self._open) or bool(self._eligible())

    @property
    def depth(self) -> int:
        """Open passes."""
        return len(self._open)

    def held(self) -> bool:
        """Whether as many units are launched and have not run as may be ahead where nobody decodes."""
        self._flying = [fence for fence in self._flying if not fence.done()]
        return len(self._flying) >= UNITS_AHEAD

    # ---------------------------------------------------------------- one worker

    def next(self, *, beside_steps: bool) -> PassUnit | None:
        """The unit to launch next, of the pass that goes on or is opened for it; None: no prompt can go on."""
        while self._open and self._open[-1].is_left:
            self._open.pop()
        if not self._open:
            self._begin(self._order.compose(self._eligible(), self._sizes.tokens))
        elif len(self._open) < PASSES_MAX:
            self._begin(self._preempting())
        return self._open[-1].place.unit(self._pace.block(beside_steps=beside_steps)) if self._open else None

    def launch(self, unit: PassUnit) -> list[tuple[LaunchedPass, int]]:
        """Launch `unit`, which `next` gave. Returns the parts whose first token is to be drawn now: with the last
        unit of their pass."""
        return self._launch(self._open[-1], unit, 0)

    def drop(self) -> list[RunningRequest]:
        """Give up the pass that goes on, which failed. Returns its requests."""
        opened = self._open.pop()
        return [] if opened.launched is None else [opened.launched.requests[it] for it in opened.launched.staying()]

    # ---------------------------------------------------------------- a rank of a group

    def wished(self) -> tuple[int, int]:
        """Tokens that this rank would bring to the next pass, and to one that preempts the open one."""
        tokens = self._order.compose(self._eligible(behind_open=True), self._sizes.tokens)
        urgent = self._preempting() if len(self._open) == 1 else []
        return sum(it.stop - it.start for it in tokens), sum(it.stop - it.start for it in urgent)

    def open(self, rows: int) -> None:
        """A pass of `rows` on each rank opens, of what this rank has for it."""
        prompts = self._eligible()
        taken = self._preempting(rows) if self._open else self._order.compose(prompts, min(rows, self._sizes.tokens))
        if not self._begin(taken, rows):
            self._open.append(OpenPass(self._place(rows), None))

    def launch_round(self, runner: GroupRunner, unit: PassUnit) -> list[tuple[LaunchedPass, int]]:
        """As `launch`, for the unit of a round."""
        opened = self._open[-1]
        first, stop = min(unit.first, opened.own_rows), min(unit.stop, opened.own_rows)
        if first < stop:
            return self._launch(opened, unit, unit.rows)
        runner.launch_padding(self._streams, unit.layer, unit.rows)
        opened.place.launched(unit)
        return self._close(opened) if opened.place.is_over else []

    # ---------------------------------------------------------------- passes

    def _eligible(self, *, behind_open: bool = False) -> list[WaitingPrompt]:
        """Prompts that a pass may take now: those of no open pass. `behind_open`: or those that it may take when the
        open passes have ended."""
        now, stops = self._clock(), self._open_stops()
        found = []
        for number, request in self._prompts.items():
            start = stops.get(number, request.prefilled)
            may_take = behind_open if number in stops else self._may_take(request)
            if may_take and start < request.prompt_tokens:
                waited = now - request.since_s
                found.append(WaitingPrompt(number, request.owner, start, request.prompt_tokens, waited))
        return found

    def _may_take(self, request: RunningRequest) -> bool:
        if request.lacks_mask and len({id(this) for this, _ in self._undrawn}) >= UNDRAWN_MAX:
            return False
        return self._may_launch(request)

    def _open_stops(self) -> dict[int, int]:
        """Where the next pass goes on with each prompt of an open one, by placement."""
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
        open_tokens = opened.tokens or (max((it.tokens for it in eligible), default=0) + 1,)
        return self._order.preempting(eligible, open_tokens, left, tokens)

    def _begin(self, taken: Sequence[Taken], rows: int = 0) -> bool:
        """Open a pass of what was `taken`, if anything was."""
        if not taken:
            return False
        requests = [(self._prompts[it.prompt], it.start, it.stop) for it in taken]
        tokens = sum(stop - start for _, start, stop in requests)
        left = tuple(request.prompt_tokens - request.prefilled for request, _, _ in requests)
        if self._open:
            self._open[-1].preempting += tokens
        launched = self._prefill.begin(requests, len(self._open))
        self._open.append(OpenPass(self._place(rows or tokens), launched, left))
        for request, start, stop in requests:
            self._order.took(request.owner, stop - start)
        return True

    def _place(self, rows: int) -> PassPlace:
        self._numbers += 1
        return PassPlace(self._numbers, rows, self._sizes.layers)

    def _launch(self, opened: OpenPass, unit: PassUnit, rows: int) -> list[tuple[LaunchedPass, int]]:
        this = cast(LaunchedPass, opened.launched)
        own = unit._replace(stop=min(unit.stop, opened.own_rows))
        is_timed = not any(request.prefix_loads for request in this.requests)

        def launch() -> None:
            self._prefill.launch(this, own, rows)

        if is_timed:
            self._streams.timed(launch, lambda seconds: self._ran(own.rows, seconds))()
        else:
            launch()
        self._flying.append(self._streams.compute.record("inputs_consumed"))
        opened.place.launched(unit)
        return self._close(opened) if opened.place.is_over else []

    def _close(self, opened: OpenPass) -> list[tuple[LaunchedPass, int]]:
        """Its last unit was launched. Returns the parts whose first token is to be drawn."""
        self._open.remove(opened)
        this, drawn = opened.launched, list[tuple[LaunchedPass, int]]()
        if this is None:
            return []
        self._ended(sum(this.part(number).tokens for number in this.staying()))
        for number in this.staying():
            request, part = this.requests[number], this.part(number)
            request.prefilled = part.stop
            if not part.ends:
                self._prefill.end(this, number)
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
