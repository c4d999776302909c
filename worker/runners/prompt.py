"""Prompt passes, and their attention in the two forms of mla.py: expanded on a CPU, gathered on a GPU.

Both read what lies in the slab and the index cache, so that prompt tokens see each other's rows as decode steps will
see them, in whatever format those are kept.

A *block* is the rows of a pass that go through one layer together; a *piece* is those of one prompt among them. Norms,
products, MLPs and prompt_topk take a block at once; memory is written piece by piece. Rows of a part that left attend
to nothing: zeros. What rows select is kept for all rows of the pass until the next anchor layer takes them: a layer
that shares the selection may take them in other blocks.

Gathered, a selection is int32[P, k] rows of the slab: the place of every position that a token selected. They are the
same in both halves of the slab, so layers that share a selection share the tensor. A pass of P tokens takes
P * k entries; a block of B takes queries and results of B tokens, and bounded scratch memory of prompt_topk; nothing
grows with the square of anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.prompt_pieces import PromptPiece, PromptPieces
from kernels.prompt_topk import prompt_topk
from kernels.row_format import RowFormat
from kernels.rows import read_index_keys, read_slab_rows
from kernels.state import DeviceState
from protocol.units import PAGE_TOKENS, pages_for
from worker.runners import attention as mla
from worker.runners.base import PromptPart, PromptPass
from worker.runners.layers import Angles, Layer


@dataclass(eq=False)
class ModelPass(PromptPass):
    """A pass of P tokens on its way through the layers. The operation that enters it makes the tensors."""

    tokens: Tensor = field(init=False)  # int64[P]
    hidden: Tensor = field(init=False)  # [1, P, C * hidden]: the residual
    angles: Angles = field(init=False)  # [1, P, d]
    selection: Any = field(init=False)  # of the anchor layer before, as PromptAttention keeps it
    warm_start: Tensor = field(init=False)  # int32[parts that end, G, k]: positions, -1 padded
    #: For kernels, of the blocks that went through a layer.
    _tables: dict[tuple[PromptPiece, ...], PromptPieces] = field(init=False, default_factory=dict)

    @property
    def ending(self) -> list[int]:
        """Numbers of the parts that end their prompts."""
        return [number for number, part in enumerate(self.parts) if part.ends]

    def warm_start_of(self, number: int) -> Tensor:
        """Positions int32[G, k] that the last token of part `number` selected."""
        return self.warm_start[self.ending.index(number)]

    def table_of(self, pieces: Sequence[PromptPiece]) -> PromptPieces:
        """`pieces` on the device of the pass: copied for the first layer alone."""
        key = tuple(pieces)
        if key not in self._tables:
            self._tables[key] = PromptPieces.of(key, self.hidden.device)
        return self._tables[key]


@dataclass(eq=False)
class PromptBlock:
    """Rows first..stop-1 of a pass on their way through one layer."""

    prompts: ModelPass
    first: int
    stop: int
    pieces: list[tuple[int, PromptPart]]  # with the number of the part: of those that had not left at launch
    projected: mla.Projected | None = None
    is_guest: bool = False  # of a prompt whose owner is another rank (splitting.py)

    @classmethod
    def of(cls, prompts: ModelPass, first: int, stop: int) -> PromptBlock:
        return cls(prompts, first, stop, list(prompts.pieces(first, stop)))

    @property
    def rows(self) -> slice:
        """The block in the pass."""
        return slice(self.first, self.stop)

    @property
    def ending(self) -> mla.LayerEnding:
        """Return what the projections leave for the end of attention, until they are taken away."""
        return mla.LayerEnding() if self.projected is None else self.projected.ending

    def place(self, piece: PromptPart) -> slice:
        """A piece in the block."""
        return slice(piece.first - self.first, piece.end - self.first)

    def place_in_part(self, number: int, piece: PromptPart) -> slice:
        """A piece of part `number` among the tokens of that part."""
        start = self.prompts.parts[number].start
        return slice(piece.start - start, piece.stop - start)

    def keys_of(self, group: int) -> int:
        """The group of the state that has the index keys of `group`: a guest view has those of one."""
        return 0 if self.is_guest else group

    def searched(self) -> PromptPieces:
        """The pieces, for prompt_topk."""
        pieces = [
            PromptPiece(piece.first - self.first, piece.tokens, piece.seat, piece.start) for _, piece in self.pieces
        ]
        return self.prompts.table_of(pieces)

    def keep_last(self, group: int, number: int, piece: PromptPart, positions: Tensor) -> None:
        """Keep the `positions` that the last token of a piece of part `number` selected, if it ends its prompt."""
        if piece.ends:
            _write_padded(positions, self.prompts.warm_start_of(number)[group])

    def gaps(self) -> Iterator[slice]:
        """Rows of the block between its pieces, of parts that left."""
        start = 0
        for _, piece in self.pieces:
            if start < self.place(piece).start:
                yield slice(start, self.place(piece).start)
            start = self.place(piece).stop
        if start < self.stop - self.first:
            yield slice(start, self.stop - self.first)


class PromptAttention(Protocol):
    """One of the two forms. A *selection* is what the rows of a pass attend to in the layers of a group."""

    def begin(self, parts: Sequence[PromptPart], device: torch.device) -> Any:
        """The selection of a pass, before any row selected."""
        ...

    def select(
        self, state: DeviceState, group: int, block: PromptBlock, index: mla.IndexProjected, scale: float
    ) -> None:
        """Select what each token of a block attends to, whose index keys are written, into the selection of its pass,
        and what the last tokens of prompts select into its warm start."""
        ...

    def select_last(
        self,
        state: DeviceState,
        group: int,
        seat: int,
        position: int,
        index: mla.IndexProjected,
        scale: float,
        last: Tensor,
    ) -> None:
        """Write the positions that one token selects, -1 padded, to `last` int32[k]. Its index key is written."""
        ...

    def attend(self, state: DeviceState, layer: Layer, block: PromptBlock) -> Tensor:
        """Attention output [1, B, H * v] of a block in `layer`, whose rows are written. Takes block.projected away."""
        ...


class Expanded:
    """A selection is a mask bool[part's tokens, its stop] of each part."""

    def __init__(self, rows: RowFormat, keys: RowFormat, dtype: torch.dtype, topk: int) -> None:
        self._rows, self._keys, self._dtype, self._topk = rows, keys, dtype, topk

    def begin(self, parts: Sequence[PromptPart], device: torch.device) -> list[Tensor]:
        return [torch.empty(part.tokens, part.stop, dtype=torch.bool, device=device) for part in parts]

    def select(
        self, state: DeviceState, group: int, block: PromptBlock, index: mla.IndexProjected, scale: float
    ) -> None:
        for number, piece in block.pieces:
            own = index.of_tokens(block.place(piece))
            mask = self._mask(state, block.keys_of(group), piece.seat, piece.start, own, scale)
            block.keep_last(group, number, piece, mask[-1].nonzero().flatten())
            rows = block.prompts.selection[number][block.place_in_part(number, piece)]
            rows[:, : piece.stop] = mask
            rows[:, piece.stop :].fill_(False)  # assignment would copy the number, and wait for that

    def select_last(
        self,
        state: DeviceState,
        group: int,
        seat: int,
        position: int,
        index: mla.IndexProjected,
        scale: float,
        last: Tensor,
    ) -> None:
        _write_padded(self._mask(state, group, seat, position, index, scale)[-1].nonzero().flatten(), last)

    def _mask(
        self, state: DeviceState, group: int, seat: int, start: int, index: mla.IndexProjected, scale: float
    ) -> Tensor:
        """bool[S, start + S] of S tokens from `start` on."""
        stop = start + index.queries.shape[1]
        keys = self._keys.decode(read_index_keys(state, group, seat, stop), self._dtype)
        return mla.select_mask(index, keys, start, self._topk, scale)

    def attend(self, state: DeviceState, layer: Layer, block: PromptBlock) -> Tensor:
        projected = _taken(block)
        attended = _no_output(layer, block, projected)
        for number, piece in block.pieces:
            place = block.place(piece)
            mask = block.prompts.selection[number][block.place_in_part(number, piece), : piece.stop]
            rows = self._rows.decode(read_slab_rows(state, layer.number, piece.seat, piece.stop), self._dtype)
            own = projected.of_tokens(place)
            attended[:, place] = mla.attend_prompt(
                layer.attention, own, rows, mask.contiguous(), layer.forms.latent_scale, layer.sinks
            )
        return attended


class Gathered:
    """A selection is device rows int32[P, k], -1 padded. Raises and synchronises nothing.

    A block attends to as many entries as its longest piece has positions, up to the top-k: attend_rows adds in an order
    that depends on that width, and so it may not depend on what else is in the pass.
    """

    def __init__(self, topk: int) -> None:
        self._topk = topk

    def begin(self, parts: Sequence[PromptPart], device: torch.device) -> Tensor:
        return torch.full((parts[-1].end, self._width(parts)), -1, dtype=torch.int32, device=device)

    def select(
        self, state: DeviceState, group: int, block: PromptBlock, index: mla.IndexProjected, scale: float
    ) -> None:
        rows = block.prompts.selection[block.rows]
        positions = torch.empty_like(rows)
        queries, weights = index.queries[0].contiguous(), index.weights[0].contiguous()
        prompt_topk(state, block.keys_of(group), block.searched(), queries, weights, scale, positions, rows)
        for number, piece in block.pieces:
            block.keep_last(group, number, piece, positions[block.place(piece).stop - 1])

    def select_last(
        self,
        state: DeviceState,
        group: int,
        seat: int,
        position: int,
        index: mla.IndexProjected,
        scale: float,
        last: Tensor,
    ) -> None:
        piece = PromptPieces.of([PromptPiece(0, 1, seat, position)], last.device)
        queries, weights = index.queries[0].contiguous(), index.weights[0].contiguous()
        prompt_topk(state, group, piece, queries, weights, scale, last[None])

    def attend(self, state: DeviceState, layer: Layer, block: PromptBlock) -> Tensor:
        if not block.pieces:
            return _no_output(layer, block, _taken(block))
        chosen: Tensor = block.prompts.selection[block.rows]
        for gap in block.gaps():
            chosen[gap].fill_(-1)
        chosen = chosen[:, : self._width([piece for _, piece in block.pieces])].contiguous()
        queries = mla.absorb_queries(layer.absorbed, _taken(block))
        latents = queries.new_empty(*queries.shape[:2], layer.absorbed.value.shape[1])
        layer.attend(state.slab(layer.number), queries, chosen, latents)
        return mla.expand_values(layer.absorbed, latents).unsqueeze(0)

    def _width(self, parts: Sequence[PromptPart]) -> int:
        return self._entries(max(part.stop for part in parts))

    def _entries(self, positions: int) -> int:
        """Entries of a token that sees at most so many positions."""
        return min(self._topk, PAGE_TOKENS * pages_for(positions))


def _taken(block: PromptBlock) -> mla.Projected:
    """The projections of a block, which keeps them no longer."""
    projected, block.projected = block.projected, None
    assert projected is not None
    return projected


def _no_output(layer: Layer, block: PromptBlock, projected: mla.Projected) -> Tensor:
    """Zeros [1, B, H * v]."""
    return projected.query_nope.new_zeros(1, block.stop - block.first, layer.attention.o_proj.in_features)


def _write_padded(positions: Tensor, to: Tensor) -> None:
    """Write `positions` [n] to int32[k], k at least n, with -1 behind them."""
    to.fill_(-1)
    to[: len(positions)] = positions
