"""The layout of a context in bytes, on the host and on the device, for kernels and allocators.

A row is what one token leaves in one layer: for each of its *heads* one or two *planes* of any byte count from 1 up.
MLA has one head and one plane (latent and rope together); two planes are K and V, or values and their scales;
grouped-query attention has a head for each KV head. row_bytes counts all. A plane is an array of its own wherever rows
lie, so that each keeps the alignment of its own size and a kernel can read one without the others.

Host page: 64 tokens of every layer, one contiguous block, so that a page travels as a unit and a request can be
rebuilt from host memory alone. KV rows first, layer by layer; then index-key rows, one section per index group:

    0                 rows of layer 0      [64, row_bytes], or [64, planes[0]], then [64, planes[1]] and so on
    64*row_bytes      rows of layer 1
    ...
    L*64*row_bytes    index keys, group 0  [64, index_row_bytes]
    ...               index keys, group G-1
    page_bytes        (next page)

An *index group* is an anchor layer, which runs its own indexer, and the layers after it that share its top-k
(`indexer_types` of GLM-5); DeepSeek-V3.2 has one group per layer. Each head of a group selects for itself: a
*selection* is a group and a head, number group * heads + head. Layers of a group see the same top-k, so they share one
slot assignment: slot tables exist per selection, rows per layer. The first `dense` layers select nothing: all of their
rows are read.

A *slot* holds a *selection unit* of `slot_tokens` neighbouring tokens: one, or the 64 of a page where models select
blocks. A unit is looked up, evicted and loaded as a whole.

Device memory, counted in four kinds, the first three of 64 tokens each:

    hot chunk    64 device rows in every layer that selects: rows uint8[layers - dense, chunks*64, row_bytes]. Device
                 row `c*64+i` is row i of chunk c, the same number in every layer and plane. With several planes, the
                 bytes of a layer are [chunks*64, planes[0]], then [chunks*64, planes[1]] and so on.
    slab page    64 prompt rows in two layers, an even one and an odd one: slab_rows uint8[2, pages*64, row_bytes].
                 Rows of layer l lie in half l % 2, over those of layer l - 2; planes lie as in the arena.
    index page   64 index keys in every group: keys uint8[groups, pages, 64, index_row_bytes]; 64 rows in every dense
                 layer; and the slot map of the same tokens: slot_of uint16[selections, pages, 64 / slot_tokens],
                 0xFFFF = absent. Bookkeeping thus grows with the context held, not with the longest possible one.
    seat         one place in the decode batch with its tables: index_table, host_table, chunk_table.

Slots of a managed request with hot size H and T tail slots: 0..H+T-1. With n = 64 / slot_tokens slots in a chunk, slot
s lies in chunk_table[seat, s // n], place s % n of it. Chunks held: H/64 + 1 where slots hold a token (the tail's chunk
is used for T of 64 rows), H + T where they hold a page. A resident request has slot = unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from protocol.units import PAGE_TOKENS, SLOTS_MAX, TAIL_PAGES, managed_chunks

SLOT_ABSENT: Final = 0xFFFF
QUEUE_SLOTS: Final = 512  # of an eviction queue's first ring
QUEUE_RESERVE: Final = 1024  # of its second ring
QUEUE_RING: Final = QUEUE_SLOTS + QUEUE_RESERVE
QUEUE_WORDS: Final = 8  # its cursors
OPENED_PAGES: Final = 1024  # index pages of a context that a step keeps in the order of its batch
OPENED_CHUNKS: Final = -(-SLOTS_MAX // PAGE_TOKENS // 4) * 4  # hot chunks likewise, in whole vectors
OPENED_WORDS: Final = 4 + OPENED_PAGES + OPENED_CHUNKS
DENSE: Final = -1  # group of a layer that selects nothing
SLAB_LAYERS: Final = 2  # layers whose prompt rows the slab holds at a time

assert SLOTS_MAX <= SLOT_ABSENT  # a slot number never reads as absent


@dataclass(frozen=True)
class Geometry:
    """Shape of one model's rows. `group_of_layer[l]` is the index group of layer l, numbered in layer order; DENSE for
    the first layers, if they select nothing.

    `split` parts a head's row of two planes: bytes of the first one. 0: one plane. `topk` counts the units that a head
    selects at most.
    """

    layers: int
    row_bytes: int
    group_of_layer: tuple[int, ...]
    index_row_bytes: int
    topk: int
    split: int = 0
    heads: int = 1
    slot_tokens: int = 1

    @property
    def row_format(self) -> str:
        """What lies in a host page, in words. Pages with the rows of a draft model have more layers, hence another
        format: what is cached without them is not reused with them."""
        planes = f"{self.split}|{self.head_bytes - self.split}" if self.split else f"{self.head_bytes}"
        rows = planes if self.heads == 1 else f"{self.heads} times {planes}"
        return f"{self.layers} layers of {rows} bytes, {self.groups} index groups of {self.index_row_bytes}"

    def __post_init__(self) -> None:
        if self.heads < 1 or self.row_bytes % self.heads:
            raise ValueError(f"heads={self.heads}: a row of {self.row_bytes} bytes has not as many equal parts")
        if not 0 <= self.split < self.head_bytes:
            raise ValueError(
                f"split={self.split}: a row of {self.head_bytes} bytes parts after 1 to {self.head_bytes - 1}"
            )
        if self.slot_tokens not in (1, PAGE_TOKENS):
            raise ValueError(f"slot_tokens={self.slot_tokens}: a slot holds 1 token or {PAGE_TOKENS}")
        if len(self.group_of_layer) != self.layers:
            raise ValueError(f"group_of_layer has {len(self.group_of_layer)} entries for {self.layers} layers")
        selecting = self.group_of_layer[self.dense :]
        if list(selecting) != sorted(selecting) or set(selecting) != set(range(self.groups)) or not selecting:
            raise ValueError(f"group_of_layer={self.group_of_layer}: groups must be numbered in layer order from 0")

    @cached_property
    def dense(self) -> int:
        """The number of layers, the first ones, that select nothing."""
        return next((layer for layer, group in enumerate(self.group_of_layer) if group != DENSE), self.layers)

    @property
    def groups(self) -> int:
        return self.group_of_layer[-1] + 1

    @property
    def selections(self) -> int:
        return self.groups * self.heads

    @property
    def places(self) -> int:
        """Lists of device rows that tokens have: one for each selection, and one for all dense layers, if there are
        any."""
        return self.selections + (self.dense > 0)

    def place_of(self, layer: int, head: int) -> int:
        """Number of the list that rows of `head` in `layer` are in."""
        return self.selections if layer < self.dense else self.group_of_layer[layer] * self.heads + head

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's row."""
        return self.row_bytes // self.heads

    @property
    def planes(self) -> tuple[int, ...]:
        """Bytes of a row in each plane: those of head 0, then those of head 1 and so on."""
        return self._planes_of_head * self.heads

    def planes_of(self, head: int) -> range:
        """Numbers of the planes of `head`."""
        count = len(self._planes_of_head)
        return range(head * count, (head + 1) * count)

    def head_of(self, plane: int) -> int:
        """Number of the head that plane number `plane` belongs to."""
        return plane // len(self._planes_of_head)

    @property
    def _planes_of_head(self) -> tuple[int, ...]:
        return (self.split, self.head_bytes - self.split) if self.split else (self.head_bytes,)

    @property
    def page_slots(self) -> int:
        """Slots of a hot chunk, and units of a page."""
        return PAGE_TOKENS // self.slot_tokens

    @property
    def tail_chunks(self) -> int:
        """Chunks of a managed hot buffer that its tail has to itself."""
        return 1 if self.slot_tokens == 1 else TAIL_PAGES

    def slots_in(self, hot_size: int) -> int:
        """Ordinary slots of a hot buffer of `hot_size` tokens, whose managed_chunks(hot_size) chunks are granted."""
        return hot_size if self.slot_tokens == 1 else managed_chunks(hot_size) - TAIL_PAGES

    def buffer_chunks(self, hot_slots: int, tail_slots: int) -> int:
        """Chunks of a managed hot buffer of `hot_slots` and its tail."""
        return managed_chunks(hot_slots) if self.slot_tokens == 1 else hot_slots + tail_slots

    @property
    def page_bytes(self) -> int:
        return PAGE_TOKENS * (self.layers * self.row_bytes + self.groups * self.index_row_bytes)

    @property
    def chunk_bytes(self) -> int:
        """Device bytes of one hot chunk: rows of all layers that select, and per selection the slot tables (unit,
        stamp: int32)."""
        rows = PAGE_TOKENS * (self.layers - self.dense) * self.row_bytes
        return rows + self.page_slots * self.selections * 8

    @property
    def slab_page_bytes(self) -> int:
        """Device bytes of one slab page: prompt rows of SLAB_LAYERS layers."""
        return PAGE_TOKENS * SLAB_LAYERS * self.row_bytes

    @property
    def index_page_bytes(self) -> int:
        """Device bytes of one index page: keys of all groups, rows of dense layers, and slot maps of all selections."""
        tokens = PAGE_TOKENS * (self.groups * self.index_row_bytes + self.dense * self.row_bytes)
        return tokens + self.page_slots * self.selections * 2

    def index_offset(self, group: int) -> int:
        """Byte offset of `group`'s index keys in a host page."""
        return PAGE_TOKENS * (self.layers * self.row_bytes + group * self.index_row_bytes)

    def layers_of_group(self, group: int) -> tuple[int, ...]:
        return tuple(layer for layer, g in enumerate(self.group_of_layer) if g == group)
