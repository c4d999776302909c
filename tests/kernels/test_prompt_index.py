"""prompt_index without a GPU: the kernel's own source, emulated with its products, against the reference."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor

from kernels.cuda import prompt_index as room
from kernels.cuda.prompt_index import DIM, splits_of
from kernels.layout import Geometry
from kernels.prompt_pieces import PromptPiece, PromptPieces
from kernels.reference import prompt_topk as reference
from kernels.row_format import RowFormat, index_key_format
from kernels.state import DeviceState, Tripwire
from protocol.units import PAGE_TOKENS
from tests.emulated.device import Device
from tests.support.pairwise import pairwise

SEATS, PAGES, TOPK, SCALE = 3, 14, 100, 0.25
BLOCKS: Final = {
    "one token": [PromptPiece(0, 1, 1, 700)],
    "one job": [PromptPiece(0, 8, 0, 640)],
    "all within k": [PromptPiece(0, 10, 0, 3)],
    "across k": [PromptPiece(0, 30, 2, 80)],
    "several prompts": [PromptPiece(0, 13, 0, 0), PromptPiece(15, 9, 1, 60), PromptPiece(24, 5, 2, 800)],
}


def whole(*shape: int) -> Tensor:
    """Small whole numbers: products and sums are exact in any order, and often equal."""
    values = torch.randint(-3, 4, shape).float()
    values[..., 0] = 3.5  # the scale of fp8 is a power of two
    return values


def few(*shape: int) -> Tensor:
    """Queries of few and small values: sums of eight products by `whole` keys and weights up to 3 are float16."""
    values = torch.zeros(shape)
    values[..., 0] = 3.5 * (2 * torch.randint(2, shape[:-1]) - 1)
    values[..., 1:4] = torch.randint(-1, 2, (*shape[:-1], 3)).float()
    return values


def state_of(form: RowFormat, keys: Tensor) -> DeviceState:
    """Keys [SEATS * PAGES * 64, DIM] in pages that are scattered over the seats, and slabs likewise."""
    geometry = Geometry(1, 8, (0,), form.row_bytes, TOPK)
    sizes = {"seats": SEATS, "chunks": SEATS * PAGES, "index_pages": SEATS * PAGES, "max_pages": PAGES}
    host = torch.zeros(1, geometry.page_bytes, dtype=torch.uint8)
    state = DeviceState.allocate(geometry, slab_pages=PAGES, max_chunks=1, tail_slots=1, host=host, **sizes)
    state.index_keys[0] = form.encode(keys)
    for table in (state.index_table, state.slab_table):
        table.copy_(torch.randperm(SEATS * PAGES).view(SEATS, PAGES))
    return state


def selections(
    state: DeviceState, form: RowFormat, pieces: list[PromptPiece], queries: Tensor, weights: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Positions and rows, by the reference and by the kernel."""
    table, found = PromptPieces.of(pieces), []
    room.kernels_of.cache_clear()
    for select in (reference.prompt_topk, room.prompt_index):
        positions, rows = torch.full((2, len(queries), TOPK), 99, dtype=torch.int32)
        select(state, 0, table, queries.bfloat16(), weights, form, SCALE, positions, rows)
        found.append((positions, rows))
    room.kernels_of.cache_clear()
    return found


