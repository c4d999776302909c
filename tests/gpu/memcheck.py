"""The subset that compute-sanitizer walks through: `compute-sanitizer --tool racecheck python -m tests.gpu.memcheck`.

Every path of every kernel once or twice, at small sizes: clusters of one, two, five and sixteen blocks; hits, misses,
duplicates, padding, resident requests, old stamps, drafts, both directions of copies. Names of PARTS as arguments walk
through these alone: racecheck takes minutes for some.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import numpy as np
import torch

from kernels.cuda import jit
from tests.gpu import run_cases
from tests.gpu.index_bench import IndexBench
from tests.gpu.lives import small
from tests.gpu.scenarios import DRAFT_SIZES, MIXED_SIZES, goes_draft_steps, goes_mixed_steps
from tests.gpu.twin import Twin


def copies() -> None:
    twin = Twin(7, row_bytes=13, index_row_bytes=7)
    places = {
        "device_row": torch.arange(10, 80).repeat(2, 1),
        "index_row": torch.arange(20, 90),
        "host_page": torch.arange(70) % 9,
        "host_offset": torch.arange(70) % 64,
    }
    twin.copy(places, "to_host")
    twin.copy(places, "to_device")


def scores(kind: str, dtype: torch.dtype) -> None:
    """A pair of formats of keys and queries; selection from lists, padding."""
    IndexBench([700, 3, 64, 65, 200], kind=kind, dtype=dtype, heads=12, k=64, padding=2).check()


def selection() -> None:
    """Selection without lists, ties, refusals."""
    crowded = IndexBench([20_000, 300], k=100)
    crowded.state.index_keys.zero_()
    crowded.check()
    crowded.state.index_table.fill_(-1)
    crowded.run()


def scripts(rows: tuple[int, int, int]) -> None:
    """Every operation on rows and seats. `rows`: bytes of a row, where it parts into planes, bytes of an index key."""
    shape = {"groups": (0, 0, 1), "topk": 31, "tail_slots": 3, "seat_rows": 1, "ranks": 2, "ids": np.int64}
    seats = [(300, 3, 64, True), (100, 0, 0, False), (200, 1, 99, False)]
    scripts = (("step", "resize", "copy"), ("prompt", "clear", "reopen"), ("age", "copy", "resize"))
    cases = [{"seed": 43 + number, "seats": seats, "actions": script} for number, script in enumerate(scripts)]
    run_cases.record(small("memcheck", {**shape, "rows": rows}, cases), "cuda")


def mixed_steps(ranks: int) -> None:
    goes_mixed_steps(Twin(ranks, ranks=ranks, **MIXED_SIZES), steps=3)


def draft_steps(ranks: int) -> None:
    goes_draft_steps(Twin(1, ranks=ranks, **DRAFT_SIZES), steps=4)


def walk(parts: Mapping[str, Callable[[], None]]) -> None:
    """Run the parts that the command line names, or all, and print the seconds of each.

    Each lane of a warp arrives at barriers for itself: racecheck does not follow the order behind one lane's arrival,
    and would report what the others have done.
    """
    jit.OPTIONS = (*jit.OPTIONS, "-DWARP_ARRIVALS=32")  # type: ignore[misc]
    for name in sys.argv[1:] or parts:
        began = time.monotonic()
        parts[name]()
        torch.cuda.synchronize()
        print(f"{name}: done in {time.monotonic() - began:.1f} s", flush=True)


KEYS: Final = {"bfloat16": torch.bfloat16, "fp8": torch.bfloat16, "float32": torch.float32}
PARTS: Final[Mapping[str, Callable[[], None]]] = {
    "copies": copies,
    **{f"scores-{kind}": partial(scores, kind, queries) for kind, queries in KEYS.items()},
    "selection": selection,
    "scripts-one-plane": partial(scripts, (24, 0, 132)),
    "scripts-two-planes": partial(scripts, (26, 13, 7)),
    **{f"steps-{ranks}-blocks": partial(mixed_steps, ranks) for ranks in (1, 2, 5, 16)},
    **{f"drafts-{ranks}-blocks": partial(draft_steps, ranks) for ranks in (1, 2, 5, 16)},
}

if __name__ == "__main__":
    walk(PARTS)
