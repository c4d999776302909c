"""Prompt passes as the host knows them: which rows and layers were launched, and what comes next. Pure.

A *pass* takes up to worker.pass_tokens prompt tokens, of one prompt or of several, through the layers. Its *unit* is
one layer over a block of its rows. Units go layer by layer, and within a layer from row to row, so a pass can be left
between any two of them: decode steps go there, and a pass of shorter prompts.

    rows      0 ......... 4095 | 4096 ......... 8191
    layer 0   unit 1             unit 2
    layer 1   unit 3             (left here: a decode step, another pass) unit 4

A group may *split* a pass of one rank, its owner. A unit of n rows is then n neighbouring rows on each rank, in the
order of ranks; ranks must find their rows again in the next layer, so all units of the pass have the same size but for
the last:

    2 ranks   0 ... 511 | 512 ... 1023 | 1024 ... 1535 | 1536 ... 2047
    layer 0   unit 1, rank 0    rank 1 | unit 2, rank 0         rank 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from protocol.errors import InternalError
from protocol.settings import WorkerSettings

#: Passes that are open at the same time: one, and one that preempts it.
PASSES_MAX: Final = 2
#: Prompts of a pass: each is some launches in every layer.
PARTS_MAX: Final = 128
#: The owner of a pass that is not split.
NOT_SPLIT: Final = -1


def split_tokens(settings: WorkerSettings) -> int:
    """Tokens that a pass has at least for ranks to split it; 0: this worker splits none. Rows of a split pass have the
    bits of other shapes of products, so in deterministic mode none is."""
    return 0 if settings.deterministic or settings.group_size == 1 else settings.split_tokens


class PassUnit(NamedTuple):
    """One layer over rows first..stop-1 of a pass."""

    layer: int
    first: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.first

    def span(self, ranks: int, rows: int) -> PassUnit:
        """Rows of all `ranks` together, in a split pass of `rows`. There may be none."""
        return PassUnit(self.layer, min(self.first * ranks, rows), min(self.stop * ranks, rows))

    def stripe(self, rank: int, ranks: int, rows: int) -> PassUnit:
        """Rows of `rank` among them, of which there may be none."""
        first = self.first * ranks + rank * self.rows
        return PassUnit(self.layer, min(first, rows), min(first + self.rows, rows))


@dataclass
class PassPlace:
    """The place of a pass of `rows` in its `layers`: its next unit begins at row `first` of `layer`. `owner`: the rank
    whose pass the others split with it, each of which has as many rows; its units have `block` rows."""

    number: int
    rows: int
    layers: int
    layer: int = 0
    first: int = 0
    owner: int = NOT_SPLIT
    block: int = 0

    @property
    def is_over(self) -> bool:
        """Tell whether every unit was launched."""
        return self.layer == self.layers

    @property
    def rows_left(self) -> float:
        """Work that is left, in rows that go through all layers."""
        return self.rows * (self.layers - self.layer) / self.layers - self.first / self.layers

    def unit(self, block: int) -> PassUnit:
        """The next unit, of `block` rows at most, or as many as all of a split pass. InternalError behind the last."""
        if self.is_over:
            raise InternalError("the pass is over", field="pass", value=self.number)
        return PassUnit(self.layer, self.first, min(self.first + (self.block or block), self.rows))

    def launched(self, unit: PassUnit) -> None:
        """`unit` was launched. InternalError for any but the next."""
        if (unit.layer, unit.first) != (self.layer, self.first) or not unit.first < unit.stop <= self.rows:
            raise InternalError(f"layer {self.layer} goes on at row {self.first}", field="unit", value=unit)
        self.first = unit.stop
        if self.first == self.rows:
            self.layer, self.first = self.layer + 1, 0