@pytest.mark.parametrize(
    ("name", "heads", "kind", "processors"), pairwise(tuple(BLOCKS), (16, 32, 64), room.KINDS, (2, 3, 7))
)
def test_each_token_selects_as_the_reference(
    name: str, heads: int, kind: str, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With three and seven processors several blocks share the keys of a job, some of them an odd number of pages."""
    torch.manual_seed(len(name) + heads)
    pieces, form = BLOCKS[name], index_key_format(kind, DIM)
    rows = pieces[-1].row + pieces[-1].tokens
    state = state_of(form, whole(SEATS * PAGES * PAGE_TOKENS, DIM))
    with Device(seed=rows).installed():
        monkeypatch.setattr(room, "processors", lambda device: processors)
        monkeypatch.setattr(room, "SHARE_PAGES_MIN", 2)
        queries, weights = few(rows, heads, DIM), torch.randint(-3, 4, (rows, heads)).float()
        theirs, ours = selections(state, form, pieces, queries, weights)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert not state.tripwires.any()


def test_a_kernel_whose_lanes_all_arrive_selects_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that racecheck walks through (tests/gpu/memcheck.py)."""
    defines_of = room.defines_of
    monkeypatch.setattr(room, "defines_of", lambda *of: (*defines_of(*of), ("WARP_ARRIVALS", 32)))
    test_each_token_selects_as_the_reference("several prompts", 32, "fp8", 3, monkeypatch)


@pytest.mark.parametrize("kind", room.KINDS)
def test_values_of_any_size_give_nearly_the_best_scores(kind: str) -> None:
    torch.manual_seed(5)
    form, piece = index_key_format(kind, DIM), PromptPiece(0, 8, 1, 800)
    state = state_of(form, torch.randn(SEATS * PAGES * PAGE_TOKENS, DIM) * 10 ** torch.randn(DIM))
    queries = torch.randn(8, 64, DIM) * 10 ** torch.randn(8, 64, 1)
    with Device(seed=1).installed():
        theirs, ours = selections(state, form, [piece], queries, torch.rand(8, 64))
    for token in range(8):
        assert len(set(ours[0][token].tolist()) & set(theirs[0][token].tolist())) >= TOPK - 1, "a near-tie at the edge"


def test_tokens_beyond_granted_pages_select_nothing_and_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(6)
    form = index_key_format("fp8", DIM)
    state = state_of(form, whole(SEATS * PAGES * PAGE_TOKENS, DIM))
    state.index_table[1, 5] = -1
    pieces = [PromptPiece(0, 8, 1, 5 * PAGE_TOKENS - 4), PromptPiece(8, 1, 1, 600)]
    for processors in (2, 6):
        state.tripwires.zero_()
        with Device(seed=processors).installed():
            monkeypatch.setattr(room, "processors", lambda device, count=processors: count)
            monkeypatch.setattr(room, "SHARE_PAGES_MIN", 2)
            _, ours = selections(state, form, pieces, whole(9, 32, DIM), whole(9, 32))
        assert (ours[0][:4] >= 0).all()
        assert (ours[0][4:] == -1).all()
        assert (ours[1][4:] == -1).all()
        assert int(state.tripwires[Tripwire.UNGRANTED]) == 2 * 5, "of the reference and of the kernel"


def test_few_jobs_are_shared_by_blocks_that_all_run_at_once() -> None:
    for jobs, positions, splits in ((1, 131_072, 32), (1, 2_000, 1), (16, 32_768, 8), (64, 32_768, 2), (67, 32_768, 1)):
        assert splits_of(jobs, positions, 132) == splits
        assert splits == 1 or jobs * splits <= 132


def test_only_hopper_and_known_keys_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    room.takes.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 0 else (10, 0))
    hopper, other = torch.device("cuda:0"), torch.device("cuda:1")
    fp8, fp4, bf16, exact = (index_key_format(kind, DIM) for kind in (*room.KINDS, "float32"))
    half = torch.bfloat16
    assert room.takes(64, fp8, half, 2048, hopper)
    assert room.takes(32, bf16, half, 2048, hopper)
    assert room.takes(64, fp4, half, 2048, hopper)
    assert not room.takes(64, fp8, half, 2048, other)
    assert not room.takes(64, exact, torch.float32, 2048, hopper)
    assert not room.takes(64, fp8, torch.float32, 2048, hopper)
    assert room.takes(16, fp8, half, 2048, hopper)
    assert not room.takes(15, fp8, half, 2048, hopper)
    assert not room.takes(65, fp8, half, 2048, hopper)
    assert not room.takes(64, fp8, half, 4096, hopper)
    assert not room.takes(64, index_key_format("fp8", 64), half, 2048, hopper)
    room.takes.cache_clear()
