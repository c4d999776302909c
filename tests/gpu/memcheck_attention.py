"""A second subset for compute-sanitizer, as tests/gpu/memcheck.py: attention and index selection at Hopper's shapes.

What is written for Hopper's matrix products and clusters, for which tests/gpu/memcheck.py is too small: rows and
index keys in bfloat16, fp8 and fp4, heads that fill a block and that do not, one pair of blocks per result and clusters
of four, six and sixteen, rows without an entry, stages used again, levels that are raised again and again. Results are
compared with the definition.
"""

from __future__ import annotations

from functools import partial

import torch

from kernels.cuda.attention import HOPPER_BLOCKS, HOPPER_KINDS, attend_rows
from tests.gpu.index_bench import IndexBench
from tests.gpu.memcheck import walk
from tests.support.attention_rig import Case

BOUND = 2.0**-7
#: Where scores are ten times as far apart: so is what rounding fp8 values to bfloat16 makes of them.
SHARP_BOUND = 2.0**-4


def attention(kind: str) -> None:
    for heads, k, splits in ((64, 333, 1), (72, 333, 2), (64, 130, 3), (128, 700, 1), (64, 1024, 8), (64, 1, 1)):
        shape = {"latent": 512, "rope": 64, "heads": heads, "k": k, "batch": 3, "stored": 2000}
        case = Case(kind, torch.bfloat16, device="cuda", sinks=True, **shape)
        case.out_rows[1] = -1
        check(case, splits, BOUND)
    rising = Case(kind, torch.bfloat16, heads=64, k=333, batch=1, latent=512, rope=64, stored=2000, device="cuda")
    rising.queries *= 10
    rising.sort_entries(0, 5, falling=False)
    check(rising, 1, SHARP_BOUND)


def check(case: Case, splits: int, bound: float) -> None:
    attend_rows(
        case.state,
        1,
        case.queries,
        case.out_rows,
        case.scaling,
        case.out,
        case.sinks,
        blocks=HOPPER_BLOCKS,
        splits=splits,
    )
    torch.testing.assert_close(case.out.double().cpu(), case.expected(1), rtol=bound, atol=bound)


def indexes(kind: str) -> None:
    """Contexts within one span of selection and over several, with and without padding."""
    IndexBench([700, 3, 64, 65, 200], kind=kind, heads=64, dim=128, k=64, padding=2).check()
    IndexBench([20_000, 300], kind=kind, heads=64, dim=128, k=100).check()


if __name__ == "__main__":
    walk({f"{what.__name__}-{kind}": partial(what, kind) for what in (attention, indexes) for kind in HOPPER_KINDS})
