"""The pieces of a block of prompts: which rows of the block are which tokens of which prompt.

Made once for a block, and given to prompt_topk in every layer that the block goes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from protocol.errors import BadInput

#: Tokens of a job of kernels/cuda/src/prompt_index.cuh.
GROUP: Final = 8


class PromptPiece(NamedTuple):
    """Rows `row`.. of a block: `tokens` tokens of the prompt in `seat`, from position `start` on."""

    row: int
    tokens: int
    seat: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True, eq=False)
class PromptPieces:
    """The pieces of a block, and a table of them on the device, in order of their last positions.

    A job is up to GROUP tokens of one piece, from its first one on.
    """

    pieces: tuple[PromptPiece, ...]
    table: Tensor  # int32[pieces, 5]: number of the first job, and the piece (structures.IndexPart)
    jobs: int

    @classmethod
    def of(cls, pieces: Sequence[PromptPiece], device: torch.device | str = "cpu") -> PromptPieces:
        """Copy a table of `pieces` to `device`; never waits for it. Raises BadInput for a piece without tokens."""
        rows, jobs, device = [], 0, torch.device(device)
        ordered = tuple(sorted(pieces, key=lambda piece: piece.stop))
        for piece in ordered:
            if piece.tokens < 1:
                raise BadInput("holds no token", field="pieces", value=piece, remedy="leave empty pieces out")
            rows.append((jobs, *piece))
            jobs += -(-piece.tokens // GROUP)
        table = torch.tensor(rows, dtype=torch.int32).view(-1, 5)
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        return cls(ordered, table, jobs)

    @property
    def positions(self) -> int:
        """Positions of the longest context."""
        return max((piece.stop for piece in self.pieces), default=0)
