"""Rows of a decode step by request, rows of a block of prompts, and what follows from them. Pure.

Plain decoding takes one row. With n drafted tokens a step takes 1 + n rows of a request, at consecutive positions: the
first is fed the token that comes next, the others drafts of those behind it. How many of them hold is known once the
step has run, and the host hears it late.

    overshoot       the end of an output may lie in the first row of a step, n rows before that step's last; and as many
                    steps as the lookahead were launched behind it, each of which holds every row at most
    backup steps    begin_step of step m writes row p and, with it, takes row p - T out of the tail of T slots. A step
                    moves a request on by 1 to 1 + n rows, so that row p - T was written last by step m - T // (1 + n)
                    or an earlier one: that step's backup is what step m waits for
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from protocol.byte_sizes import AUTO
from protocol.settings import WorkerSettings
from protocol.units import BLOCK_TOKENS_MAX

#: Tokens of a block in deterministic mode: products of this many rows have the bits that they always had. A CPU takes
#: no larger ones, since its attention expands a block's rows.
DETERMINISTIC_BLOCK_TOKENS: Final = 512


def block_tokens_max(settings: WorkerSettings) -> int:
    """Rows of the largest block of prompts that goes through one layer at once."""
    is_large = settings.device.startswith("cuda") and not settings.deterministic
    return min(settings.pass_tokens, BLOCK_TOKENS_MAX if is_large else DETERMINISTIC_BLOCK_TOKENS)


def rows_max(settings: WorkerSettings) -> int:
    """Rows of the largest block or step: scratch memory and a group's exchange have room for so many."""
    return max(block_tokens_max(settings), StepRows.of(settings).rows * settings.seats)


@dataclass(frozen=True)
class StepRows:
    """`draft_tokens` n: tokens drafted for each step of a request; where `varies`, at most, and memory is for n."""

    draft_tokens: int = 0
    varies: bool = False

    @classmethod
    def of(cls, settings: WorkerSettings) -> StepRows:
        return cls(settings.draft_tokens_max, settings.draft_tokens == AUTO)

    @property
    def choices(self) -> Sequence[int]:
        """Drafts that a step may have, ascending."""
        return range(self.draft_tokens + 1) if self.varies else (self.draft_tokens,)

    @property
    def rows(self) -> int:
        """Of one request in one step, at most."""
        return 1 + self.draft_tokens

    def batch_rows(self, seats: int) -> tuple[int, ...]:
        """Padded rows of the batches that one step of `seats` launches: its own, and one row a seat for drafts behind
        the first."""
        return (self.rows * seats, *[seats] * (self.draft_tokens > 1))

    def overshoot_tokens(self, lookahead_steps: int) -> int:
        """Rows behind the end of an output that launched steps may write."""
        return lookahead_steps * self.rows + self.draft_tokens

    def window_tokens(self, lookahead_steps: int) -> int:
        """Known tokens that a step needs of a request: of its rows and the one behind, wherever it begins."""
        return self.rows + 1 + lookahead_steps * self.draft_tokens

    def backup_steps(self, tail_slots: int) -> int:
        """How many steps back the step lies whose backup a new step waits for; 1 at least, where the tail has room for
        two steps with drafts, or one without. A step that drafts more than one token begins rows of the next one."""
        return tail_slots // self.rows - (self.draft_tokens > 1)
