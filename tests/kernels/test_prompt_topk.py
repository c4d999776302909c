"""prompt_topk: each token of a block selects as index_topk would with its own context."""

from __future__ import annotations

from typing import Final

import pytest
import torch

from kernels.index_topk import index_topk
from kernels.layout import Geometry
from kernels.prompt_pieces import GROUP, PromptPiece, PromptPieces
from kernels.prompt_topk import prompt_topk
from kernels.reference.index_topk import index_scores, row_keys, top_positions
from kernels.row_format import index_key_format
from kernels.state import DeviceState, StepBatch, Tripwire
from protocol.errors import BadInput
from protocol.units import PAGE_TOKENS

HEADS, DIM, TOPK, PAGES = 4, 32, 12, 4
PIECES: Final = {
    "begins": [PromptPiece(0, 5, 1, 0)],
    "crosses the top-k": [PromptPiece(0, 40, 1, 0)],
    "continues": [PromptPiece(0, 30, 1, 100)],
    "one token": [PromptPiece(0, 1, 1, 191)],
    "several prompts": [PromptPiece(0, 9, 1, 50), PromptPiece(11, 20, 0, 0), PromptPiece(31, 1, 1, 190)],
}


def state_with_keys(kind: str, device: str = "cpu") -> DeviceState:
    """Keys of small whole numbers: scores are exact in any order of additions, and often equal."""
    form = index_key_format(kind, DIM)
    geometry = Geometry(1, 8, (0,), form.row_bytes, TOPK)
    sizes = {"seats": 2, "chunks": 1, "index_pages": 2 * PAGES, "max_pages": PAGES, "max_chunks": 1}
    host = torch.zeros(1, geometry.page_bytes, dtype=torch.uint8)
    state = DeviceState.allocate(
        geometry,
        slab_pages=PAGES,
        tail_slots=1,
        host=host if device == "cpu" else host.pin_memory(),
        device=device,
        **sizes,
    )
    draw = torch.Generator().manual_seed(0)
    state.index_keys[0] = form.encode(exact(state.index_keys.shape[1], DIM, draw=draw))
    state.index_table[1, :3] = torch.tensor([5, 0, 6])
    state.index_table[0, 0] = 3
    state.slab_table.copy_(torch.tensor([[6, 1, 4, 0], [3, 5, 2, 7]]))
    return state


def exact(*shape: int, draw: torch.Generator) -> torch.Tensor:
    """Small whole numbers that fp8 holds: their scale is a power of two."""
    values = whole(*shape, draw=draw).clamp(-3, 3)
    values[..., 0] = 3.5
    return values


def whole(*shape: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=draw).float()


