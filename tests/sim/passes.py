"""Prompt passes of simulated workers: composed by the real worker.loop.prompt_order, left between any two units."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from protocol.units import pages_for
from tests.sim.trace import Violation
from worker.device.passes import NOT_SPLIT, PASSES_MAX, PassPlace, PassUnit
from worker.group.agreement import Round
from worker.loop.prompt_order import PromptOrder, Taken, WaitingPrompt

#: Of the simulated model.
LAYERS: Final = 2
#: Tokens of a pass at most, of which a worker draws one, and rows of a unit.
PASS_TOKENS: Final = (16, 48)
BLOCK_TOKENS: Final = 8
#: Of a pass that the ranks of a group split, at least.
SPLIT_TOKENS: Final = 10


class Prompt(Protocol):
    """A placement, as passes see it."""

    prompt: Sequence[int]
    prefilled: int
    since: float

    @property
    def placement(self) -> int: ...
    @property
    def owner(self) -> str: ...


P = TypeVar("P", bound=Prompt)


@dataclass(eq=False)
class SimPass(Generic[P]):
    """`parts`: placements and the tokens that the pass takes of each. `left_tokens`: what they had left before. `lent`:
    pages for another rank's pass that this one splits with it."""

    place: PassPlace
    parts: list[tuple[P, int, int]]
    left_tokens: list[int]
    preempting: int = 0
    lent: int = 0


@dataclass(eq=False)
class SimPrompts(Generic[P]):
    """Prompts of one worker. `page_tokens` is the size of pages, behind which prompts are cut; the slab has
    `slab_pages`."""

    rng: random.Random
    clock: Callable[[], float]
    page_tokens: int
    slab_pages: int
    prompts: list[P] = field(default_factory=list)
    open: list[SimPass[P]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._order = PromptOrder(unit_tokens=self.page_tokens)
        self.tokens = self.rng.choice(PASS_TOKENS)

    def add(self, run: P) -> None:
        self.prompts.append(run)

    def leave(self, run: P) -> None:
        if run in self.prompts:
            self.prompts.remove(run)
        for opened in self.open:
            opened.parts = [part for part in opened.parts if part[0] is not run]

    @property
    def has_work(self) -> bool:
        return any(opened.parts for opened in self.open) or bool(self._eligible())

    def block(self) -> int:
        """Rows of the next unit at most."""
        return self.rng.randint(1, BLOCK_TOKENS)

    # ---------------------------------------------------------------- one worker

    def next(self) -> PassUnit | None:
        """The unit to run next; None: no prompt waits."""
        while self.open and not self.open[-1].parts:
            self.open.pop()
        if not self.open:
            self._begin(self._compose(self.tokens))
        elif len(self.open) < PASSES_MAX:
            self._begin(self._preempting(self.tokens))
        return self.open[-1].place.unit(self.block()) if self.open else None

    # ---------------------------------------------------------------- a rank of a group

    def wished(self) -> tuple[int, int, int]:
        """Tokens for the next pass, and for one that preempts the open one; pages that those take, or that this rank
        lends."""
        taken = self._compose(self.tokens, behind_open=True)
        urgent = self._preempting(self.tokens) if len(self.open) == 1 else []
        lent = self._free_pages() + sum(opened.lent for opened in self.open)
        return _tokens(taken), _tokens(urgent), sum(pages_for(it.stop) for it in taken) or lent

    def begin(self, this: Round, rank: int, ranks: int) -> None:
        """A pass of the group opens, on one of its ranks."""
        place = PassPlace(0, this.pass_rows, LAYERS, owner=this.owner)
        if this.owner not in (NOT_SPLIT, rank):
            if self.open or self._free_pages() < this.pages:
                raise Violation("prompts", f"lends {this.pages} slab pages and has {self._free_pages()}")
            self.open.append(SimPass(place, [], [], lent=this.pages))
            return
        is_split = this.owner == rank
        limit = min(this.pass_rows * (ranks if is_split else 1), self.tokens)
        taken = self._preempting(limit) if self.open else self._compose(limit, this.pages if is_split else None)
        if not self._begin(taken, place):
            self.open.append(SimPass(place, [], []))

    # ---------------------------------------------------------------- both

    def launched(self, unit: PassUnit) -> tuple[list[tuple[P, int, int]], bool]:
        """`unit` is launched: placements in its pass, and whether the pass is over with it."""
        opened = self.open[-1]
        opened.place.launched(unit)
        if not opened.place.is_over:
            return opened.parts, False
        self.open.pop()
        for run, start, stop in opened.parts:
            if run.prefilled != start:
                raise Violation("prompts", f"a pass goes on at {start}, placement {run.placement} at {run.prefilled}")
            run.prefilled = stop
            if stop == len(run.prompt):
                self.prompts.remove(run)
        return opened.parts, True

    def _eligible(self, *, behind_open: bool = False) -> list[WaitingPrompt]:
        stops = {run.placement: stop for opened in self.open for run, _, stop in opened.parts}
        found = []
        for run in self.prompts:
            start, count = stops.get(run.placement, run.prefilled), len(run.prompt)
            if start < count and (behind_open or run.placement not in stops):
                found.append(WaitingPrompt(run.placement, run.owner, start, count, self.clock() - run.since))
        return found

    def _compose(self, tokens: int, pages_max: int | None = None, *, behind_open: bool = False) -> list[Taken]:
        pages = self.slab_pages if behind_open else self._free_pages()
        pages = pages if pages_max is None else min(pages, pages_max)
        return self._order.compose(self._eligible(behind_open=behind_open), tokens, pages)

    def _free_pages(self) -> int:
        """Pages of the slab that open passes leave."""
        held = sum(pages_for(stop) for opened in self.open for _, _, stop in opened.parts)
        return self.slab_pages - held - sum(opened.lent for opened in self.open)

    def _preempting(self, tokens: int) -> list[Taken]:
        opened = self.open[-1]
        left = opened.left_tokens or [self.tokens]
        tokens = min(tokens, opened.place.rows - opened.preempting)
        return self._order.preempting(self._eligible(), left, opened.place.rows_left, tokens, self._free_pages())

    def _begin(self, taken: Sequence[Taken], place: PassPlace | None = None) -> bool:
        if not taken:
            return False
        runs = {run.placement: run for run in self.prompts}
        parts = [(runs[it.prompt], it.start, it.stop) for it in taken]
        if self.open:
            self.open[-1].preempting += _tokens(taken)
        left = [len(run.prompt) - run.prefilled for run, _, _ in parts]
        self.open.append(SimPass(place or PassPlace(0, _tokens(taken), LAYERS), parts, left))
        if self._free_pages() < 0:
            raise Violation("prompts", f"open passes need {-self._free_pages()} slab pages more than there are")
        for run, start, stop in parts:
            self._order.took(run.owner, stop - start)
        return True


def _tokens(taken: Sequence[Taken]) -> int:
    return sum(it.stop - it.start for it in taken)
