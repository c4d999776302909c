"""prompt_topk: each token of a block selects as index_topk would with its own context."""

from __future__ import annotations

import pytest
import torch

from kernels.index_topk import index_topk
from kernels.layout import Geometry
from kernels.prompt_topk import prompt_topk
from kernels.row_format import index_key_format
from kernels.state import DeviceState, StepBatch, Tripwire
from protocol.errors import BadInput
from protocol.units import PAGE_TOKENS

HEADS, DIM, TOPK, PAGES = 4, 32, 12, 4


def state_with_keys(kind: str, device: str = "cpu") -> DeviceState:
    """Keys of small whole numbers: scores are exact in any order of additions, and often equal."""
    form = index_key_format(kind, DIM)
    geometry = Geometry(1, 8, (0,), form.row_bytes, TOPK)
    sizes = {"seats": 2, "chunks": 1, "index_pages": 2 * PAGES, "max_pages": PAGES, "max_chunks": 1}
    host = torch.zeros(1, geometry.page_bytes, dtype=torch.uint8)
    state = DeviceState.allocate(
        geometry,
        max_slab_pages=1,
        tail_slots=1,
        host=host if device == "cpu" else host.pin_memory(),
        device=device,
        **sizes,
    )
    draw = torch.Generator().manual_seed(0)
    state.index_keys[0] = form.encode(whole(state.index_keys.shape[1], DIM, draw=draw))
    state.index_table[1, :3] = torch.tensor([5, 0, 6])
    return state


def whole(*shape: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=draw).float()


@pytest.mark.parametrize("kind", ["float32", "fp8"])
@pytest.mark.parametrize(("start", "tokens"), [(0, 5), (0, 40), (100, 30), (191, 1)])
def test_each_token_selects_among_earlier_positions(kind: str, start: int, tokens: int) -> None:
    """The seat is not set up: a prompt's is not, until it is staged."""
    state, draw = state_with_keys(kind), torch.Generator().manual_seed(1)
    queries, weights = whole(tokens, HEADS, DIM, draw=draw), whole(tokens, HEADS, draw=draw)
    found = torch.full((tokens, TOPK), 99, dtype=torch.int32)
    prompt_topk(state, 0, 1, start, queries, weights, 0.25, found)
    state.hot_slots[1] = 0
    batch = StepBatch.allocate(1, 1)
    batch.seats[0], batch.num_real[0] = 1, 1
    for token in range(tokens):
        batch.lengths[0] = start + token + 1
        expected = torch.empty(1, TOPK, dtype=torch.int32)
        index_topk(state, 0, queries[token : token + 1], weights[token : token + 1], batch, 0.25, expected)
        assert torch.equal(found[token], expected[0])
    assert not state.tripwires.any()


def test_chunk_beyond_granted_pages_selects_nothing_and_trips() -> None:
    state = state_with_keys("float32")
    found = torch.full((3, TOPK), 99, dtype=torch.int32)
    prompt_topk(state, 0, 1, 3 * PAGE_TOKENS - 1, torch.randn(3, HEADS, DIM), torch.rand(3, HEADS), 1.0, found)
    assert (found == -1).all()
    assert int(state.tripwires[Tripwire.UNGRANTED]) == 1


def test_arguments_are_checked() -> None:
    state, found = state_with_keys("float32"), torch.full((3, TOPK), 99, dtype=torch.int32)
    queries, weights = torch.randn(3, HEADS, DIM), torch.rand(3, HEADS)
    with pytest.raises(BadInput, match="weights"):
        prompt_topk(state, 0, 1, 0, queries, weights[:2], 1.0, found)
    with pytest.raises(BadInput, match="seat"):
        prompt_topk(state, 0, 2, 0, queries, weights, 1.0, found)
    with pytest.raises(BadInput, match="queries"):
        prompt_topk(state, 0, 1, 0, queries[..., :16].contiguous(), weights, 1.0, found)
    assert (found == 99).all()
