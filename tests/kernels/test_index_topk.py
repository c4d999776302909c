"""index_topk against a sort of plain Python numbers: exact, ties to the lowest position, alone in its row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.index_topk import index_topk
from kernels.reference.index_topk import index_scores, top_positions
from kernels.row_format import RowFormat
from kernels.state import Tripwire
from protocol.errors import BadInput
from tests.support.kernel_rig import Rig

HEADS, DIM, SCALE = 2, 4, 0.5


def naive_top(scores: list[float], k: int) -> list[int]:
    """By score, NaN below everything, then by position."""
    nan = [math.isnan(score) for score in scores]
    ranked = sorted(range(len(scores)), key=lambda t: (nan[t], 0.0 if nan[t] else -scores[t], t))
    return sorted(ranked[:k])


@settings(max_examples=300)
@given(
    scores=st.lists(
        st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan]), st.floats(width=32)),
        min_size=1,
        max_size=60,
    ),
    k=st.integers(1, 40),
)
def test_top_positions_equal_a_sort_with_ties_to_the_lowest(scores: list[float], k: int) -> None:
    assert top_positions(torch.tensor(scores), k).tolist() == naive_top(scores, k)


def rig_with_keys(lengths: list[int], kind: str = "float32", k: int = 7, seed: int = 0) -> tuple[Rig, torch.Tensor]:
    """Requests whose index keys are small integers, so that sums are exact and ties abound. Returns keys by seat.

    Largest magnitudes of fp8 keys are powers of two times 448, so that their scales are too.
    """
    form = RowFormat(kind, DIM, 0, DIM)
    rig = Rig(groups=(0, 1), index_row_bytes=form.row_bytes, topk=k, batch=4, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-2, 3, (3, 200, DIM), generator=generator).float()
    if kind == "fp8":
        keys[..., 0] = 448 * 2.0 ** torch.randint(-1, 2, (3, 200), generator=generator)
    for seat, length in enumerate(lengths):
        rig.open(seat, length, 0)
        for position in range(length):
            row = rig.requests[seat].pages[position // 64][0] * 64 + position % 64
            rig.state.index_keys[1, row] = form.encode(keys[seat, position])
        rig.batch.seats[seat], rig.batch.lengths[seat] = seat, length
    rig.batch.seats[len(lengths) :], rig.batch.lengths[len(lengths) :] = 0, 50
    rig.batch.num_real.fill_(len(lengths))
    return rig, keys


def queries_for(seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randint(-2, 3, (4, HEADS, DIM), generator=generator).to(dtype)
    return queries, torch.randint(-1, 3, (4, HEADS), generator=generator).float()


def naive_scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> list[float]:
    per_head = [
        [max(0.0, sum(a * b for a, b in zip(q, key, strict=True)) * SCALE) for q in queries.tolist()]
        for key in keys.tolist()
    ]
    return [sum(w * score for w, score in zip(weights.tolist(), heads, strict=True)) for heads in per_head]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 190), min_size=1, max_size=3),
    kinds=st.sampled_from([("float32", "float32"), ("bfloat16", "bfloat16"), ("fp8", "float32")]),
    k=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
def test_rows_equal_a_naive_sort(lengths: list[int], kinds: tuple[str, str], k: int, seed: int) -> None:
    rig, keys = rig_with_keys(lengths, kinds[0], k, seed)
    queries, weights = queries_for(seed, getattr(torch, kinds[1]))
    out = torch.full((4, k), 99, dtype=torch.int32)
    index_topk(rig.state, 1, queries, weights, rig.batch, SCALE, out)
    for row, length in enumerate(lengths):
        want = naive_top(naive_scores(queries[row], weights[row], keys[row, :length]), k)
        assert out[row].tolist() == want + [-1] * (k - len(want))
    assert (out[len(lengths) :] == -1).all(), "I6"


def test_row_does_not_depend_on_neighbours_or_place() -> None:
    """Bit for bit: alone in the batch, or last of three with other queries around it."""
    rig, _ = rig_with_keys([150, 90, 170])
    rig.state.index_keys.view(torch.float32).normal_()
    queries, weights = torch.randn(4, HEADS, DIM), torch.rand(4, HEADS)
    together, alone = torch.empty(4, 7, dtype=torch.int32), torch.empty(4, 7, dtype=torch.int32)
    index_topk(rig.state, 1, queries, weights, rig.batch, SCALE, together)
    rig.batch.seats[0], rig.batch.lengths[0] = 2, 170
    rig.batch.num_real.fill_(1)
    index_topk(
        rig.state, 1, queries.roll(-2, 0).contiguous(), weights.roll(-2, 0).contiguous(), rig.batch, SCALE, alone
    )
    assert together[2].tolist() == alone[0].tolist()
    assert (alone[1:] == -1).all()


def test_scores_follow_the_formula_of_the_model_library() -> None:
    """relu(q.k * scale) summed over heads with their weights, in fp32, from bfloat16 keys too."""
    queries, keys, weights = torch.randn(3, 8).bfloat16(), torch.randn(50, 8).bfloat16(), torch.randn(3)
    per_head = torch.relu(torch.einsum("hd,td->ht", queries.double(), keys.double()) * 0.3)
    wanted = torch.einsum("h,ht->t", weights.double(), per_head)
    assert torch.allclose(index_scores(queries, weights, keys, 0.3).double(), wanted, atol=1e-5)


def test_fp8_keys_are_scaled_values() -> None:
    """132 bytes a key, whichever dtype the queries have; the choice is by what was stored, not by what was meant."""
    form = RowFormat("fp8", 128, 0, 128)
    rig = Rig(groups=(0,), index_row_bytes=form.row_bytes, topk=20, batch=1)
    request = rig.open(0, 150, 0)
    keys = torch.randn(150, 128, generator=torch.Generator().manual_seed(5))
    stored = form.encode(keys)
    for position in range(150):
        rig.state.index_keys[0, request.pages[position // 64][0] * 64 + position % 64] = stored[position]
    rig.batch.seats[0], rig.batch.lengths[0] = 0, 150
    rig.batch.num_real.fill_(1)
    values = stored[:, :128].view(torch.float8_e4m3fn).double() * stored[:, 128:].view(torch.float32).double()
    for dtype in (torch.float32, torch.bfloat16):
        queries, weights = (
            torch.randn(1, 3, 128, generator=torch.Generator().manual_seed(6)).to(dtype),
            torch.ones(1, 3),
        )
        out = torch.empty(1, 20, dtype=torch.int32)
        index_topk(rig.state, 0, queries, weights, rig.batch, 1.0, out)
        scores = torch.relu(queries[0].double() @ values.t()).sum(0)
        assert out[0].tolist() == naive_top(scores.tolist(), 20)


def test_partly_granted_context_trips() -> None:
    rig, _ = rig_with_keys([150])
    queries, weights = queries_for(1)
    out = torch.zeros(4, 7, dtype=torch.int32)
    rig.state.index_table[0, 1] = -1
    index_topk(rig.state, 1, queries, weights, rig.batch, SCALE, out)
    rig.batch.lengths[0] = 64 * 16 + 1
    index_topk(rig.state, 1, queries, weights, rig.batch, SCALE, out)
    assert (out == -1).all()
    assert rig.state.tripwires[Tripwire.UNGRANTED] == 2


def test_unfit_queries_are_named() -> None:
    rig, _ = rig_with_keys([10])
    queries, weights = queries_for(1)
    out = torch.zeros(4, 7, dtype=torch.int32)
    with pytest.raises(BadInput, match=r"queries=bfloat16\[..., 4\]: index keys of 16 bytes hold 4 values in no"):
        index_topk(rig.state, 1, queries.bfloat16(), weights, rig.batch, SCALE, out)
    with pytest.raises(BadInput, match="queries=float16"):
        index_topk(rig.state, 1, queries.half(), weights, rig.batch, SCALE, out)
    with pytest.raises(BadInput, match="scale=0"):
        index_topk(rig.state, 1, queries, weights, rig.batch, 0.0, out)
    with pytest.raises(BadInput, match="weights=float32"):
        index_topk(rig.state, 1, queries, weights[:3], rig.batch, SCALE, out)
