"""Whether a computation over the rows of a batch keeps them apart, bit for bit. Checked, since it cannot be known.

Matrix libraries choose kernels by shape, processor and alignment; some add in another order in the last rows of a
block, and loops over flat tensors treat the tail of the last row differently. At a fixed shape the order within one row
either depends on the row's place or does not. Where it does, one rounding in some hundred may differ: a tail of eight
values shows in about one trial of eight, hence the number of trials.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from protocol.errors import ConfigError

#: Fresh rows, each time permuted and with half of the neighbours replaced. A few ms each for one layer.
TRIALS: Final = 64


#: Seats that are tried when rows of a worker's are not apart: the next multiples of these.
SEAT_MULTIPLES: Final = (8, 16, 32)


def not_apart(remedies: list[str]) -> ConfigError:
    return ConfigError(
        "this machine's kernels let a row's result depend on its place in the batch",
        field="worker.deterministic",
        value=True,
        remedy=", or ".join([*remedies, "run without it"]),
    )


def remedies(apart: Callable[[int], bool], seats: int, *, uses_threads: bool) -> list[str]:
    """Settings under which rows are apart. Each was tried: `apart` answers for steps of so many seats."""
    found: list[str] = []
    threads = torch.get_num_threads()
    if uses_threads and threads > 1:
        torch.set_num_threads(1)
        found += ["set worker.threads = 1"] * apart(seats)
        torch.set_num_threads(threads)
    more = dict.fromkeys(-(-(seats + 1) // multiple) * multiple for multiple in SEAT_MULTIPLES)
    enough = next((count for count in more if apart(count)), None)
    return found + [f"set worker.seats = {enough}"] * (enough is not None)


def rows_apart(compute: Callable[[Tensor], Tensor], random_rows: Callable[[], Tensor]) -> bool:
    """`compute` maps [B, ...] to [B, n]. Whether each row's output is the same in any company."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return all(_apart_once(compute, random_rows) for _ in range(TRIALS))


def _apart_once(compute: Callable[[Tensor], Tensor], random_rows: Callable[[], Tensor]) -> bool:
    rows, strangers = random_rows(), random_rows()
    order = torch.randperm(len(rows), device=rows.device)
    kept = torch.rand(len(rows), device=rows.device) < 0.5
    mixed = torch.where(kept.view(-1, *[1] * (rows.dim() - 1)), rows[order], strangers)
    return torch.equal(compute(mixed)[kept], compute(rows)[order][kept])
