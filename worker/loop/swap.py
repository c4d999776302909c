"""What moves between device and host memory, on which stream, behind which fence.

| operation | stream  | waits for                  | moves                                    | records            |
|-----------|---------|----------------------------|------------------------------------------|--------------------|
| stage     | stage   | prefill_written            | prompt rows and index keys, slab to host | staged, when asked |
| backup    | backup  | row_written                | a step's new rows and keys to host       | backed_up, durable |
| load_keys | load    |                            | index keys of a context or shared prefix | index_loaded       |
| reclaim   | load    | chunk_reclaimed            | nothing: chunks of a resized buffer      |                    |
| load_rows | load    |                            | rows of a resident context, to chunks;   | preloaded          |
|           |         |                            | of a shared prefix, to slab pages        |                    |
| load_topk | load    |                            | rows that a first step will ask for      | preloaded          |
| set_up    | compute | backed_up of the last step | nothing: slot tables of a changed buffer |                    |

Swap-in itself is no operation of this file: the runner launches it between its layers (worker/runners/base.py), and
replays on `swap`. Loads have a stream of their own: behind a context that returns, tens of milliseconds long, replays
would hold the whole batch up, and loads would wait behind a staging that waits for its prompt.

Staging follows prefill block by block and layer group by layer group (layer_groups.py), so that the copy of the last
block's last layers is all that is left when prefill ends. Places are computed on the host from page lists and travel
with the operation, on its own stream: no stream but `compute` reads the seat tables, which only `compute` edits. A
context that returns, or comes prefilled, has its rows loaded too when the hot buffer holds them all: its first step
misses nothing. One that does not fit begins with the rows of its last top-k, where that is known (warm_start.py), else
cold. Those are loaded by the copies that misses take, planned on the host: swap_in itself would read seat tables
and count misses of no step.

Rejected: staging from the seat tables on the device (a fence more, for edits); loading the newest rows of a context in
advance (the model may select none of them).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.copy_rows import copy_keys_to_device, copy_rows_to_device, copy_rows_to_host
from kernels.seat import grow_managed, hold_tokens, init_managed, init_resident, shrink_managed
from kernels.state import BackupPlan, DeviceState, MissPlan
from kernels.swap_in import replay_misses
from metrics.state import WorkerCounters
from protocol.arrays import Int32Array
from protocol.units import PAGE_TOKENS, pages_for
from worker.device.hot_buffer import HotBuffer, HotBufferChange, SetUp
from worker.device.pinned import host_tensor
from worker.streams import Fence, Streams

#: Tokens moved by one operation, or as many as have PIECE_BYTES, if more: a long context is many operations, so that
#: others get their turn on the link, and each takes some microseconds to begin and to end.
PIECE_TOKENS: Final = 4_096
PIECE_BYTES: Final = 2**25


class Swap:
    """Launches moves. Counts bytes when they are launched, and times what it launches."""

    def __init__(self, streams: Streams, state: DeviceState, counters: WorkerCounters) -> None:
        self._streams = streams
        self._state = state
        self.counters = counters
        g = state.geometry
        self._row_bytes = g.layers * g.row_bytes
        self._key_bytes = g.groups * g.index_row_bytes

    def stage(
        self,
        slab: Sequence[int],
        index_pages: Sequence[int],
        host_pages: Sequence[int],
        start: int,
        stop: int,
        layers: range,
    ) -> None:
        """Copy prompt rows start..stop-1 of `layers` to the host once prefill, launched before this call, has written
        them; all index keys with those of the last layer."""
        self._streams.stage.wait(self._streams.compute.record("prefill_written"))
        for first, last in _pieces(start, stop, len(layers) * self._state.geometry.row_bytes):
            places = self._places(first, last, host_pages, slab, index_pages)
            work = self._streams.timed(partial(self._stage, places, layers), self.counters.staging.spent)
            self._streams.stage.launch(f"stage {first}", work)
        keys = self._key_bytes if layers.stop == self._state.geometry.layers else 0
        self.counters.staged_bytes += (stop - start) * (len(layers) * self._state.geometry.row_bytes + keys)

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
        """Load index keys of positions 0..tokens-1."""
        for first, last in _pieces(0, tokens, self._key_bytes):
            places = self._places(first, last, host_pages, index_pages)
            work = self._streams.timed(partial(self._load_keys, places), self.counters.preloading.spent)
            self._streams.load.launch(f"load keys {first}", work)
        self.counters.preloaded_bytes += tokens * self._key_bytes
        return self._streams.load.record("index_loaded")

    def reclaim(self) -> None:
        """Chunks that steps launched so far may still read are about to have other rows loaded into them."""
        self._streams.load.wait(self._streams.compute.record("chunk_reclaimed"))

    def load_rows(
        self, chunks: Sequence[int], host_pages: Sequence[int], tokens: int, layers: range | None = None
    ) -> Fence:
        """Load rows of positions 0..tokens-1 of `layers` (of every one) into `chunks`, which no launched step reads,
        except reclaimed ones."""
        g = self._state.geometry
        layers = range(g.layers) if layers is None else layers
        for first, last in _pieces(0, tokens, len(layers) * g.row_bytes):
            places = self._places(first, last, host_pages, chunks)
            work = self._streams.timed(partial(self._load_rows, places, layers), self.counters.preloading.spent)
            self._streams.load.launch(f"load rows {first}", work)
        self.counters.preloaded_bytes += tokens * len(layers) * g.row_bytes
        return self._streams.load.record("preloaded")

    def load_topk(self, seat: int, buffer: HotBuffer, host_pages: Sequence[int], tokens: Sequence[Int32Array]) -> Fence:
        """Load rows of positions `tokens[group]`, distinct and in host memory, into the first slots of an empty managed
        buffer, as many as it has at most. Its chunks are as for `load_rows`."""
        counts = [len(positions) for positions in tokens]
        held = host_tensor(3, sum(counts), dtype=torch.int32, device=self._state.rows.device)
        held.numpy()[:] = (
            np.repeat(np.arange(len(counts)), counts),
            np.concatenate([np.arange(count) for count in counts]),
            np.concatenate(tokens),
        )
        self._streams.compute.launch("hold tokens", partial(self._hold, seat, buffer.hot_slots, held))
        places = self._topk_places(buffer.chunks, host_pages, tokens)
        work = self._streams.timed(partial(self._load_topk, places), self.counters.preloading.spent)
        self._streams.load.launch("load top-k", work)
        g = self._state.geometry
        rows = sum(count * len(g.layers_of_group(group)) for group, count in enumerate(counts))
        self.counters.preloaded_bytes += rows * g.row_bytes
        return self._streams.load.record("preloaded")

    def set_up(self, seat: int, change: HotBufferChange) -> None:
        """Set the slot tables of `seat` up as `change` says. Grown buffers need their chunk table first, shrunk ones
        still the old one."""
        hot_slots, work = change.buffer.hot_slots, None
        match change.set_up:
            case SetUp.RESIDENT:
                work = partial(init_resident, self._state, seat)
            case SetUp.MANAGED:
                work = partial(init_managed, self._state, seat, hot_slots, change.first_token, change.tokens)
            case SetUp.GROW:
                work = partial(grow_managed, self._state, seat, change.old_slots, hot_slots)
            case SetUp.SHRINK:
                work = partial(shrink_managed, self._state, seat, change.old_slots, hot_slots)
            case SetUp.NOTHING:
                return
        self._streams.compute.launch(f"set up {change.set_up.value}", work)

    def quiesce(self) -> list[Fence]:
        """Complete, all of them, once nothing launched so far on any stream can touch any memory."""
        streams = self._streams
        return [stream.record("quiesced") for stream in (streams.compute, streams.stage, streams.backup, streams.load)]

    # ---------------------------------------------------------------- operations

    def _stage(self, places: Tensor, layers: range) -> None:
        pages, offsets, rows, keys = self._upload(places)
        index_row = keys if layers.stop == self._state.geometry.layers else None
        copy_rows_to_host(self._state, self._in_all_groups(rows), index_row, pages, offsets, layers)

    def _load_keys(self, places: Tensor) -> None:
        pages, offsets, keys = self._upload(places)
        copy_keys_to_device(self._state, keys, pages, offsets)

    def _load_rows(self, places: Tensor, layers: range) -> None:
        pages, offsets, rows = self._upload(places)
        copy_rows_to_device(self._state, self._in_all_groups(rows), None, pages, offsets, layers)

    def _hold(self, seat: int, hot_slots: int, held: Tensor) -> None:
        groups, slots, tokens = self._upload(held)
        hold_tokens(self._state, seat, hot_slots, groups.long(), slots.long(), tokens.long())

    def _load_topk(self, places: Tensor) -> None:
        plans = places.to(self._state.rows.device, non_blocking=True)
        for layer, group in enumerate(self._state.geometry.group_of_layer):
            device_row, host_page, host_offset, count = plans[:, group].unsqueeze(1)
            replay_misses(self._state, layer, MissPlan(device_row, host_page, host_offset, count[:, 0]))

    def _upload(self, places: Tensor) -> tuple[Tensor, ...]:
        return places.to(self._state.rows.device, non_blocking=True).unbind()

    def _in_all_groups(self, rows: Tensor) -> Tensor:
        """int32[G, n]: every group keeps a prompt or resident context in the same chunks."""
        return rows.expand(self._state.geometry.groups, -1).contiguous()

    # ---------------------------------------------------------------- places

    def _topk_places(self, chunks: Sequence[int], host_pages: Sequence[int], tokens: Sequence[Int32Array]) -> Tensor:
        """int32[4, G, n]: the miss plan of each group, to be copied for its layers: device row, host page, place in it,
        and how many, in the first entry."""
        shape = 4, len(tokens), max(1, *map(len, tokens))
        places = host_tensor(*shape, dtype=torch.int32, device=self._state.rows.device)
        array, pages = places.numpy(), np.asarray(host_pages, np.int32)
        slots = np.arange(array.shape[2])
        array[0] = np.asarray(chunks, np.int32)[slots // PAGE_TOKENS] * PAGE_TOKENS + slots % PAGE_TOKENS
        for group, positions in enumerate(tokens):
            array[1, group, : len(positions)] = pages[positions // PAGE_TOKENS]
            array[2, group, : len(positions)] = positions % PAGE_TOKENS
            array[3, group, 0] = len(positions)
        return places

    def _places(self, first: int, last: int, host_pages: Sequence[int], *memories: Sequence[int]) -> Tensor:
        """int32[2 + memories, last - first], on the host: where positions first..last-1 lie, given the 64-token pages
        held in order. Host page and place in it; then the row in each of `memories`."""
        positions = np.arange(first, last)
        page, offset = positions // PAGE_TOKENS - first // PAGE_TOKENS, positions % PAGE_TOKENS
        held = slice(first // PAGE_TOKENS, pages_for(last))
        places = host_tensor(2 + len(memories), last - first, dtype=torch.int32, device=self._state.rows.device)
        array = places.numpy()
        array[0] = np.asarray(host_pages[held], dtype=np.int32)[page]
        array[1] = offset
        for row, pages in zip(array[2:], memories, strict=True):
            row[:] = np.asarray(pages[held], dtype=np.int32)[page] * PAGE_TOKENS + offset
        return places


def piece_tokens(token_bytes: int) -> int:
    """Tokens that one operation moves at most, where it moves `token_bytes` of each. Whole pages."""
    return max(PIECE_TOKENS, PIECE_BYTES // token_bytes // PAGE_TOKENS * PAGE_TOKENS)


def _pieces(start: int, stop: int, token_bytes: int) -> Iterable[tuple[int, int]]:
    size = piece_tokens(token_bytes)
    return ((first, min(first + size, stop)) for first in range(start, stop, size))
