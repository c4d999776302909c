"""prompt_topk on CUDA: prompt_index, where that is written for keys and card (kernels/cuda/prompt_index.py); elsewhere
the kernels of index_topk, over a view of the state in which each token of a piece has a seat.

The seats of the view are up to TOKENS_MAX tokens at a time, all with the index table of the prompt's seat; keys are the
state's own, and stay in L2 from one token to the next. The view has scratch memory of its own: SCORES_MAX scores, or
those of one token of the longest context, so that longer contexts take more launches and not more memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.cuda import prompt_index as blockwise
from kernels.cuda.index_topk import index_topk, prepare_index, scratch_of
from kernels.cuda.structures import UNIT
from kernels.encode import quantized_queries
from kernels.prompt_pieces import PromptPieces
from kernels.row_format import RowFormat
from kernels.rows import slab_rows
from kernels.state import DeviceState, StepBatch
from protocol.units import PAGE_TOKENS

#: Tokens of a launch: enough to fill a card.
TOKENS_MAX: Final = 128
#: Scores of a launch: 64 MiB of float32.
SCORES_MAX: Final = 1 << 24

_views: WeakKeyDictionary[DeviceState, DeviceState] = WeakKeyDictionary()


def prepare_prompt(state: DeviceState, heads: int, keys: RowFormat, queries: torch.dtype) -> None:
    """Compile, load and allocate all that prompt_topk needs."""
    if blockwise.takes(heads, keys, queries, state.geometry.topk, state.rows.device):
        blockwise.prepare(state, heads, keys)
    else:
        prepare_index(_view_of(state), heads, keys, queries)


def prompt_topk(
    state: DeviceState,
    group: int,
    pieces: PromptPieces,
    queries: Tensor,
    weights: Tensor,
    keys: RowFormat,
    scale: float,
    topk_out: Tensor,
    rows_out: Tensor | None,
) -> None:
    """As kernels.prompt_topk.prompt_topk, unchecked."""
    if blockwise.takes(queries.shape[1], keys, queries.dtype, topk_out.shape[1], queries.device):
        blockwise.prompt_index(state, group, pieces, queries, weights, keys, scale, topk_out, rows_out)
        return
    queries, weights = quantized_queries(keys, queries, weights)
    for piece in pieces.pieces:
        rows = slice(piece.row, piece.row + piece.tokens)
        own = queries[rows], weights[rows], keys, scale, topk_out[rows]
        _select_piece(state, group, piece.seat, piece.start, *own)
        if rows_out is not None:
            rows_out[rows] = slab_rows(state, piece.seat, topk_out[rows])


def _select_piece(
    state: DeviceState,
    group: int,
    seat: int,
    start: int,
    queries: Tensor,
    weights: Tensor,
    keys: RowFormat,
    scale: float,
    topk_out: Tensor,
) -> None:
    view, device = _view_of(state), queries.device
    view.index_table.copy_(state.index_table[seat])
    tokens = len(queries)
    step = tokens_at_once(start + tokens)
    for first in range(0, tokens, step):
        part = slice(first, min(first + step, tokens))
        batch = StepBatch.allocate(part.stop - part.start, 1, device, decodes=False)
        torch.arange(part.stop - part.start, out=batch.seats)
        torch.arange(start + part.start + 1, start + part.stop + 1, out=batch.lengths)
        batch.num_real.fill_(part.stop - part.start)
        index_topk(view, group, queries[part], weights[part], batch, keys, scale, topk_out[part])


def tokens_at_once(length: int) -> int:
    """Tokens whose scores over `length` positions fit the scratch memory of a view together."""
    return max(1, min(TOKENS_MAX, SCORES_MAX // (-(-length // UNIT) * UNIT)))


def _view_of(state: DeviceState) -> DeviceState:
    if state not in _views:
        with torch.inference_mode(False):  # the first caller may be inside, later ones outside
            _views[state] = _make_view(state)
    return _views[state]


def _make_view(state: DeviceState) -> DeviceState:
    pages, device = state.index_table.shape[1], state.rows.device
    view = replace(
        state,
        index_table=torch.full((TOKENS_MAX, pages), -1, dtype=torch.int32, device=device),
        hot_slots=torch.zeros(TOKENS_MAX, dtype=torch.int32, device=device),
        seat_rows=1,
    )
    scratch_of(view, max(SCORES_MAX, pages * PAGE_TOKENS))
    return view
