"""index_topk's CUDA side without a GPU: what the launcher computes for its kernels, held to the kernels' own sizes."""

from __future__ import annotations

import pytest
import torch

from kernels.compile import INDEXERS
from kernels.cuda import jit
from kernels.cuda.index_topk import (
    HOPPER,
    SELECT_SHARED_BYTES,
    SHARED_KIB,
    SHARED_KIB_LEAST,
    STATIC_SHARED_BYTES,
    Indexer,
    indexer_of,
    ranks_of,
    scratch_bytes,
    select_defines,
)
from kernels.row_format import RowFormat
from protocol.errors import BadInput

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the nvrtc wheel: pip install 'hisparse[cuda]'")


ANYWHERE = [indexer for indexer in INDEXERS if not indexer.codes]


@pytest.mark.parametrize("arch", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("indexer", ANYWHERE)
def test_shared_memory_fits_a_block_of_every_architecture(indexer: Indexer, arch: int) -> None:
    most = SHARED_KIB.get(arch, SHARED_KIB_LEAST) << 10
    assert indexer.shared_bytes(arch) + STATIC_SHARED_BYTES <= most
    assert most >= SELECT_SHARED_BYTES
    assert dict(indexer.defines(arch))["STAGES"] >= 2


@pytest.mark.parametrize("indexer", ANYWHERE)
def test_kernels_and_launcher_agree_on_sizes(indexer: Indexer) -> None:
    check = f"static_assert(sizeof(Queries) <= {indexer.queries_bytes});"
    source = f'#include "index_scores.cuh"\nnamespace hisparse {{ {check} }}'
    compiled = jit.compile_source(source, "index_scores", indexer.defines(80), "sm_80")
    assert all(cost.smem_bytes <= STATIC_SHARED_BYTES for cost in compiled.resources)


@pytest.mark.parametrize("indexer", [indexer for indexer in INDEXERS if indexer.on_hopper(HOPPER)])
def test_hopper_kernel_and_launcher_agree_on_sizes(indexer: Indexer) -> None:
    check = f"static_assert(sizeof(ScoreShared) <= {indexer.shared_bytes(HOPPER)});"
    source = f'#include "index_hopper.cuh"\nnamespace hisparse {{ {check} }}'
    (cost,) = jit.compile_source(source, "index_hopper", indexer.defines(HOPPER), "sm_90a").resources
    assert indexer.shared_bytes(HOPPER) <= SHARED_KIB[HOPPER] << 10
    assert (cost.smem_bytes, cost.spill_bytes) == (0, 0)


def test_selection_and_launcher_agree_on_sizes() -> None:
    check = f"static_assert(sizeof(SelectShared) <= {SELECT_SHARED_BYTES});"
    source = f'#include "index_select.cuh"\nnamespace hisparse {{ {check} }}'
    (cost,) = jit.compile_source(source, "index_select", select_defines(), "sm_80").resources
    assert cost.smem_bytes == 0


def test_rows_get_as_many_blocks_as_fit() -> None:
    assert [ranks_of(rows, 132) for rows in (1, 8, 9, 16, 17, 66, 67, 1024)] == [8, 8, 4, 4, 2, 2, 1, 1]
    assert ranks_of(1, 4) == 2


def test_scratch_is_four_bytes_a_key_plus_some_per_seat() -> None:
    assert scratch_bytes(64 * 10_000, 64) == 4 * 640_000 + 64 * (33 * 1024 + 16)
    assert scratch_bytes(64 * 10_000, 64, 5) == 5 * scratch_bytes(64 * 10_000, 64)


@pytest.mark.parametrize(("heads", "dim"), [(65, 128), (0, 128), (4, 16), (4, 48), (4, 160)])
def test_unsupported_indexers_are_refused_by_name(heads: int, dim: int) -> None:
    with pytest.raises(BadInput, match=f"queries={heads if heads in (0, 65) else dim}"):
        indexer_of(heads, RowFormat("bfloat16", dim, 0, dim), torch.bfloat16)


def test_fp8_keys_of_128_values_have_a_form_on_hopper() -> None:
    def unit(arch: int, *shape: int) -> str:
        return Indexer(*shape).unit(arch)

    assert {unit(90, heads, 128, 2, 1) for heads in (32, 64)} == {"index_hopper"}
    others = ((90, 16, 128, 2, 1), (90, 64, 96, 2, 1), (90, 64, 128, 2, 2), (90, 64, 128, 4, 1), (100, 64, 128, 2, 1))
    assert {unit(*other) for other in others} == {"index_scores"}


def test_only_hopper_uses_hopper_instructions() -> None:
    def wide(arch: int, *shape: int) -> int:
        return dict(Indexer(*shape).defines(arch))["WGMMA"]

    assert [wide(arch, 64, 128, 2, 1) for arch in (80, 90, 100, 120)] == [0, 1, 0, 0]
    assert [wide(90, 32, 128, 2, 2), wide(90, 4, 32, 2, 2), wide(90, 64, 128, 4, 4)] == [1, 0, 0]
