"""Attention of prompt chunks, in the two forms of mla.py: expanded on a CPU, gathered on a GPU.

Both read what lies in the slab and the index cache, so that prompt tokens see each other's rows as decode steps will
see them, in whatever format those are kept.

Gathered, a chunk's selection is int32[S, k] device rows: the place in the slab of every position that a token selected.
Device rows are the same in every layer, so layers that share a selection share the tensor. A chunk takes S * k entries,
queries and results of S tokens, and bounded scratch memory of prompt_topk; nothing grows with the square of anything.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.attention import attend_rows
from kernels.prompt_topk import prompt_topk
from kernels.row_format import RowFormat
from kernels.rows import read_index_keys, read_slab_rows
from kernels.state import DeviceState
from protocol.units import PAGE_TOKENS, pages_for
from worker.runners import attention as mla
from worker.runners.layers import Layer


class PromptAttention(Protocol):
    """One of the two forms. A *selection* is what `select` made for the anchor layer of a group."""

    def select(
        self,
        state: DeviceState,
        group: int,
        seat: int,
        start: int,
        index: mla.IndexProjected,
        scale: float,
        last: Tensor | None,
    ) -> Tensor:
        """What each token of a chunk attends to; the chunk begins at `start` and its index keys are written. `last`
        int32[k] receives the positions that its last token selects, -1 padded."""
        ...

    def attend(
        self,
        state: DeviceState,
        layer: Layer,
        seat: int,
        projected: mla.Projected,
        selection: Tensor,
    ) -> Tensor:
        """Attention output [1, S, H * v] of a chunk in `layer`, whose rows are written."""
        ...


class Expanded:
    """A selection is a mask bool[S, T]."""

    def __init__(self, rows: RowFormat, keys: RowFormat, dtype: torch.dtype, topk: int) -> None:
        self._rows, self._keys, self._dtype, self._topk = rows, keys, dtype, topk

    def select(
        self,
        state: DeviceState,
        group: int,
        seat: int,
        start: int,
        index: mla.IndexProjected,
        scale: float,
        last: Tensor | None,
    ) -> Tensor:
        stop = start + index.keys.shape[1]
        keys = self._keys.decode(read_index_keys(state, group, seat, stop), self._dtype)
        mask = mla.select_mask(index, keys, start, self._topk, scale)
        if last is not None:
            _keep(mask[-1].nonzero().flatten(), last)
        return mask

    def attend(
        self,
        state: DeviceState,
        layer: Layer,
        seat: int,
        projected: mla.Projected,
        selection: Tensor,
    ) -> Tensor:
        rows = self._rows.decode(read_slab_rows(state, layer.number, seat, selection.shape[1]), self._dtype)
        return mla.attend_prompt(layer.attention, projected, rows, selection)


class Gathered:
    """A selection is device rows int32[S, k], -1 padded. Raises and synchronises nothing."""

    def __init__(self, topk: int) -> None:
        self._topk = topk

    def select(
        self,
        state: DeviceState,
        group: int,
        seat: int,
        start: int,
        index: mla.IndexProjected,
        scale: float,
        last: Tensor | None,
    ) -> Tensor:
        queries, weights = index.queries[0].contiguous(), index.weights[0].contiguous()
        tokens = len(queries)
        entries = min(self._topk, PAGE_TOKENS * pages_for(start + tokens))
        topk = torch.empty(tokens, entries, dtype=torch.int32, device=queries.device)
        prompt_topk(state, group, seat, start, queries, weights, scale, topk)
        if last is not None:
            _keep(topk[-1], last)
        return _slab_places(state, seat, topk)

    def attend(
        self,
        state: DeviceState,
        layer: Layer,
        seat: int,
        projected: mla.Projected,
        selection: Tensor,
    ) -> Tensor:
        queries = mla.absorb_queries(layer.absorbed, projected)
        latents = queries.new_empty(*queries.shape[:2], layer.absorbed.value.shape[1])
        attend_rows(state, layer.number, queries, selection, layer.attention.scaling, latents)
        return mla.expand_values(layer.absorbed, latents).unsqueeze(0)


def _keep(positions: Tensor, last: Tensor) -> None:
    last.fill_(-1)
    last[: len(positions)] = positions


def _slab_places(state: DeviceState, seat: int, positions: Tensor) -> Tensor:
    """Device rows int32 of prompt `positions` int32 of any shape, -1 where they are."""
    pages = state.slab_table[seat][positions.clamp(min=0).long() // PAGE_TOKENS]
    return torch.where(positions < 0, -1, pages * PAGE_TOKENS + positions % PAGE_TOKENS)
