"""A second subset for compute-sanitizer, as tests/gpu/memcheck.py: attention and index selection at Hopper's shapes.

What is written for Hopper's matrix products and clusters, for which tests/gpu/memcheck.py is too small: rows and
index keys in bfloat16, fp8 and fp4, heads that fill a block and that do not, one pair of blocks per result and clusters
of four, six and sixteen, rows without an entry, stages used again, levels that are raised again and again, selections
of a step and of a prompt. Results are compared with the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from kernels.cuda.attention import HOPPER_BLOCKS, HOPPER_KINDS, attend_rows
from kernels.cuda.index_topk import WGMMA_HEADS
from tests.gpu.index_bench import IndexBench
from tests.gpu.memcheck import walk
from tests.support.attention_rig import Case

BOUND = 2.0**-7
#: Where scores are ten times as far apart: so is what rounding fp8 values to bfloat16 makes of them.
SHARP_BOUND = 2.0**-4


#: Of attention: heads, entries, splits, and whether there are sinks. Stages hold four blocks of 64 entries for 64
#: heads, three for more. Where they are used again, racecheck has not ended within 250 s: `short` shapes fit in them.
SHAPES: Final = {
    "one-split": ((64, 333, 1, True), (64, 1, 1, True)),
    "72-heads": ((72, 200, 2, True),),
    "three-splits": ((64, 322, 3, True),),
    "eight-splits": ((64, 512, 8, True),),
    "128-heads": ((128, 300, 1, False),),
    "short": ((64, 250, 1, True), (64, 1, 1, True)),
    "short-128-heads": ((128, 190, 1, False),),
}


def attention(kind: str, shapes: Sequence[tuple[int, int, int, bool]]) -> None:
    """Compare two results of each shape. One of them has no entry."""
    for heads, k, splits, sinks in shapes:
        check(case_of(kind, heads=heads, k=k, batch=2, sinks=sinks), splits, BOUND)


def rising(kind: str) -> None:
    """Levels are raised in every block of entries."""
    case = case_of(kind, heads=64, k=333, batch=1)
    case.queries *= 10
    case.sort_entries(0, 5, falling=False)
    check(case, 1, SHARP_BOUND)


def case_of(kind: str, **shape: Any) -> Case:
    return Case(kind, torch.bfloat16, latent=512, rope=64, stored=2000, device="cuda", **shape)


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


def indexes(kind: str, heads: int) -> None:
    """Contexts within one span of selection and, of 64 heads, over several, with and without padding."""
    IndexBench([700, 3, 64, 65, 200], kind=kind, heads=heads, dim=128, k=64, padding=2).check()
    if heads == 64:
        IndexBench([20_000, 300], kind=kind, heads=heads, dim=128, k=100).check()


def prompts(kind: str, heads: int) -> None:
    """Eight tokens of a prompt, behind 5,000 others, that several blocks share."""
    from tests.gpu import test_prompt_index as prompt  # which without a GPU cannot be imported

    prompt.test_each_token_selects_a_stable_top_k(prompt.FORMS[kind], heads, "one job")


PARTS: Final[Mapping[str, Callable[[], None]]] = {
    name: part
    for kind in HOPPER_KINDS
    for name, part in {
        **{f"attention-{kind}-{name}": partial(attention, kind, shapes) for name, shapes in SHAPES.items()},
        f"attention-{kind}-rising": partial(rising, kind),
        **{f"indexes-{kind}-{heads}-heads": partial(indexes, kind, heads) for heads in WGMMA_HEADS},
        **{f"prompts-{kind}-{heads}-heads": partial(prompts, kind, heads) for heads in (16, 32, 64)},
    }.items()
}

if __name__ == "__main__":
    walk(PARTS)
