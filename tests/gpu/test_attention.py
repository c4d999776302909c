"""Gather-attention on the GPU: against the definition in float64, and the same bits wherever rows lie."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernels.attention import attend_rows  # noqa: E402
from kernels.cuda.attention import HOPPER_BLOCKS, Blocks, blocks_of, is_wide, prepare_attention  # noqa: E402
from kernels.cuda.attention import attend_rows as cuda_attend_rows  # noqa: E402
from kernels.row_bytes import KINDS  # noqa: E402
from protocol.errors import BadInput  # noqa: E402
from tests.support.attention_rig import Case  # noqa: E402

SHAPES = [
    {"latent": 64, "rope": 16, "heads": 4, "k": 50},
    {"latent": 64, "rope": 16, "heads": 3, "k": 1, "batch": 1},
    {"latent": 512, "rope": 64, "heads": 128, "k": 2048, "batch": 2, "stored": 5_000},
    {"latent": 512, "rope": 64, "heads": 64, "k": 100, "batch": 70},
    {"latent": 512, "rope": 64, "heads": 72, "k": 333},
    {"latent": 256, "rope": 32, "heads": 20, "k": 300},
    {"latent": 128, "rope": 32, "heads": 32, "k": 2048, "batch": 5, "stored": 5_000},
]
#: Largest error, in units of the largest latent of order 4: float32 sums, and bfloat16 shares and results.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


def case_of(kind: str, dtype: torch.dtype, *, sinks: bool = False, **shape: int) -> Case:
    """Skips rows in fp4 that no kernel reads."""
    case = Case(kind, dtype, device="cuda", sinks=sinks, **shape)
    if kind == "fp4":
        try:
            prepare_attention(case.state, 64, case.form, dtype, sinks)
        except BadInput:
            pytest.skip("no kernel reads such rows")
    return case


def run(case: Case, splits: int | None = None, blocks: Blocks | None = None) -> torch.Tensor:
    case.out.fill_(float("nan"))
    arguments = (case.state, 1, case.queries, case.out_rows, case.scaling, case.out, case.sinks)
    if splits is None and blocks is None:
        attend_rows(*arguments)
    else:
        cuda_attend_rows(*arguments, splits=splits, blocks=blocks)
    return case.out


def cuts(case: Case) -> set[Blocks]:
    """How programs are cut for such a case at few and at many batch rows: Triton's, and on Hopper our own."""
    heads, wide = case.queries.shape[1], is_wide(case.form, case.queries.dtype)
    capability = torch.cuda.get_device_capability()
    return {blocks_of(case.form, batch, heads, wide, capability) for batch in (1, 1024)}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape['heads']}x{shape['latent']}x{shape['k']}")
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_of_the_definition(kind: str, dtype: torch.dtype, shape: dict[str, int], sinks: bool) -> None:
    if dtype == torch.float32 and shape["latent"] == 512 and (kind, shape["k"]) != ("float32", 100):
        pytest.skip("float32 products of 512 values compile for half a minute; one of them says enough")
    case = case_of(kind, dtype, sinks=sinks, **shape)
    expected = case.expected(1)
    for blocks in cuts(case):
        for splits in (None, 1, 2, 7):
            out = run(case, splits, blocks).double().cpu()
            torch.testing.assert_close(out, expected, rtol=BOUND[dtype], atol=BOUND[dtype])


@pytest.mark.parametrize("heads", [4, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_sinks_of_nothing_leave_every_bit_and_high_ones_leave_nothing(kind: str, heads: int) -> None:
    case = case_of(kind, torch.bfloat16, latent=512, rope=64, heads=heads, k=333)
    for blocks in cuts(case):
        for splits in (1, 3):
            case.sinks = None
            without = run(case, splits, blocks).clone()
            case.sinks = torch.full((heads,), -torch.inf, device="cuda")
            case.sinks[1::2] = 1e4
            out = run(case, splits, blocks)
            assert torch.equal(out[:, ::2], without[:, ::2])
            assert not out[:, 1::2].any()


@pytest.mark.parametrize("kind", KINDS)
def test_sharp_attention_over_far_scores_is_exact_too(kind: str) -> None:
    """Scores of order 1000: running maxima move, and most shares underflow."""
    case = case_of(kind, torch.float32, k=200)
    case.queries *= 300
    torch.testing.assert_close(run(case, 3).double().cpu(), case.expected(1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("heads", [64, 128])
def test_maxima_move_in_every_block(heads: int, splits: int, falling: bool) -> None:
    """Entries in the order of one head's scores, which are far apart: sums are rescaled all the way, or never again."""
    shape = {"heads": heads, "k": 700, "batch": 2, "stored": 5000}
    case = Case("bfloat16", torch.bfloat16, device="cuda", latent=512, rope=64, **shape)
    case.queries *= 30
    case.sort_entries(0, 5, falling=falling)
    for blocks in cuts(case):
        out = run(case, splits, blocks).double().cpu()
        torch.testing.assert_close(out, case.expected(1), rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own", [False, True])
def test_attention_ignores_places_neighbours_and_graphs(kind: str, dtype: torch.dtype, own: bool) -> None:
    """`own`: in our own kernel for Hopper, however few the rows."""
    latent = 64 if dtype == torch.float32 else 512
    shape = {"latent": latent, "rope": 64, "heads": 64, "k": 512, "batch": 5, "stored": 3_000}
    case = case_of(kind, dtype, **shape)
    blocks = HOPPER_BLOCKS if own else None
    if own and HOPPER_BLOCKS not in cuts(case):
        pytest.skip("is for Hopper and bfloat16 products")
    before = run(case, blocks=blocks).clone()
    case.relocate(7)
    assert torch.equal(run(case, blocks=blocks), before)
    order = torch.tensor([3, 1, 4, 0, 2], device="cuda")
    case.queries, case.out_rows = case.queries[order].contiguous(), case.out_rows[order].contiguous()
    assert torch.equal(run(case, blocks=blocks), before[order])
    case.queries[1:], case.out_rows[1:] = 0, -1
    assert torch.equal(run(case, blocks=blocks)[0], before[3])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(case, blocks=blocks)
    graph.replay()
    expected = case.out.clone()
    case.relocate(8)
    case.out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(case.out, expected)
    assert torch.equal(case.out[0], before[3])
