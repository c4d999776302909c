"""Whether a computation over the rows of a batch keeps them apart, bit for bit. Checked, since it cannot be known.

Matrix libraries choose kernels by shape, processor and alignment; some add in another order in the last rows of a
block. At a fixed shape the order within one row either depends on the row's place or does not, and with random values
a different order shows in some of thousands of outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from coordinator.errors import ConfigError

#: Random permutations, each with half of the neighbours replaced.
TRIALS: Final = 8


def require_rows_apart(compute: Callable[[Tensor], Tensor], random_rows: Callable[[], Tensor]) -> None:
    """`compute` maps [B, ...] to [B, n]. Raises ConfigError unless each row's output is the same in any company."""
    if not rows_apart(compute, random_rows):
        raise ConfigError(
            "this machine's kernels let a row's result depend on its place in the batch",
            field="worker.deterministic",
            value=True,
            remedy="set worker.threads = 1, change worker.seats or worker.dtype, or run without it",
        )


def rows_apart(compute: Callable[[Tensor], Tensor], random_rows: Callable[[], Tensor]) -> bool:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        rows = random_rows()
        expected = compute(rows)
        return all(_same(compute, rows, expected, random_rows()) for _ in range(TRIALS))


def _same(compute: Callable[[Tensor], Tensor], rows: Tensor, expected: Tensor, strangers: Tensor) -> bool:
    order = torch.randperm(len(rows), device=rows.device)
    kept = torch.rand(len(rows), device=rows.device) < 0.5
    mixed = torch.where(kept.view(-1, *[1] * (rows.dim() - 1)), rows[order], strangers)
    return torch.equal(compute(mixed)[kept], expected[order][kept])
