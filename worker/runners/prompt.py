"""Attention of prompt chunks, in the two forms of attention.py: expanded on a CPU, gathered on a GPU.

Both read what lies in the slab and the index cache, so that prompt tokens see each other's rows as decode steps will
see them, in whatever format those are kept.

Gathered, a chunk's selection is int32[S, k] device rows: index_topk over the chunk's tokens as rows of one step, with
the positions below each as its context, and every position's place in the slab. Device rows are the same in every
layer, so layers that share a selection share the tensor. Per chunk that takes S * k entries, queries and results of S
tokens, and index_topk's scratch memory for QUERIES_MAX tokens; nothing grows with the square of anything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Protocol

import torch
from torch import Tensor

from kernels.attention import attend_rows
from kernels.index_topk import index_topk
from kernels.layout import PAGE_TOKENS
from kernels.row_format import RowFormat
from kernels.rows import read_index_keys, read_slab_rows
from kernels.state import DeviceState, StepBatch
from worker.runners import attention as mla

#: Prompt tokens whose index scores are held at once.
QUERIES_MAX: Final = 256


class PromptAttention(Protocol):
    """One of the two forms. A *selection* is what `select` made for the anchor layer of a group."""

    def select(
        self, state: DeviceState, group: int, seat: int, start: int, index: mla.IndexProjected, scale: float
    ) -> Tensor:
        """What each token of a chunk attends to; the chunk begins at `start` and its index keys are written."""
        ...

    def attend(
        self,
        state: DeviceState,
        number: int,
        attention: mla.Module,
        absorbed: mla.Absorbed,
        seat: int,
        projected: mla.Projected,
        selection: Tensor,
    ) -> Tensor:
        """Attention output [1, S, H * v] of a chunk in layer `number`, whose rows are written."""
        ...


class Expanded:
    """A selection is a mask bool[S, T]."""

    def __init__(self, rows: RowFormat, keys: RowFormat, dtype: torch.dtype, topk: int) -> None:
        self._rows, self._keys, self._dtype, self._topk = rows, keys, dtype, topk

    def select(
        self, state: DeviceState, group: int, seat: int, start: int, index: mla.IndexProjected, scale: float
    ) -> Tensor:
        stop = start + index.keys.shape[1]
        keys = self._keys.decode(read_index_keys(state, group, seat, stop), self._dtype)
        return mla.select_mask(index, keys, start, self._topk, scale)

    def attend(
        self,
        state: DeviceState,
        number: int,
        attention: mla.Module,
        absorbed: mla.Absorbed,
        seat: int,
        projected: mla.Projected,
        selection: Tensor,
    ) -> Tensor:
        rows = self._rows.decode(read_slab_rows(state, number, seat, selection.shape[1]), self._dtype)
        return mla.attend_prompt(attention, projected, rows, selection)


class Gathered:
    """A selection is device rows int32[S, k], -1 padded. Raises and synchronises nothing."""

    def __init__(self, topk: int) -> None:
        self._topk = topk
        self._seated: tuple[DeviceState, DeviceState] | None = None

    def select(
        self, state: DeviceState, group: int, seat: int, start: int, index: mla.IndexProjected, scale: float
    ) -> Tensor:
        queries, weights = index.queries[0].contiguous(), index.weights[0].contiguous()
        tokens, device = len(queries), queries.device
        topk = torch.empty(tokens, min(self._topk, start + tokens), dtype=torch.int32, device=device)
        for first in range(0, tokens, QUERIES_MAX):
            part = slice(first, min(first + QUERIES_MAX, tokens))
            batch = _as_step(seat, start + part.start, start + part.stop, device)
            index_topk(self._as_seated(state), group, queries[part], weights[part], batch, scale, topk[part])
        return _slab_places(state, seat, topk)

    def attend(
        self,
        state: DeviceState,
        number: int,
        attention: mla.Module,
        absorbed: mla.Absorbed,
        seat: int,
        projected: mla.Projected,
        selection: Tensor,
    ) -> Tensor:
        queries = mla.absorb_queries(absorbed, projected)
        latents = queries.new_empty(*queries.shape[:2], absorbed.value.shape[1])
        attend_rows(state, number, queries, selection, attention.scaling, latents)
        return mla.expand_values(absorbed, latents).unsqueeze(0)

    def _as_seated(self, state: DeviceState) -> DeviceState:
        """The same memory, but with every seat resident: a prompt's is set up only once it is staged."""
        if self._seated is None or self._seated[0] is not state:
            self._seated = (state, replace(state, hot_slots=torch.zeros_like(state.hot_slots)))
        return self._seated[1]


def _as_step(seat: int, start: int, stop: int, device: torch.device) -> StepBatch:
    """A step in which the tokens at start..stop-1 of one seat are rows."""
    batch = StepBatch.allocate(stop - start, 1, device)
    batch.seats.fill_(seat)
    batch.lengths.copy_(torch.arange(start + 1, stop + 1, device=device))
    batch.num_real.fill_(stop - start)
    return batch


def _slab_places(state: DeviceState, seat: int, positions: Tensor) -> Tensor:
    """Device rows int32 of prompt `positions` int32 of any shape, -1 where they are."""
    pages = state.slab_table[seat][positions.clamp(min=0).long() // PAGE_TOKENS]
    return torch.where(positions < 0, -1, pages * PAGE_TOKENS + positions % PAGE_TOKENS)
