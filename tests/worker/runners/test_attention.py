"""Row formats and absorbed attention over rows, in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import attend_rows
from kernels.cuda.attention import HOPPER_BLOCKS, Cut, blocks_of, hopper_cut_of, splits_of
from kernels.cuda.triton_units import triton_unit
from kernels.index_topk import index_topk
from kernels.layout import Geometry
from kernels.row_format import (
    FP8_ERROR,
    KINDS,
    hadamard,
    index_key_format,
    index_key_format_of,
    kv_row_format,
    kv_row_format_of,
)
from kernels.state import DeviceState, StepBatch
from protocol.errors import BadInput, ConfigError
from protocol.units import pages_for
from tests.support.attention_rig import Case
from worker.runners import attention
from worker.runners.attention import IndexProjected, select_mask

DTYPES = (torch.float32, torch.bfloat16)


def run(case: Case, layer: int = 1) -> torch.Tensor:
    attend_rows(case.state, layer, case.queries, case.out_rows, case.scaling, case.out)
    return case.out


# ---------------------------------------------------------------- formats


def test_sizes_are_those_of_the_model_families() -> None:
    assert [kv_row_format(kind, 512, 64).row_bytes for kind in KINDS] == [2304, 1152, 656, 352]
    assert [index_key_format(kind, 128).row_bytes for kind in KINDS] == [512, 256, 132, 68]
    assert [kv_row_format(kind, 128, 32).row_bytes for kind in KINDS] == [640, 320, 128 + 4 + 64, 64 + 8 + 32]
    assert kv_row_format("fp8", 64, 16).row_bytes == 64 + 4 + 32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (128, 32), (64, 16), (256, 2)])
def test_a_format_is_known_by_its_bytes(kind: str, latent: int, rope: int) -> None:
    assert kv_row_format_of(kv_row_format(kind, latent, rope).row_bytes, latent, rope) == kv_row_format(
        kind, latent, rope
    )
    assert index_key_format_of(index_key_format(kind, 64).row_bytes, 64) == index_key_format(kind, 64)


def test_fp8_bytes_match_the_table() -> None:
    values = torch.zeros(1, 576)
    values[0, 128], values[0, 200], values[0, 512] = 448.0, -2.0, 3.0
    (row,) = kv_row_format("fp8", 512, 64).encode(values)
    assert row[:512].view(torch.float8_e4m3fn).float().nonzero().flatten().tolist() == [128, 200]
    assert row[512:528].view(torch.float32).tolist() == [1, 1, 1, 1]  # a group of zeros has a scale too
    assert row[528:].view(torch.bfloat16).tolist() == [3.0] + [0.0] * 63
    values[0, 128] = 896.0
    assert kv_row_format("fp8", 512, 64).encode(values)[0, 512:528].view(torch.float32).tolist() == [1, 2, 1, 1]


@given(st.integers(0, 2**32), st.sampled_from([(512, 64), (64, 16), (128, 0)]), st.floats(-30, 30))
@settings(max_examples=40)
def test_fp8_error_is_within_its_bound(seed: int, shape: tuple[int, int], magnitude: float) -> None:
    latent, rope = shape
    form = kv_row_format("fp8", latent, rope)
    values = torch.randn(5, latent + rope, generator=torch.Generator().manual_seed(seed)) * 2.0**magnitude
    back = form.decode(form.encode(values))
    scale = values[:, :latent].unflatten(1, (-1, form.group)).abs().amax(2).repeat_interleave(form.group, 1) / 448
    error = (back - values)[:, :latent].abs()
    assert (error <= torch.maximum(values[:, :latent].abs() * FP8_ERROR, scale * 2.0**-10) * 1.0001).all()
    assert torch.equal(back[:, latent:], values[:, latent:].bfloat16().float())
    assert torch.equal(form.encode(back), form.encode(form.decode(form.encode(back))))


@pytest.mark.parametrize("kind", KINDS)
def test_row_is_encoded_alone_and_keeps_nan(kind: str) -> None:
    form, values = kv_row_format(kind, 128, 4), torch.randn(6, 132)
    values[2, 7] = float("nan")
    rows = form.encode(values)
    assert all(torch.equal(rows[i], form.encode(values[i : i + 1])[0]) for i in range(6))
    decoded = form.decode(rows)
    assert decoded[2, 7].isnan()
    assert decoded[[0, 1, 3, 4, 5]].isfinite().all()
    assert form.decode(rows, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_plain_formats_carry_their_own_dtype_unchanged(kind: str) -> None:
    values = torch.randn(3, 20).to(getattr(torch, kind))
    form = kv_row_format(kind, 16, 4)
    assert torch.equal(form.encode(values), values.view(torch.uint8))
    assert torch.equal(form.decode(form.encode(values), values.dtype), values)


def test_unfit_dimensions_are_refused() -> None:
    for latent, rope in ((192, 64), (62, 2), (64, 3)):
        with pytest.raises(ConfigError, match=r"worker\.kv_dtype"):
            kv_row_format("fp8", latent, rope)
        assert kv_row_format("bfloat16", latent, rope)
    with pytest.raises(ConfigError, match="index_head_dim 96"):
        index_key_format("fp8", 96)
    with pytest.raises(ConfigError, match="unknown row format"):
        kv_row_format("int4", 64, 16)
    with pytest.raises(BadInput, match="657"):
        kv_row_format_of(657, 512, 64)


@pytest.mark.parametrize("dim", [1, 32, 128])
def test_rotation_keeps_products_and_spreads_outliers(dim: int) -> None:
    matrix = hadamard(dim, torch.float64, "cpu")
    torch.testing.assert_close(matrix @ matrix, torch.eye(dim, dtype=torch.float64))
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close((matrix[0] * 5 @ matrix).abs().sum(), torch.tensor(5.0, dtype=torch.float64))


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("latent", "rope", "heads"), [(64, 16, 4), (128, 32, 32), (512, 64, 3)])
def test_attention_is_that_of_the_definition(kind: str, dtype: torch.dtype, latent: int, rope: int, heads: int) -> None:
    case = Case(kind, dtype, latent=latent, rope=rope, heads=heads)
    bound = 1e-5 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(run(case).double(), case.expected(1), rtol=bound, atol=bound)


def test_empty_row_list_gives_zeros() -> None:
    case = Case("float32", torch.float32)
    assert case.state.rows[1].view(torch.float32).isnan().any()
    assert torch.equal(run(case)[-1], torch.zeros_like(case.out[-1]))


@given(st.integers(0, 2**32), st.sampled_from(KINDS))
@settings(max_examples=20)
def test_result_does_not_depend_on_row_places(seed: int, kind: str) -> None:
    case = Case(kind, torch.float32, seed=seed)
    before = run(case).clone()
    case.relocate(seed)
    assert torch.equal(run(case), before)


def test_splits_fill_a_card_and_depend_only_on_shapes() -> None:
    """132 multiprocessors, 32 blocks of rows: one program each, never a second round for a remainder."""
    assert [splits_of(programs, 32, 132) for programs in (2, 32, 66, 128, 132, 1024)] == [32, 4, 2, 1, 1, 1]
    assert splits_of(1, 1, 132) == 1


def test_hopper_kernel_is_chosen_for_its_shapes_only() -> None:
    """Many blocks of heads, 512 + 64 values, bfloat16 products, compute capability 9.0."""

    def is_chosen(latent: int = 512, batch: int = 64, heads: int = 128, wide: bool = False, major: int = 9) -> bool:
        rows = kv_row_format("fp8", latent, 64)
        return blocks_of(rows, batch, heads, wide, (major, 0)) == HOPPER_BLOCKS

    assert is_chosen()
    assert is_chosen(batch=4)
    assert not any((is_chosen(latent=256), is_chosen(batch=3), is_chosen(heads=16)))
    assert not any((is_chosen(wide=True), is_chosen(major=10)))


def test_a_missing_triton_is_named() -> None:
    with pytest.raises(ConfigError, match="CUDA wheel"):
        triton_unit("no_such_unit")


def test_arguments_are_checked_before_anything_is_written() -> None:
    case = Case("bfloat16", torch.float32)
    arguments = {
        "queries": case.queries.double(),
        "out_rows": case.out_rows.long(),
        "out": case.out.bfloat16(),
    }
    for name, wrong in arguments.items():
        given = {"queries": case.queries, "out_rows": case.out_rows, "out": case.out} | {name: wrong}
        with pytest.raises(BadInput, match=name):
            attend_rows(case.state, 0, given["queries"], given["out_rows"], 1.0, given["out"])
    with pytest.raises(BadInput, match="layer"):
        attend_rows(case.state, 2, case.queries, case.out_rows, 1.0, case.out)
    with pytest.raises(BadInput, match="row_bytes"):
        attend_rows(case.state, 0, case.queries[..., :70].contiguous(), case.out_rows, 1.0, case.out)
    assert case.out.isnan().all()


class FakeKernel:
    """As many clusters at once as one H200 holds."""

    def clusters_at_once(self, cluster: int, _shared_bytes: int) -> int:
        held = {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15, 9: 9}
        return held.get(cluster, 7)


def test_split_choices_match_the_fastest_on_an_h200() -> None:
    """128 and 64 heads over 2,048 entries."""
    kernel: Any = FakeKernel()
    batches = (8, 16, 24, 32, 40, 64, 77, 108)
    many = [hopper_cut_of(kernel, 128, batch, 32) for batch in batches]
    assert many[:4] == [Cut(64, 3), Cut(128, 3), Cut(64, 1), Cut(64, 1)]
    assert many[4:] == [Cut(128, 1), Cut(128, 1), Cut(64, 1), Cut(128, 1)]
    few = [hopper_cut_of(kernel, 64, batch, 32) for batch in (16, 32, 48, 77, 108)]
    assert few == [Cut(64, 3), Cut(64, 1), Cut(64, 1), Cut(64, 2), Cut(64, 1)]


# ---------------------------------------------------------------- selection


@given(
    st.integers(0, 2**32),
    st.integers(0, 140),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 24),
    st.sampled_from([None, torch.nan, torch.inf, -torch.inf]),
    st.sampled_from([1, 150, 100_000]),
)
@settings(max_examples=150, deadline=None)
def test_prompt_tokens_select_as_decode_steps_do(
    seed: int, start: int, tokens: int, heads: int, topk: int, odd: float | None, floats: int
) -> None:
    """Also where scores are equal, as those of small whole numbers often are: positions then decide, not torch.topk."""
    draw, stop, dim = torch.Generator().manual_seed(seed), start + tokens, 4
    keys, queries, weights = (
        torch.randint(-1, 2, shape, generator=draw).float()
        for shape in ((stop, dim), (1, tokens, heads, dim), (1, tokens, heads))
    )
    if odd is not None:
        keys[torch.rand(stop, dim, generator=draw) < 0.1] = odd
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SCORE_FLOATS_MAX", floats)
        mask = select_mask(IndexProjected(queries, keys[None, start:], weights), keys, start, topk, 0.5)
    geometry = Geometry(1, 8, (0,), 4 * dim, topk)
    pages = pages_for(stop)
    state = DeviceState.allocate(
        geometry,
        seats=1,
        chunks=1,
        index_pages=pages,
        max_pages=pages,
        max_chunks=1,
        slab_pages=1,
        tail_slots=1,
        host=torch.zeros(1, geometry.page_bytes, dtype=torch.uint8),
        device="cpu",
    )
    state.index_table[0] = torch.arange(pages)
    state.index_keys[0][:stop] = keys.view(torch.uint8)
    state.hot_slots[0] = 0
    batch, chosen = StepBatch.allocate(1, 1), torch.empty(1, topk, dtype=torch.int32)
    batch.seats[0], batch.num_real[0] = 0, 1
    for token in range(tokens):
        batch.lengths[0] = start + token + 1
        index_topk(state, 0, queries[0, token : token + 1], weights[0, token : token + 1], batch, 0.5, chosen)
        assert mask[token].nonzero().flatten().tolist() == chosen[chosen >= 0].tolist()
