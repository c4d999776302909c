"""What moves between device and host memory, on which stream, behind which fence.

| operation | stream  | waits for                  | moves                                    | records            |
|-----------|---------|----------------------------|------------------------------------------|--------------------|
| stage     | stage   | prefill_written            | a layer's prompt rows, slab to host;     | slab_staged;       |
|           |         |                            | with the last layer all index keys       | staged, when asked |
| refill    | refill  | slab_read; slab_staged of  | a layer's earlier rows of prompts, host  | refilled           |
|           |         | the passes before          | to slab                                  |                    |
| fill      | compute |                            | a layer's prompt rows, slab to chunks    |                    |
| backup    | backup  | row_written                | a step's new rows and keys to host       | backed_up, durable |
| load_keys | load    |                            | index keys of a context or shared prefix | index_loaded       |
| reclaim   | load    | chunk_reclaimed            | nothing: chunks of a resized buffer      |                    |
| load_rows | load    |                            | rows of a resident context, to chunks    | preloaded          |
| load_topk | load    |                            | rows that a first step will ask for      | preloaded          |
| set_up    | compute | backed_up of the last step | nothing: slot tables of a changed buffer |                    |

Swap-in itself is no operation of this file: the runner launches it between its layers (worker/runners/base.py), and
replays on `swap`. Loads have a stream of their own: behind a context that returns, tens of milliseconds long, replays
would hold the whole batch up, and loads would wait behind a staging that waits for its prompt. So have refills, which
wait for units, and which the next unit waits for.

Staging follows prefill block by block and layer by layer, so that the copy of the last block's last layer is all that
is left when prefill ends. Places are computed on the host from page lists and travel
with the operation, on its own stream: no stream but `compute` reads the seat tables, which only `compute` edits. A
context that returns, or comes prefilled, has its rows loaded too when the hot buffer holds them all: its first step
misses nothing. One that does not fit begins with the rows of its last top-k, where that is known (warm_start.py), else
cold. Those are loaded by the copies that misses take, planned on the host: swap_in itself would read seat tables
and count misses of no step.

Rejected: staging from the seat tables on the device (a fence more, for edits); loading the newest rows of a context in
advance (the model may select none of them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.copy_rows import copy_keys_to_device, copy_rows_to_device, copy_rows_to_host
from kernels.rows import copy_slab_pages
from kernels.seat import grow_managed, hold_tokens, init_managed, init_resident, shrink_managed
from kernels.state import BackupPlan, DeviceState, MissPlan
from kernels.swap_in import replay_misses
from metrics.state import WorkerCounters
from protocol.arrays import Int32Array
from protocol.units import PAGE_TOKENS, pages_for
from worker.device.hot_buffer import HotBuffer, HotBufferChange, SetUp, pages_taken
from worker.device.pinned import host_tensor
from worker.streams import Fence, Streams

#: Tokens moved by one operation, or as many as have PIECE_BYTES, if more: a long context is many operations, so that
#: others get their turn on the link, and each takes some microseconds to begin and to end.
PIECE_TOKENS: Final = 4_096
PIECE_BYTES: Final = 2**25
OFFSETS: Final = np.arange(PAGE_TOKENS, dtype=np.int32)


class StagedRows(NamedTuple):
    """Rows start..stop-1 of a prompt, and the pages that hold it."""

    slab: Sequence[int]
    index_pages: Sequence[int]
    host_pages: Sequence[int]
    start: int
    stop: int


class FillPlaces(NamedTuple):
    """Slab pages of a prompt, and where they go, int64[2, n]: to chunks, and of dense layers to index pages."""

    chunks: Tensor
    index_pages: Tensor


class Swap:
    """Launches moves. Counts bytes when they are launched, and times what it launches."""

    def __init__(
        self,
        streams: Streams,
        state: DeviceState,
        counters: WorkerCounters,
        refilled: Callable[[int, float], None] = lambda rows, seconds: None,
    ) -> None:
        """`refilled` is told of pieces of refills that have run: rows and seconds."""
        self._streams = streams
        self._state = state
        self.counters = counters
        self._refilled = refilled
        g = state.geometry
        self._row_bytes = (g.layers - g.dense) * g.row_bytes
        self._key_bytes = g.groups * g.index_row_bytes + g.dense * g.row_bytes
        self._dense = range(g.dense)

    def stage(self, rows: Sequence[StagedRows], layer: int) -> Fence:
        """Copy `rows` of `layer` to the host once prefill, launched before this call, has written them; all their index
        keys with the last layer. Returns `slab_staged`."""
        g, stage = self._state.geometry, self._streams.stage
        stage.wait(self._streams.compute.record("prefill_written"))
        places = self._places([(it.start, it.stop, (it.host_pages, it.slab, it.index_pages)) for it in rows])
        work = self._streams.timed(partial(self._stage, places, layer), self.counters.staging.spent)
        stage.launch(f"stage layer {layer}", work)
        keys = g.groups * g.index_row_bytes if layer == g.layers - 1 else 0
        self.counters.staged_bytes += places.shape[1] * (g.row_bytes + keys)
        return self.slab_staged()

    def slab_staged(self) -> Fence:
        """Complete once nothing staged so far is read from the slab any more."""
        return self._streams.stage.record("slab_staged")

    def staged(self) -> Fence:
        """Complete once everything staged so far is in host memory."""
        return self._streams.stage.record("staged")

    def backup(self, plan: BackupPlan, rows: int) -> tuple[Fence, Fence]:
        """Copy the new rows of the step launched last, `rows` of them; returns `backed_up` and `durable`."""
        backup, state = self._streams.backup, self._state
        backup.wait(self._streams.compute.record("row_written"))
        copy = partial(copy_rows_to_host, state, plan.device_row, plan.index_row, plan.host_page, plan.host_offset)
        backup.launch("backup", self._streams.timed(copy, self.counters.backing_up.spent))
        self.counters.backed_up_bytes += rows * (self._row_bytes + self._key_bytes)
        return backup.record("backed_up"), backup.record("durable")

    def load_keys(self, index_pages: Sequence[int], host_pages: Sequence[int], tokens: int) -> Fence:
        """Load index keys, and rows of dense layers, of positions 0..tokens-1."""
        for first, last in _pieces(0, tokens, self._key_bytes):
            places = self._places([(first, last, (host_pages, index_pages))])
            work = self._streams.timed(partial(self._load_keys, places), self.counters.preloading.spent)
            self._streams.load.launch(f"load keys {first}", work)
        self.counters.preloaded_bytes += tokens * self._key_bytes
        return self._streams.load.record("index_loaded")

    def reclaim(self) -> None:
        """Chunks that steps launched so far may still read are about to have other rows loaded into them."""
        self._streams.load.wait(self._streams.compute.record("chunk_reclaimed"))

    def load_rows(self, chunks: Sequence[int], host_pages: Sequence[int], tokens: int) -> Fence:
        """Load rows of positions 0..tokens-1 into `chunks`, which no launched step reads, except reclaimed ones."""
        for first, last in _pieces(0, tokens, self._row_bytes):
            places = self._places([(first, last, (host_pages, chunks))])
            work = self._streams.timed(partial(self._load_rows, places), self.counters.preloading.spent)
            self._streams.load.launch(f"load rows {first}", work)
        self.counters.preloaded_bytes += tokens * self._row_bytes
        return self._streams.load.record("preloaded")

    def await_staged(self) -> None:
        """Hold refills back until all that was staged so far is in host memory."""
        self._streams.refill.wait(self.slab_staged())

    def refill_places(self, slab: Sequence[int], host_pages: Sequence[int], tokens: int) -> list[Tensor]:
        """Return the places of rows 0..tokens-1 of a prompt, in pieces, for `refill` of any layer."""
        pieces = _pieces(0, tokens, self._state.geometry.row_bytes)
        return [self._places([(first, last, (host_pages, slab))]) for first, last in pieces]

    def refill(self, places: Sequence[Tensor], layer: int) -> Fence:
        """Load rows of `layer` at `places` into the slab, over those of layer - 2, which units launched before this
        call may read. Returns `refilled`."""
        refill = self._streams.refill
        refill.wait(self._streams.compute.record("slab_read"))
        for piece in places:
            work = self._streams.timed(partial(self._refill, piece, layer), partial(self._note_refill, piece.shape[1]))
            refill.launch(f"refill layer {layer}", work)
            self.counters.refilled_bytes += piece.shape[1] * self._state.geometry.row_bytes
        return refill.record("refilled")

    def _note_refill(self, rows: int, seconds: float) -> None:
        self.counters.refilling.spent(seconds)
        self._refilled(rows, seconds)

    def fill_places(
        self, slab: Sequence[int], buffer: HotBuffer, index_pages: Sequence[int], tokens: int
    ) -> FillPlaces:
        """Return where `fill` of any layer copies rows of a prompt: what `buffer` takes of it, and of dense layers
        all."""
        taken = pages_taken(buffer, tokens, self._state.geometry.tail_chunks)
        whole = range(pages_for(tokens) if self._dense else 0)
        return FillPlaces(
            self._page_pairs(slab[taken.start : taken.stop], buffer.chunks[: len(taken)]),
            self._page_pairs(slab[: len(whole)], index_pages[: len(whole)]),
        )

    def _page_pairs(self, slab: Sequence[int], targets: Sequence[int]) -> Tensor:
        """Return slab pages, and the pages that they go to, int64[2, n]."""
        places = host_tensor(2, len(slab), dtype=torch.int64, device=self._state.rows.device)
        places.numpy()[:] = slab, targets
        return places

    def fill(self, places: FillPlaces, layer: int) -> None:
        """Copy rows of `layer` at `places` from the slab to a hot buffer, or of a dense layer to index pages, behind
        the units launched so far."""
        pairs = places.index_pages if layer in self._dense else places.chunks
        self._streams.compute.launch(f"fill hot buffer {layer}", partial(self._fill, pairs, layer))

    def load_topk(self, seat: int, buffer: HotBuffer, host_pages: Sequence[int], tokens: Sequence[Int32Array]) -> Fence:
        """Load the units `tokens[selection]`, distinct and in host memory, into the first slots of an empty managed
        buffer, as many as it has at most. Its chunks are as for `load_rows`."""
        counts = [len(positions) for positions in tokens]
        held = host_tensor(3, sum(counts), dtype=torch.int32, device=self._state.rows.device)
        held.numpy()[:] = (
            np.repeat(np.arange(len(counts)), counts),
            np.concatenate([np.arange(count) for count in counts]),
            np.concatenate(tokens),
        )
        self._streams.compute.launch("hold tokens", partial(self._hold, seat, self.slots_in(buffer.hot_slots), held))
        places = self._topk_places(buffer.chunks, host_pages, tokens)
        work = self._streams.timed(partial(self._load_topk, places), self.counters.preloading.spent)
        self._streams.load.launch("load top-k", work)
        g = self._state.geometry
        units = sum(count * len(g.layers_of_group(each // g.heads)) for each, count in enumerate(counts))
        self.counters.preloaded_bytes += units * g.slot_tokens * g.head_bytes
        return self._streams.load.record("preloaded")

    def set_up(self, seat: int, change: HotBufferChange) -> None:
        """Set the slot tables of `seat` up as `change` says. Grown buffers need their chunk table first, shrunk ones
        still the old one."""
        hot_slots, old_slots = self.slots_in(change.buffer.hot_slots), self.slots_in(change.old_slots)
        work = None
        match change.set_up:
            case SetUp.RESIDENT:
                work = partial(init_resident, self._state, seat)
            case SetUp.MANAGED:
                work = partial(init_managed, self._state, seat, hot_slots, change.first_token, change.tokens)
            case SetUp.GROW:
                work = partial(grow_managed, self._state, seat, old_slots, hot_slots)
            case SetUp.SHRINK:
                work = partial(shrink_managed, self._state, seat, old_slots, hot_slots)
            case SetUp.NOTHING:
                return
        self._streams.compute.launch(f"set up {change.set_up.value}", work)

    def slots_in(self, hot_size: int) -> int:
        """Return the ordinary slots of a hot buffer of `hot_size` tokens; 0 of a resident one."""
        return self._state.geometry.slots_in(hot_size) if hot_size else 0

    def quiesce(self) -> list[Fence]:
        """Complete, all of them, once nothing launched so far on any stream can touch any memory."""
        it = self._streams
        return [stream.record("quiesced") for stream in (it.compute, it.stage, it.backup, it.load, it.refill)]

    # ---------------------------------------------------------------- operations

    def _stage(self, places: Tensor, layer: int) -> None:
        pages, offsets, rows, keys = self._upload(places)
        index_row, of = keys if layer == self._state.geometry.layers - 1 else None, range(layer, layer + 1)
        copy_rows_to_host(self._state.slab(layer), self._in_all_places(rows), index_row, pages, offsets, of)

    def _refill(self, places: Tensor, layer: int) -> None:
        pages, offsets, rows = self._upload(places)
        of = range(layer, layer + 1)
        copy_rows_to_device(self._state.slab(layer), self._in_all_places(rows), None, pages, offsets, of)

    def _fill(self, places: Tensor, layer: int) -> None:
        slab_pages, chunks = self._upload(places)
        copy_slab_pages(self._state, layer, slab_pages, chunks)

    def _load_keys(self, places: Tensor) -> None:
        pages, offsets, keys = self._upload(places)
        copy_keys_to_device(self._state, keys, pages, offsets)
        if self._dense:
            copy_rows_to_device(self._state, self._in_all_places(keys), None, pages, offsets, self._dense)

    def _load_rows(self, places: Tensor) -> None:
        pages, offsets, rows = self._upload(places)
        selecting = range(self._dense.stop, self._state.geometry.layers)
        copy_rows_to_device(self._state, self._in_all_places(rows), None, pages, offsets, selecting)

    def _hold(self, seat: int, hot_slots: int, held: Tensor) -> None:
        groups, slots, tokens = self._upload(held)
        hold_tokens(self._state, seat, hot_slots, groups.long(), slots.long(), tokens.long())

    def _load_topk(self, places: Tensor) -> None:
        plans = places.to(self._state.rows.device, non_blocking=True)
        g = self._state.geometry
        for layer, head in product(range(g.dense, g.layers), range(g.heads)):
            device_row, host_page, host_offset, count = plans[:, g.place_of(layer, head)].unsqueeze(1)
            replay_misses(self._state, layer, MissPlan(device_row, host_page, host_offset, count[:, 0]), head)

    def _upload(self, places: Tensor) -> tuple[Tensor, ...]:
        return places.to(self._state.rows.device, non_blocking=True).unbind()

    def _in_all_places(self, rows: Tensor) -> Tensor:
        """int32[places, n]: every selection keeps a prompt or resident context in the same chunks."""
        return rows.expand(self._state.geometry.places, -1).contiguous()

    # ---------------------------------------------------------------- places

    def _topk_places(self, chunks: Sequence[int], host_pages: Sequence[int], tokens: Sequence[Int32Array]) -> Tensor:
        """int32[4, A, n]: the miss plan of each selection, to be copied for its layers: device row, host page, place in
        it, and how many, in the first entry."""
        shape = 4, len(tokens), max(1, *map(len, tokens))
        places = host_tensor(*shape, dtype=torch.int32, device=self._state.rows.device)
        array, pages = places.numpy(), np.asarray(host_pages, np.int32)
        slots, each = np.arange(array.shape[2]), self._state.geometry.page_slots
        array[0] = np.asarray(chunks, np.int32)[slots // each] * each + slots % each
        for group, positions in enumerate(tokens):
            array[1, group, : len(positions)] = pages[positions // each]
            array[2, group, : len(positions)] = positions % each
            array[3, group, 0] = len(positions)
        return places

    def _places(self, spans: Sequence[tuple[int, int, Sequence[Sequence[int]]]]) -> Tensor:
        """int32[1 + lists, n], on the host: where positions first..last-1 of each span lie, given lists of the 64-token
        pages that hold its positions from 0 on, host pages first. Host page and place in it; then the row in each of
        the other lists."""
        count, lists = sum(last - first for first, last, _ in spans), len(spans[0][2])
        places = host_tensor(1 + lists, count, dtype=torch.int32, device=self._state.rows.device)
        begin = 0
        for first, last, held in spans:
            array = places.numpy()[:, begin : begin + last - first]
            begin += last - first
            lead, pages = first % PAGE_TOKENS, slice(first // PAGE_TOKENS, pages_for(last))
            inside = slice(lead, lead + last - first)
            host, *rows = (np.asarray(it[pages], np.int32)[:, None] for it in held)
            array[0] = np.repeat(host, PAGE_TOKENS)[inside]
            array[1] = np.tile(OFFSETS, len(host))[inside]
            for target, of in zip(array[2:], rows, strict=True):
                target[:] = (of * PAGE_TOKENS + OFFSETS).ravel()[inside]
        return places


def piece_tokens(token_bytes: int) -> int:
    """Tokens that one operation moves at most, where it moves `token_bytes` of each. Whole pages."""
    return max(PIECE_TOKENS, PIECE_BYTES // token_bytes // PAGE_TOKENS * PAGE_TOKENS)


def _pieces(start: int, stop: int, token_bytes: int) -> Iterable[tuple[int, int]]:
    size = piece_tokens(token_bytes)
    return ((first, min(first + size, stop)) for first in range(start, stop, size))
