"""The device memory of a worker, and the inputs and outputs of a decode step, as preallocated tensors.

Nothing here is ever reallocated: streams, graphs and views keep the addresses. Sizes: S seats, C hot chunks, P slab
pages, N index pages, B rows of a step, G index groups, A selections (A = G where a layer has one head), L layers, D of
them dense, n slots of a chunk (64 where a slot holds a token, 1 where it holds a page), T tail slots, k = topk, R rows
of a seat in a step at most (seat_rows): 1, and a draft's rows.

    DeviceState   dtype   shape                        what, and which value means none
    rows          uint8   [L - D, C*64, row_bytes]     the arena; device row c*64+i is row i of chunk c in every layer.
                                                       With several planes, memory alone: `planes_of` has the rows
    dense_rows    uint8   [D, N*64, row_bytes]         rows of the dense layers, by index page likewise
    slab_rows     uint8   [2, P*64, row_bytes]         prompt rows of the last two layers written: layer l in l % 2
    index_keys    uint8   [G, N*64, index_row_bytes]   index key of each token held
    slot_of       int16   [A, N*n]                     bit pattern of a uint16: slot of the unit, 0xFFFF absent
    slot_token    int32   [A, C*n]                     unit in the slot that lies at this device row, -1 empty
    stamp         int32   [A, C*n]                     seat step at which the slot was last used, -1 empty
    eviction_queue  int32 [A, S, 8]                    cursors of the queue of slots to evict next, on CUDA alone
    queue_slot    int16   [A, S, 512+1024]             slots in that queue, two rings; bit patterns of a uint16
    queue_stamp   int32   [A, S, 512+1024]             stamp of each when queued: a slot whose stamp differs is skipped
    index_table   int32   [S, max_pages]               index page of each page of the context, -1 not granted
    host_table    int32   [S, max_pages]               host page likewise
    chunk_table   int32   [S, max_chunks]              hot chunk of slots 64i..64i+63, -1 none
    slab_table    int32   [S, P]                       slab page of each prompt page while prefilling, -1 none
    hot_slots     int32   [S]                          -1 empty seat, 0 resident (slot = unit), H managed
    tail          int32   [A, S, T]                    slot at ring place u % T of unit u, -1 unset
    now           int32   [S]                          steps since the hot buffer was set up
    granted_rows  int32   [S]                          positions below it may be written, where seat_rows is above 1
    hits, misses  int64   [A, S]                       top-k entries that got a row without a load, and loads
    tripwires     int64   [4]                          see Tripwire
    host          uint8   [host_pages, page_bytes]     the mapped pool

A unit is a token, or a page of 64 where slots hold one (kernels/layout.py); what a device row is in `slot_token` and
`stamp`, and in top-k and miss plans, is counted in units too.

Only `slot_of` entries of positions below the context's length mean anything: a page granted later holds what its last
owner left until begin_step writes the entry of each new token. `now` restarts with each hot buffer and grows by one
per token of a context, so it stays below CONTEXT_MAX_TOKENS and an int32 stamp never wraps.

Rows may have any byte count. Copies move words of the widest integer that divides it: a context's bytes are never
reinterpreted, only carried.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Final, Self

import torch
from torch import Tensor

from kernels.check import Sizes
from kernels.layout import OPENED_WORDS, QUEUE_RING, QUEUE_WORDS, SLAB_LAYERS, Geometry
from protocol.errors import BadInput
from protocol.units import PAGE_TOKENS, SEAT_ROWS_MAX, TAIL_SLOTS_MAX

ABSENT: Final = -1  # SLOT_ABSENT as the int16 that slot_of holds
SLOT_MASK: Final = 0xFFFF
UNLIMITED: Final = 2**31 - 1  # granted_rows of a seat whose rows end at its pages

assert 2 * SEAT_ROWS_MAX <= TAIL_SLOTS_MAX  # a seat of any R has the tail that it needs


class Tripwire(IntEnum):
    """Why a kernel refused inputs by which it would have touched foreign memory. Counts are 0 in a sound worker."""

    POSITION = 0  # top-k entry below -1 or not below the length
    UNGRANTED = 1  # position inside the length whose index page, host page or chunk is not granted
    VICTIMS = 2  # more distinct misses than slots that may be evicted: H < k
    SEAT = 3  # row of a step whose seat is out of range or empty, or whose length is below 1


@dataclass(eq=False)
class DeviceState:
    """See the table at the top of this file. `plane`, `words` and the `*_words` fields are views of the same bytes."""

    geometry: Geometry
    tail_slots: int
    seat_rows: int
    rows: Tensor
    dense_rows: Tensor
    slab_rows: Tensor
    index_keys: Tensor
    slot_of: Tensor
    slot_token: Tensor
    stamp: Tensor
    eviction_queue: Tensor
    queue_slot: Tensor
    queue_stamp: Tensor
    index_table: Tensor
    host_table: Tensor
    chunk_table: Tensor
    slab_table: Tensor
    hot_slots: Tensor
    tail: Tensor
    now: Tensor
    granted_rows: Tensor
    hits: Tensor
    misses: Tensor
    tripwires: Tensor
    host: Tensor
    planes: tuple[Tensor, ...] = field(init=False, repr=False)  # of uint8[L - D, C*64, geometry.planes[i]]
    dense_planes: tuple[Tensor, ...] = field(init=False, repr=False)  # of uint8[D, N*64, geometry.planes[i]]
    row_words: tuple[Tensor, ...] = field(init=False, repr=False)  # per plane, [L - D, C*64, words]
    dense_words: tuple[Tensor, ...] = field(init=False, repr=False)  # per plane, [D, N*64, words]
    key_words: Tensor = field(init=False, repr=False)  # [G, N*64, words]
    key_pages: Tensor = field(init=False, repr=False)  # uint8[G, N, 64, index_row_bytes]
    host_row_words: tuple[Tensor, ...] = field(init=False, repr=False)  # per plane, [host_pages, L, 64, words]
    host_key_words: Tensor = field(init=False, repr=False)  # [host_pages, G, 64, words]
    layer_ids: Tensor = field(init=False, repr=False)  # int64[L, 1]
    group_ids: Tensor = field(init=False, repr=False)  # int64[G, 1]
    selection_ids: Tensor = field(init=False, repr=False)  # int64[A, 1]
    group_of_layer: Tensor = field(init=False, repr=False)  # int64[L], -1 of dense layers

    def __post_init__(self) -> None:
        g = self.geometry
        pages, keys_begin = self.host.shape[0], g.index_offset(0)
        host_rows = self.host[:, :keys_begin].view(pages, g.layers, PAGE_TOKENS * g.row_bytes)
        self._place(self.rows, self.dense_rows)
        self._place_keys()
        self.host_row_words = tuple(plane.view(_word(plane.shape[-1])) for plane in _planes(host_rows, g.planes))
        key_word = _word(g.index_row_bytes)
        self.host_key_words = self.host[:, keys_begin:].view(key_word).view(pages, g.groups, PAGE_TOKENS, -1)
        device = self.rows.device
        self.layer_ids = torch.arange(g.layers, device=device).unsqueeze(1)
        self.group_ids = torch.arange(g.groups, device=device).unsqueeze(1)
        self.selection_ids = torch.arange(g.selections, device=device).unsqueeze(1)
        self.group_of_layer = torch.tensor(g.group_of_layer, device=device)

    @classmethod
    def allocate(
        cls,
        geometry: Geometry,
        *,
        seats: int,
        chunks: int,
        index_pages: int,
        max_pages: int,
        max_chunks: int,
        slab_pages: int,
        tail_slots: int,
        host: Tensor,
        device: torch.device | str = "cpu",
        seat_rows: int = 1,
    ) -> Self:
        """Empty seats, all tables unset. `host` is uint8[host_pages, page_bytes], used in place. Raises BadInput."""
        if not 1 <= seat_rows <= SEAT_ROWS_MAX:
            raise BadInput("out of range", field="seat_rows", value=seat_rows, remedy=f"1 to {SEAT_ROWS_MAX}")
        paged = geometry.slot_tokens > 1
        if torch.device(device).type == "cuda" and (paged or geometry.heads > 1 or geometry.dense):
            raise BadInput(
                "rows of several heads, slots of a page and dense layers have no kernels on a GPU",
                field="geometry",
                value=f"heads={geometry.heads}, slot_tokens={geometry.slot_tokens}, dense={geometry.dense}",
                remedy="allocate the state on a CPU",
            )
        # A row retires once it is accepted and backed up; a page, 64 positions behind the last that was written in it.
        least = 2 if paged else 1 if seat_rows == 1 else 2 * seat_rows
        if not least <= tail_slots <= TAIL_SLOTS_MAX:
            raise BadInput("out of range", field="tail_slots", value=tail_slots, remedy=f"{least} to {TAIL_SLOTS_MAX}")
        Sizes().check("host", host, ("host_pages", geometry.page_bytes), torch.uint8)
        groups, arena, keys = geometry.groups, chunks * PAGE_TOKENS, index_pages * PAGE_TOKENS
        selections, slots, units = geometry.selections, chunks * geometry.page_slots, index_pages * geometry.page_slots

        def filled(value: int, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            geometry=geometry,
            tail_slots=tail_slots,
            seat_rows=seat_rows,
            rows=filled(0, torch.uint8, geometry.layers - geometry.dense, arena, geometry.row_bytes),
            dense_rows=filled(0, torch.uint8, geometry.dense, keys, geometry.row_bytes),
            slab_rows=filled(0, torch.uint8, SLAB_LAYERS, slab_pages * PAGE_TOKENS, geometry.row_bytes),
            index_keys=filled(0, torch.uint8, groups, keys, geometry.index_row_bytes),
            slot_of=filled(ABSENT, torch.int16, selections, units),
            slot_token=filled(-1, torch.int32, selections, slots),
            stamp=filled(-1, torch.int32, selections, slots),
            eviction_queue=filled(-1, torch.int32, selections, seats, QUEUE_WORDS),
            queue_slot=filled(ABSENT, torch.int16, selections, seats, QUEUE_RING),
            queue_stamp=filled(-1, torch.int32, selections, seats, QUEUE_RING),
            index_table=filled(-1, torch.int32, seats, max_pages),
            host_table=filled(-1, torch.int32, seats, max_pages),
            chunk_table=filled(-1, torch.int32, seats, max_chunks),
            slab_table=filled(-1, torch.int32, seats, min(slab_pages, max_pages)),
            hot_slots=filled(-1, torch.int32, seats),
            tail=filled(-1, torch.int32, selections, seats, tail_slots),
            now=filled(0, torch.int32, seats),
            granted_rows=filled(UNLIMITED, torch.int32, seats),
            hits=filled(0, torch.int64, selections, seats),
            misses=filled(0, torch.int64, selections, seats),
            tripwires=filled(0, torch.int64, len(Tripwire)),
            host=host,
        )

    @property
    def seats(self) -> int:
        return self.hot_slots.shape[0]

    def buffer_chunks(self, hot_slots: int) -> int:
        """Return how many chunks a managed buffer of `hot_slots` has, those of its tail among them."""
        return self.geometry.buffer_chunks(hot_slots, self.tail_slots)

    def backup_steps(self, seat_rows: int) -> int:
        """Return how many steps of `seat_rows` rows a seat may be launched before the backup of the first is done: a
        slot leaves the tail no sooner (kernels/begin_step.py)."""
        written = self.tail_slots if self.geometry.slot_tokens == 1 else (self.tail_slots - 1) * PAGE_TOKENS
        return written // seat_rows

    def plane(self, layer: int, number: int) -> Tensor:
        """Return rows of `layer` in one plane: uint8[C*64, bytes] of the arena, uint8[N*64, bytes] of a dense layer."""
        dense = self.geometry.dense
        return self.dense_planes[number][layer] if layer < dense else self.planes[number][layer - dense]

    def words(self, layer: int, number: int) -> Tensor:
        """Return the rows of `plane` in words."""
        dense = self.geometry.dense
        return self.dense_words[number][layer] if layer < dense else self.row_words[number][layer - dense]

    def new_rows_of(self, batch: StepBatch, layer: int, head: int) -> Tensor:
        """Return the device rows int32[B] of the step's new tokens in `layer`, of one head."""
        return batch.new_rows[self.geometry.place_of(layer, head)]

    def slab(self, layer: int) -> DeviceState:
        """Return a view of this state whose rows of `layer` are the slab's, for kernels that take rows of one layer."""
        return self._slab_views[layer % SLAB_LAYERS]

    @cached_property
    def _slab_views(self) -> tuple[DeviceState, ...]:
        """Views by half of the slab. They share all other tensors: `replace` would copy ids to the device and wait."""
        with torch.inference_mode(False):  # the first caller may be inside, later ones outside
            return tuple(map(self._of_slab, self.slab_rows))

    def guest(self, seats: int) -> DeviceState:
        """Allocate a view of this state for prompts whose owner is another rank: rows lie in this slab, index keys
        uint8[1, P*64, index_row_bytes] of one group in memory of the view's own, as group 0. Tables int32[seats, P] are
        its own, one for both. For kernels that read and write prompts, and for no others."""
        self.slab(0)  # so that the view has the same halves
        view, pages, device = copy(self), self.slab_rows.shape[1] // PAGE_TOKENS, self.rows.device
        view.index_keys = torch.zeros(
            1, pages * PAGE_TOKENS, self.index_keys.shape[2], dtype=torch.uint8, device=device
        )
        view.index_table = view.slab_table = torch.full((seats, pages), -1, dtype=torch.int32, device=device)
        view.hot_slots = torch.full((seats,), -1, dtype=torch.int32, device=device)
        view._place_keys()
        return view

    def _of_slab(self, half: Tensor) -> DeviceState:
        view, g = copy(self), self.geometry
        view._place(half.expand(g.layers - g.dense, -1, -1), half.expand(g.dense, -1, -1))
        return view

    def _place(self, rows: Tensor, dense_rows: Tensor) -> None:
        """Set `rows` and `dense_rows`, and what is derived from them."""
        self.rows, self.planes = rows, _planes(rows.flatten(1), self.geometry.planes)
        self.dense_rows, self.dense_planes = dense_rows, _planes(dense_rows.flatten(1), self.geometry.planes)
        self.row_words, self.dense_words = (
            tuple(plane.view(_word(plane.shape[-1])) for plane in planes) for planes in (self.planes, self.dense_planes)
        )

    def _place_keys(self) -> None:
        """Set what is derived from `index_keys`."""
        self.key_words = self.index_keys.view(_word(self.geometry.index_row_bytes))
        self.key_pages = self.index_keys.unflatten(1, (self.index_keys.shape[1] // PAGE_TOKENS, PAGE_TOKENS))


@dataclass(eq=False)
class StepBatch:
    """Inputs and addresses of one decode step of up to S requests; filled by an upload op, then by begin_step.

    A seat appears once, with `seat_rows` = R rows at consecutive positions: its depths 0..R-1. Rows lie depth by depth:
    row `j * S + i` is row j of the i-th seat, B = R * S. Seats at or beyond `num_real` are padding. Where the state's
    seat_rows is 1, begin_step changes none of the inputs; elsewhere rows 0..S-1 of `seats` and `lengths` are inputs,
    and begin_step fills the rest and leaves length 0 wherever there is no row.
    """

    seats: Tensor  # int32[B], -1 padding
    lengths: Tensor  # int32[B]: tokens including the one this row writes, 0 no row
    inputs: Tensor  # int32[B]: token id fed, -1 = the last token sampled for the seat
    num_real: Tensor  # int32[1]: seats
    new_rows: Tensor  # int32[places, B]: device row of this row's token, -1 padding; written by begin_step
    new_index_rows: Tensor  # int32[B]: row of its index key, -1 padding; written by begin_step
    opened: Tensor  # int32[B, OPENED_WORDS]: seat, length and tables by row, of CUDA alone; written by begin_step
    rejected: Tensor  # int32[B]: 1 no row, or one whose selection did not fit; written where the state's R is above 1
    size: Tensor  # int32[1]: B
    seat_rows: int = 1

    @classmethod
    def allocate(
        cls,
        batch: int,
        places: int,
        device: torch.device | str = "cpu",
        *,
        decodes: bool = True,
        seat_rows: int = 1,
    ) -> Self:
        """`batch` rows of padding alone, of a model with `places` lists of device rows. `decodes`: with room for what
        begin_step leaves to swap_in. Raises BadInput unless `seat_rows` divides `batch`."""
        if not 1 <= seat_rows <= SEAT_ROWS_MAX or batch % seat_rows:
            remedy = f"1 to {SEAT_ROWS_MAX}, and a divisor of the batch"
            raise BadInput(f"does not fit a batch of {batch}", field="seat_rows", value=seat_rows, remedy=remedy)
        return cls(
            seats=_unset(batch, device=device),
            lengths=torch.zeros(batch, dtype=torch.int32, device=device),
            inputs=_unset(batch, device=device),
            num_real=torch.zeros(1, dtype=torch.int32, device=device),
            new_rows=_unset(places, batch, device=device),
            new_index_rows=_unset(batch, device=device),
            opened=_unset(batch if decodes else 0, OPENED_WORDS, device=device),
            rejected=torch.zeros(batch, dtype=torch.int32, device=device),
            size=torch.full((1,), batch, dtype=torch.int32, device=device),
            seat_rows=seat_rows,
        )

    def depths(self) -> list[slice]:
        """The rows of each depth, in order of position."""
        seats = self.seats.shape[0] // self.seat_rows
        return [slice(depth * seats, (depth + 1) * seats) for depth in range(self.seat_rows)]

    def at_depth(self, rows: slice) -> Self:
        """The batch of the rows that are one of `depths`, by views; `size` and `new_rows` stay those of all rows."""
        if rows == slice(0, len(self.seats)):
            return self
        return replace(
            self,
            seats=self.seats[rows],
            lengths=self.lengths[rows],
            inputs=self.inputs[rows],
            new_index_rows=self.new_index_rows[rows],
            opened=self.opened[rows],
            rejected=self.rejected[rows],
            seat_rows=1,
        )


@dataclass(eq=False)
class BackupPlan:
    """Where this step's rows and index keys lie, and where they go; written by begin_step, read by the backup stream.

    The reader keeps a ring of `DeviceState.backup_steps` plans, T // R where slots hold a token: `backed_up` of so many
    steps ago guards the plan that a step overwrites.
    """

    device_row: Tensor  # int32[places, B], -1 nothing to copy
    index_row: Tensor  # int32[B]
    host_page: Tensor  # int32[B]
    host_offset: Tensor  # int32[B]: token % 64

    @classmethod
    def allocate(cls, batch: int, places: int, device: torch.device | str = "cpu") -> Self:
        index_row, host_page, host_offset = (_unset(batch, device=device) for _ in range(3))
        return cls(_unset(places, batch, device=device), index_row, host_page, host_offset)


@dataclass(eq=False)
class MissPlan:
    """The copies that one swap_in made for its anchor layer, to be repeated for the other layers of the group.

    `device_row` and `host_offset` count units. Row b's copies are the first `count[b]` entries of row b; the others are
    undefined. One count per row needs no zeroed counter and no order between rows: a row's thread blocks write theirs
    by themselves.
    """

    device_row: Tensor  # int32[B, k]
    host_page: Tensor  # int32[B, k]
    host_offset: Tensor  # int32[B, k]
    count: Tensor  # int32[B]

    @classmethod
    def allocate(cls, batch: int, k: int, device: torch.device | str = "cpu") -> Self:
        device_row, host_page, host_offset = (_unset(batch, k, device=device) for _ in range(3))
        return cls(device_row, host_page, host_offset, torch.zeros(batch, dtype=torch.int32, device=device))

    def at_depth(self, rows: slice) -> Self:
        """The plan of the rows that are one of `depths`, by views."""
        if rows == slice(0, len(self.count)):
            return self
        return replace(
            self,
            device_row=self.device_row[rows],
            host_page=self.host_page[rows],
            host_offset=self.host_offset[rows],
            count=self.count[rows],
        )


def active_rows(state: DeviceState, batch: StepBatch) -> Tensor:
    """bool[B]: rows that decode in this step. Padding is not active, nor is a row that would trip Tripwire.SEAT."""
    return real_rows(batch) & _seated(state, batch)


def real_rows(batch: StepBatch) -> Tensor:
    """bool[B]: rows of seats below num_real. Of a batch with drafts, behind begin_step: those of them that are rows."""
    if batch.seat_rows == 1:
        return torch.arange(batch.seats.shape[0], device=batch.seats.device) < batch.num_real
    seats = torch.arange(batch.seats.shape[0] // batch.seat_rows, device=batch.seats.device)
    return (seats < batch.num_real).repeat(batch.seat_rows) & (batch.lengths >= 1)


def slot_rows(state: DeviceState, seat: int, slots: int) -> Tensor:
    """Device rows, in units, of slots 0..slots-1 of `seat`: int64[slots]; negative where there is no chunk."""
    each = state.geometry.page_slots
    chunks = state.chunk_table[seat, : -(-slots // each)].long()
    rows = chunks.unsqueeze(-1) * each + torch.arange(each, device=chunks.device)
    return rows.flatten()[:slots]


def _seated(state: DeviceState, batch: StepBatch) -> Tensor:
    held = state.hot_slots[batch.seats.long().clamp(0, state.seats - 1)] >= 0
    return held & (batch.seats >= 0) & (batch.seats < state.seats) & (batch.lengths >= 1)


def _unset(*shape: int, device: torch.device | str) -> Tensor:
    return torch.full(shape, -1, dtype=torch.int32, device=device)


def _planes(rows: Tensor, planes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Views [..., n, plane] of uint8[..., n * sum(planes)]: all rows of the first plane, then all of the second."""
    places = rows.shape[-1] // sum(planes)
    parts = rows.split([places * plane for plane in planes], dim=-1)
    return tuple(part.unflatten(-1, (places, plane)) for part, plane in zip(parts, planes, strict=True))


def _word(row_bytes: int) -> torch.dtype:
    """The widest integer that divides a row."""
    return next(
        (dtype for dtype in (torch.int64, torch.int32, torch.int16) if row_bytes % dtype.itemsize == 0), torch.uint8
    )
