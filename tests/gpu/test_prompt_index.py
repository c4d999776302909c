"""prompt_index on a GPU against torch: exact where arithmetic is exact, and close where it is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs Hopper's matrix instruction", allow_module_level=True)

from torch import Tensor  # noqa: E402

from benchmarks.fp8_queries import CONTEXTS, OVERLAP_MIN, SHARE_MIN, VALUES, measure  # noqa: E402
from kernels.cuda.prompt_index import DIM, KINDS, takes  # noqa: E402
from kernels.layout import Geometry  # noqa: E402
from kernels.prompt_pieces import PromptPiece, PromptPieces  # noqa: E402
from kernels.prompt_topk import prompt_topk  # noqa: E402
from kernels.reference.index_topk import index_scores, top_positions  # noqa: E402
from kernels.row_format import RowFormat, index_key_format  # noqa: E402
from kernels.rows import slab_rows  # noqa: E402
from kernels.state import DeviceState, Tripwire  # noqa: E402
from protocol.units import PAGE_TOKENS  # noqa: E402

FORMS: Final = {kind: index_key_format(kind, DIM) for kind in KINDS}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
SEATS, PAGES = 3, 160


def state_of(form: RowFormat, topk: int, keys: Tensor) -> DeviceState:
    """Keys [SEATS * PAGES * 64, DIM] in pages that are scattered over three seats."""
    geometry = Geometry(1, 8, (0,), form.row_bytes, topk)
    host = torch.zeros(1, geometry.page_bytes, dtype=torch.uint8).pin_memory()
    sizes = {"seats": SEATS, "chunks": 1, "index_pages": SEATS * PAGES, "max_pages": PAGES, "max_chunks": 1}
    state = DeviceState.allocate(geometry, slab_pages=PAGES, tail_slots=1, host=host, device="cuda", **sizes)
    state.index_keys[0] = form.encode(keys)
    for table in (state.index_table, state.slab_table):
        table.copy_(torch.randperm(SEATS * PAGES, device="cuda").view(SEATS, PAGES))
    return state


def selection(
    state: DeviceState,
    form: RowFormat,
    pieces: Sequence[PromptPiece],
    queries: Tensor,
    weights: Tensor,
    scale: float,
    k: int,
) -> Tensor:
    """Positions; their rows in the slab are checked."""
    out, rows = torch.full((2, len(queries), k), 99, dtype=torch.int32, device="cuda")
    queries = queries.bfloat16()
    assert takes(queries.shape[1], form, queries.dtype, k, queries.device)
    prompt_topk(state, 0, PromptPieces.of(pieces, queries.device), queries, weights, scale, out, rows)
    for piece in pieces:
        place = slice(piece.row, piece.row + piece.tokens)
        assert torch.equal(rows[place], slab_rows(state, piece.seat, out[place]))
    return out


def scores_of(
    state: DeviceState, form: RowFormat, piece: PromptPiece, token: int, queries: Tensor, weights: Tensor, scale: float
) -> Tensor:
    """Of one token with all positions up to its own, by queries as the kernel compares them."""
    length, row = piece.start + token + 1, piece.row + token
    pages = state.index_table[piece.seat, : -(-length // PAGE_TOKENS)].long()
    keys = form.decode(state.index_keys[0].view(-1, PAGE_TOKENS, form.row_bytes)[pages].flatten(0, 1)[:length])
    asked = FORMS["fp8"] if form.is_quantised else form
    return index_scores(asked.decode(asked.encode(queries[row].bfloat16())), weights[row], keys, scale)


def whole(*shape: int) -> Tensor:
    """Small whole numbers: products and sums are exact in any order, and often equal."""
    return torch.randint(-3, 4, shape, device="cuda").float()


def few(*shape: int) -> Tensor:
    """Queries of few and small values: sums of eight products by `whole` keys and weights are float16."""
    values = torch.zeros(shape, device="cuda")
    values[..., 0] = 3.5 * (2 * torch.randint(2, shape[:-1], device="cuda") - 1)
    values[..., 1:4] = torch.randint(-1, 2, (*shape[:-1], 3), device="cuda").float()
    return values


BLOCKS: Final = {
    "one token": [PromptPiece(0, 1, 1, 3_000)],
    "one job": [PromptPiece(0, 8, 0, 5_000)],
    "all within k": [PromptPiece(0, 100, 0, 0)],
    "across k": [PromptPiece(0, 2_100, 2, 0)],
    "several prompts": [
        PromptPiece(0, 13, 0, 0),
        PromptPiece(13, 300, 1, 2_040),
        PromptPiece(320, 5, 2, 9_000),
        PromptPiece(325, 1, 0, 13),
    ],
    "many jobs": [PromptPiece(0, 4_096, 1, 6_000)],
}


@forms
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("name", BLOCKS)
def test_each_token_selects_a_stable_top_k(form: RowFormat, heads: int, name: str) -> None:
    """Blocks of few tokens are shared by several blocks of threads."""
    torch.manual_seed(1)
    pieces, k = BLOCKS[name], 2_048
    rows = pieces[-1].row + pieces[-1].tokens
    # A scale of a power of two keeps whole numbers whole: the largest magnitude of each row is 3 or 448 / 2**7.
    keys, queries, weights = whole(SEATS * PAGES * 64, DIM), few(rows, heads, DIM), whole(rows, heads)
    keys[:, 0] = 3.5
    state = state_of(form, k, keys)
    found = selection(state, form, pieces, queries, weights, 0.25, k)
    for piece in pieces:
        for token in range(0, piece.tokens, max(1, piece.tokens // 7)):
            scores = scores_of(state, form, piece, token, queries, weights, 0.25)
            wanted = torch.full((k,), -1, dtype=torch.int32, device="cuda")
            best = top_positions(scores, k)
            wanted[: len(best)] = best
            assert torch.equal(found[piece.row + token], wanted), (piece, token)
    if name == "several prompts":
        assert (found[313:320] == 99).all(), "rows of no piece stay as they are"
    assert not state.tripwires.any()


@forms
@pytest.mark.parametrize("order", ["random", "ascending", "equal"])
@pytest.mark.parametrize("tokens", [64, 3])
def test_scores_of_what_is_selected_are_the_best(form: RowFormat, order: str, tokens: int) -> None:
    torch.manual_seed(2)
    piece, k = PromptPiece(0, tokens, 0, 10_000), 2_048
    keys, queries = torch.randn(SEATS * PAGES * 64, DIM, device="cuda"), torch.randn(tokens, 64, DIM, device="cuda")
    weights = torch.rand(tokens, 64, device="cuda")
    if order == "ascending":
        queries = queries.abs()
        keys = keys.abs()
    state = state_of(form, k, keys)
    if order != "random":
        state.index_table.copy_(torch.arange(SEATS * PAGES, device="cuda").view(SEATS, PAGES))
        factors = (
            torch.linspace(1, 2, len(keys), device="cuda")
            if order == "ascending"
            else torch.ones(len(keys), device="cuda")
        )
        state.index_keys[0] = form.encode(keys[:1].abs() * factors[:, None])
    found = selection(state, form, [piece], queries, weights, DIM**-0.5, k)
    for token in range(0, tokens, 9):
        scores = scores_of(state, form, piece, token, queries, weights, DIM**-0.5).double()
        mine = found[token].long()
        assert torch.equal(mine, mine.unique()), "ascending, none twice"
        lowest = scores[mine].min()
        others = scores.clone()
        others[mine] = -torch.inf
        assert others.max() <= lowest + 1e-3 * scores.abs().max()
        if order == "equal":
            assert torch.equal(mine, torch.arange(k, device="cuda"))


@forms
def test_pages_that_are_not_granted_select_nothing_and_trip(form: RowFormat) -> None:
    k = 2_048
    state = state_of(form, k, torch.randn(SEATS * PAGES * 64, DIM, device="cuda"))
    state.index_table[1, 50] = -1
    pieces = [
        PromptPiece(0, 8, 1, 3_100),
        PromptPiece(8, 8, 1, 3_300),
        PromptPiece(16, 1, 1, 3_199),
        PromptPiece(17, 1, 1, 3_200),
    ]
    queries, weights = torch.randn(18, 64, DIM, device="cuda"), torch.rand(18, 64, device="cuda")
    found = selection(state, form, pieces, queries, weights, 1.0, k)
    assert (found[:8] >= 0).all()
    assert (found[8:16] == -1).all()
    assert (found[16] >= 0).all()
    assert (found[17] == -1).all()
    assert int(state.tripwires[Tripwire.UNGRANTED]) == 9


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("values", VALUES)
def test_selections_by_fp8_queries_are_nearly_those_by_exact_ones(context: int, values: str) -> None:
    cell = measure(context, values, "cuda")
    assert cell["overlap"] >= OVERLAP_MIN
    assert cell["sum_share"] >= SHARE_MIN
