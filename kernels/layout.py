"""The layout of a context in bytes, on the host and on the device, for kernels and allocators.

A row is what one token leaves in one layer, as one or two *planes* of any byte count from 1 up: one for MLA (latent and
rope together), two for K and V, or for values and their scales. row_bytes counts both. A plane is an array of its own
wherever rows lie, so that each keeps the alignment of its own size and a kernel can read one without the other.

Host page: 64 tokens of every layer, one contiguous block, so that a page travels as a unit and a request can be
rebuilt from host memory alone. KV rows first, layer by layer; then index-key rows, one section per index group:

    0                 rows of layer 0      [64, row_bytes], or [64, planes[0]] and then [64, planes[1]]
    64*row_bytes      rows of layer 1
    ...
    L*64*row_bytes    index keys, group 0  [64, index_row_bytes]
    ...               index keys, group G-1
    page_bytes        (next page)

An *index group* is an anchor layer, which runs its own indexer, and the layers after it that share its top-k
(`indexer_types` of GLM-5); DeepSeek-V3.2 has one group per layer. Layers of a group see the same top-k, so they share
one slot assignment: slot tables exist per group, rows per layer.

Device memory, counted in four units, the first three of 64 tokens each:

    hot chunk    64 device rows in every layer: rows uint8[layers, chunks*64, row_bytes]. Device row `c*64+i` is row i
                 of chunk c, the same number in every layer and plane. With two planes, the bytes of a layer are
                 [chunks*64, planes[0]] and then [chunks*64, planes[1]].
    slab page    64 prompt rows in two layers, an even one and an odd one: slab_rows uint8[2, pages*64, row_bytes].
                 Rows of layer l lie in half l % 2, over those of layer l - 2; planes lie as in the arena.
    index page   64 index keys in every group: keys uint8[groups, pages, 64, index_row_bytes]; and the slot map of the
                 same tokens: slot_of uint16[groups, pages, 64], 0xFFFF = absent. Bookkeeping thus grows with the
                 context held, not with the longest possible one.
    seat         one place in the decode batch with its tables: index_table, host_table, chunk_table.

Slots of a managed request with hot size H and T tail slots: 0..H+T-1; slot s lies in chunk_table[seat, s // 64], row
s % 64. Chunks held: H/64 + 1 (the tail's chunk is used for T of 64 rows). A resident request has slot = token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from protocol.units import PAGE_TOKENS, SLOTS_MAX

SLOT_ABSENT: Final = 0xFFFF
QUEUE_SLOTS: Final = 512  # of an eviction queue's first ring
QUEUE_RESERVE: Final = 1024  # of its second ring
QUEUE_RING: Final = QUEUE_SLOTS + QUEUE_RESERVE
QUEUE_WORDS: Final = 8  # its cursors
OPENED_PAGES: Final = 1024  # index pages of a context that a step keeps in the order of its batch
OPENED_CHUNKS: Final = -(-SLOTS_MAX // PAGE_TOKENS // 4) * 4  # hot chunks likewise, in whole vectors
OPENED_WORDS: Final = 4 + OPENED_PAGES + OPENED_CHUNKS
SLAB_LAYERS: Final = 2  # layers whose prompt rows the slab holds at a time

assert SLOTS_MAX <= SLOT_ABSENT  # a slot number never reads as absent


@dataclass(frozen=True)
class Geometry:
    """Shape of one model's rows. `group_of_layer[l]` is the index group of layer l, numbered in layer order.

    `split` parts a row of two planes: bytes of the first one. 0: one plane.
    """

    layers: int
    row_bytes: int
    group_of_layer: tuple[int, ...]
    index_row_bytes: int
    topk: int
    split: int = 0

    @property
    def row_format(self) -> str:
        """What lies in a host page, in words. Pages with the rows of a draft model have more layers, hence another
        format: what is cached without them is not reused with them."""
        planes = f"{self.split}|{self.row_bytes - self.split}" if self.split else f"{self.row_bytes}"
        return f"{self.layers} layers of {planes} bytes, {self.groups} index groups of {self.index_row_bytes}"

    def __post_init__(self) -> None:
        if not 0 <= self.split < self.row_bytes:
            raise ValueError(
                f"split={self.split}: a row of {self.row_bytes} bytes parts after 1 to {self.row_bytes - 1}"
            )
        if len(self.group_of_layer) != self.layers:
            raise ValueError(f"group_of_layer has {len(self.group_of_layer)} entries for {self.layers} layers")
        if list(self.group_of_layer) != sorted(self.group_of_layer) or set(self.group_of_layer) != set(
            range(self.groups)
        ):
            raise ValueError(f"group_of_layer={self.group_of_layer}: groups must be numbered in layer order from 0")

    @property
    def groups(self) -> int:
        return self.group_of_layer[-1] + 1

    @property
    def planes(self) -> tuple[int, ...]:
        """Bytes of a row in each plane."""
        return (self.split, self.row_bytes - self.split) if self.split else (self.row_bytes,)

    @property
    def page_bytes(self) -> int:
        return PAGE_TOKENS * (self.layers * self.row_bytes + self.groups * self.index_row_bytes)

    @property
    def chunk_bytes(self) -> int:
        """Device bytes of one hot chunk: rows of all layers, and per group the slot tables (token, stamp: int32)."""
        return PAGE_TOKENS * (self.layers * self.row_bytes + self.groups * 8)

    @property
    def slab_page_bytes(self) -> int:
        """Device bytes of one slab page: prompt rows of SLAB_LAYERS layers."""
        return PAGE_TOKENS * SLAB_LAYERS * self.row_bytes

    @property
    def index_page_bytes(self) -> int:
        """Device bytes of one index page: keys and slot map of all groups."""
        return PAGE_TOKENS * self.groups * (self.index_row_bytes + 2)

    def index_offset(self, group: int) -> int:
        """Byte offset of `group`'s index keys in a host page."""
        return PAGE_TOKENS * (self.layers * self.row_bytes + group * self.index_row_bytes)

    def layers_of_group(self, group: int) -> tuple[int, ...]:
        return tuple(layer for layer, g in enumerate(self.group_of_layer) if g == group)