@pytest.mark.parametrize("kind", ["float32", "fp8"])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_each_token_selects_among_earlier_positions(kind: str, pieces: list[PromptPiece]) -> None:
    """The seat is not set up: a prompt's is not, until it is staged."""
    state, draw = state_with_keys(kind), torch.Generator().manual_seed(1)
    rows = max(piece.row + piece.tokens for piece in pieces) + 1
    queries, weights = exact(rows, HEADS, DIM, draw=draw), whole(rows, HEADS, draw=draw)
    found, places = torch.full((2, rows, TOPK), 99, dtype=torch.int32)
    prompt_topk(state, 0, PromptPieces.of(pieces), queries, weights, 0.25, found, places)
    state.hot_slots[:] = 0
    batch = StepBatch.allocate(1, 1)
    batch.num_real[0] = 1
    rest = set(range(rows))
    for piece in pieces:
        for token in range(piece.tokens):
            row = piece.row + token
            batch.seats[0], batch.lengths[0] = piece.seat, piece.start + token + 1
            expected = torch.empty(1, TOPK, dtype=torch.int32)
            index_topk(state, 0, queries[row : row + 1], weights[row : row + 1], batch, 0.25, expected)
            assert torch.equal(found[row], expected[0])
            pages = state.slab_table[piece.seat][expected[0].clamp(min=0) // PAGE_TOKENS]
            wanted = torch.where(expected[0] < 0, -1, pages * PAGE_TOKENS + expected[0] % PAGE_TOKENS)
            assert torch.equal(places[row], wanted)
            rest.remove(row)
    for written in (found, places):
        assert (written[sorted(rest)] == 99).all(), "rows of no piece stay as they are"
    assert not state.tripwires.any()


def test_queries_are_quantized_where_keys_are() -> None:
    state, draw = state_with_keys("fp8"), torch.Generator().manual_seed(2)
    form, length = index_key_format("fp8", DIM), 190
    keys = exact(state.index_keys.shape[1], DIM, draw=draw)
    keys[:, ::2] = 0
    state.index_keys[0] = form.encode(keys)
    queries = torch.randn(1, HEADS, DIM, generator=draw)
    queries[..., ::2] *= 100_000  # so that the values that count are rounded to few steps
    weights = torch.rand(1, HEADS, generator=draw)
    found = torch.full((1, TOPK), 99, dtype=torch.int32)
    prompt_topk(state, 0, PromptPieces.of([PromptPiece(0, 1, 1, length - 1)]), queries, weights, 0.25, found)
    held = row_keys(state, 0, 1, length)
    assert held is not None
    quantized, plain = (
        top_positions(index_scores(own[0], weights[0], form.decode(held), 0.25), TOPK)
        for own in (form.decode(form.encode(queries)), queries)
    )
    assert torch.equal(found[0].long(), quantized)
    assert not torch.equal(quantized, plain), "else this test would show nothing"


def test_tokens_beyond_granted_pages_select_nothing_and_trip() -> None:
    state = state_with_keys("float32")
    found = torch.full((3, TOPK), 99, dtype=torch.int32)
    pieces = PromptPieces.of([PromptPiece(0, 3, 1, 3 * PAGE_TOKENS - 1)])
    prompt_topk(state, 0, pieces, torch.randn(3, HEADS, DIM), torch.rand(3, HEADS), 1.0, found)
    assert (found[0] >= 0).all()
    assert (found[1:] == -1).all()
    assert int(state.tripwires[Tripwire.UNGRANTED]) == 2


def test_arguments_are_checked() -> None:
    state, found = state_with_keys("float32"), torch.full((3, TOPK), 99, dtype=torch.int32)
    queries, weights = torch.randn(3, HEADS, DIM), torch.rand(3, HEADS)
    three = PromptPiece(0, 3, 1, 0)
    with pytest.raises(BadInput, match="weights"):
        prompt_topk(state, 0, PromptPieces.of([three]), queries, weights[:2], 1.0, found)
    with pytest.raises(BadInput, match="seat"):
        prompt_topk(state, 0, PromptPieces.of([three._replace(seat=2)]), queries, weights, 1.0, found)
    with pytest.raises(BadInput, match="queries"):
        prompt_topk(state, 0, PromptPieces.of([three]), queries[..., :16].contiguous(), weights, 1.0, found)
    with pytest.raises(BadInput, match="pieces"):
        prompt_topk(state, 0, PromptPieces.of([three._replace(row=1)]), queries, weights, 1.0, found)
    with pytest.raises(BadInput, match="pieces"):
        PromptPieces.of([three._replace(tokens=0)])
    assert (found == 99).all()


def test_table_orders_pieces_and_counts_jobs() -> None:
    """The kernel takes the longest contexts first, from the last job on."""
    long, short = PromptPiece(0, 17, 1, 900), PromptPiece(17, GROUP, 0, 5)
    pieces = PromptPieces.of([long, short])
    assert pieces.table.tolist() == [[0, *short], [1, *long]]
    assert (pieces.jobs, pieces.positions) == (4, 917)
    assert PromptPieces.of([]).table.shape == (0, 5)
