"""Prompt passes as the host knows them: which rows and layers were launched, and what comes next. Pure.

A *pass* takes up to worker.pass_tokens prompt tokens, of one prompt or of several, through the layers. Its *unit* is
one layer over a block of its rows. Units go layer by layer, and within a layer from row to row, so a pass can be left
between any two of them: decode steps go there, and a pass of shorter prompts.

    rows      0 ......... 4095 | 4096 ......... 8191
    layer 0   unit 1             unit 2
    layer 1   unit 3             (left here: a decode step, another pass) unit 4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from protocol.errors import InternalError

#: Passes that are open at the same time: one, and one that preempts it.
PASSES_MAX: Final = 2


class PassUnit(NamedTuple):
    """One layer over rows first..stop-1 of a pass."""

    layer: int
    first: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.first


@dataclass
class PassPlace:
    """The place of a pass of `rows` in its `layers`: its next unit begins at row `first` of `layer`."""

    number: int
    rows: int
    layers: int
    layer: int = 0
    first: int = 0

    @property
    def is_over(self) -> bool:
        """Tell whether every unit was launched."""
        return self.layer == self.layers

    @property
    def rows_left(self) -> float:
        """Work that is left, in rows that go through all layers."""
        return self.rows * (self.layers - self.layer) / self.layers - self.first / self.layers

    def unit(self, block: int) -> PassUnit:
        """The next unit, of `block` rows at most. InternalError behind the last."""
        if self.is_over:
            raise InternalError("the pass is over", field="pass", value=self.number)
        return PassUnit(self.layer, self.first, min(self.first + block, self.rows))

    def launched(self, unit: PassUnit) -> None:
        """`unit` was launched. InternalError for any but the next."""
        if (unit.layer, unit.first) != (self.layer, self.first) or not unit.first < unit.stop <= self.rows:
            raise InternalError(f"layer {self.layer} goes on at row {self.first}", field="unit", value=unit)
        self.first = unit.stop
        if self.first == self.rows:
            self.layer, self.first = self.layer + 1, 0
