"""prompt_topk in torch, one token at a time. Contract: kernels/prompt_topk.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.encode import quantized_queries
from kernels.prompt_pieces import PromptPiece, PromptPieces
from kernels.reference.index_topk import index_scores, top_positions
from kernels.row_format import RowFormat
from kernels.rows import slab_rows
from kernels.state import DeviceState, Tripwire
from protocol.units import PAGE_TOKENS, pages_for


def prepare_prompt(state: DeviceState, heads: int, keys: RowFormat, queries: torch.dtype) -> None:
    """See kernels.prompt_topk. Nothing to get ready."""


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
    """See kernels.prompt_topk."""
    queries, weights = quantized_queries(keys, queries, weights)
    for piece in pieces.pieces:
        rows = slice(piece.row, piece.row + piece.tokens)
        topk_out[rows].fill_(-1)
        context = keys.decode(_granted_keys(state, group, piece))
        lengths = range(piece.start + 1, piece.stop + 1)
        for length, own, heads, out in zip(lengths, queries[rows], weights[rows], topk_out[rows], strict=True):
            if length > len(context):
                state.tripwires[Tripwire.UNGRANTED] += 1
                continue
            chosen = top_positions(index_scores(own, heads, context[:length], scale), len(out))
            out[: len(chosen)] = chosen
        if rows_out is not None:
            rows_out[rows] = slab_rows(state, piece.seat, topk_out[rows])


def _granted_keys(state: DeviceState, group: int, piece: PromptPiece) -> Tensor:
    """Index keys uint8[n, index_row_bytes] of a prompt's positions, up to the first page that is not granted."""
    pages = state.index_table[piece.seat, : pages_for(piece.stop)]
    granted = PAGE_TOKENS * int((pages >= 0).long().cumprod(0).sum())
    return state.key_pages[group].index_select(0, pages[: granted // PAGE_TOKENS]).flatten(0, 1)[: piece.stop]
