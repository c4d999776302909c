"""What host and device share: constants, enumerations, tables and kernel parameters. The one definition of all of them.

`python -m kernels.cuda.header` writes it down for the device, as src/layout.cuh. ctypes lays the structures out as C
does; the header asserts each size, so that every compilation checks it.

A member is (C type, names, comment). A pointer, `u8*`, is typed on the device and a c_void_p here. Neighbours of one
type may share a line, "rows, k"; "page[OPENED_PAGES]" is an array.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, ClassVar, Final, cast

from kernels.layout import OPENED_CHUNKS, OPENED_PAGES, QUEUE_RESERVE, QUEUE_RING, QUEUE_SLOTS, QUEUE_WORDS, SLOT_ABSENT
from kernels.state import Tripwire
from protocol.units import CONTEXT_MAX_TOKENS, PAGE_TOKENS, SLOTS_MAX, TAIL_SLOTS_MAX, TOPK_MAX

# Blocks of kernels: threads, and dynamic shared memory (any device since sm_80 has room for swap_in's).
ROTATE_THREADS: Final = 256
COPY_ROWS_THREADS: Final = 256
ROWS_THREADS: Final = 256
SEAT_THREADS: Final = 256
ENCODE_THREADS: Final = 256
SWAP_IN_SHARED_BYTES: Final = 99_568
QUANTIZE_THREADS: Final = 256
SUM_THREADS: Final = 128
PLACE_THREADS: Final = 1024
#: Of one rank, at most: place_rows counts them in shared memory.
EXPERTS_MAX: Final = 1024
# index_topk
UNIT: Final = 16
BATCH_MAX: Final = 1024
BINS: Final = 8192
COARSE_BINS: Final = 256
COUNTERS: Final = 4


class SeatChangeKind(IntEnum):
    """What change_slots does."""

    INIT = 0
    SHRINK = 1
    GROW = 2


CONSTANTS: Final = {  # value and comment
    "PAGE_TOKENS": (PAGE_TOKENS, ""),
    "SLOT_ABSENT": (SLOT_ABSENT, "greater than any slot"),
    "SLOTS_MAX": (SLOTS_MAX, "largest hot buffer and its tail chunk"),
    "TAIL_SLOTS_MAX": (TAIL_SLOTS_MAX, ""),
    "TOPK_MAX": (TOPK_MAX, ""),
    "CONTEXT_MAX_TOKENS": (CONTEXT_MAX_TOKENS, ""),
    "QUEUE_SLOTS": (QUEUE_SLOTS, "of an eviction queue's first ring"),
    "QUEUE_RESERVE": (QUEUE_RESERVE, "of its second ring"),
    "QUEUE_RING": (QUEUE_RING, "of both"),
    "OPENED_PAGES": (OPENED_PAGES, "index pages of a context in an OpenedRow"),
    "OPENED_CHUNKS": (OPENED_CHUNKS, "hot chunks likewise, in whole vectors"),
    "ROTATE_THREADS": (ROTATE_THREADS, "of a block of rotate_tail"),
    "COPY_ROWS_THREADS": (COPY_ROWS_THREADS, "of a block of copy_rows"),
    "ROWS_THREADS": (ROWS_THREADS, "of a block of store_rows, fetch_rows, store_keys, fetch_keys"),
    "SEAT_THREADS": (SEAT_THREADS, "of a block of change_slots, close_change"),
    "ENCODE_THREADS": (ENCODE_THREADS, "of a block of encode_fp4"),
    "SWAP_IN_SHARED_BYTES": (SWAP_IN_SHARED_BYTES, "of a block of swap_in"),
    "QUANTIZE_THREADS": (QUANTIZE_THREADS, "of a block of quantize_rows, quantize_gated"),
    "SUM_THREADS": (SUM_THREADS, "of a block of sum_rows"),
    "PLACE_THREADS": (PLACE_THREADS, "of a block of place_rows"),
    "EXPERTS_MAX": (EXPERTS_MAX, "of one rank: place_rows counts them in shared memory"),
    "UNIT": (UNIT, "index keys that a warp scores together"),
    "BATCH_MAX": (BATCH_MAX, "rows of index_topk"),
    "BINS": (BINS, "of a row's histogram of scores: a power of two"),
    "COARSE_BINS": (COARSE_BINS, "behind them: sums of neighbours"),
    "COUNTERS": (COUNTERS, "of a row, in words: UNGRANTED_ROW"),
}
UNSIGNED: Final = ("SLOT_ABSENT",)  # of CONSTANTS: u32 on the device; the others are int
ENUMERATIONS: Final[tuple[type[IntEnum], ...]] = (Tripwire, SeatChangeKind)

SCALARS: Final[dict[str, type]] = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "float": ctypes.c_float,
}
Member = tuple[str, str] | tuple[str, str, str]  # C type, names, comment


class Structure(ctypes.Structure):
    """Docstring and comments go to the header. `align`: bytes, where C would choose less."""

    members: ClassVar[tuple[Member, ...]]
    align: ClassVar[int] = 0


def fields(members: tuple[Member, ...]) -> list[tuple[str, type]]:
    """`members` as ctypes wants them."""
    return [(name, type_of(kind, extent)) for kind, names, *_ in members for name, extent in names_of(names)]


def names_of(names: str) -> Iterator[tuple[str, int]]:
    """Name and extent of each of "host_rows[2]", "rows, k"; extent 0: no array."""
    for name, extent in re.findall(r"(\w+)(?:\[(\w+)\])?", names):
        yield name, CONSTANTS[extent][0] if extent in CONSTANTS else int(extent or 0)


def type_of(kind: str, extent: int) -> type:
    known = {**SCALARS, **{structure.__name__: structure for structure in Structure.__subclasses__()}}
    one: Any = ctypes.c_void_p if kind.endswith("*") else known[kind]
    return cast("type", one * extent if extent else one)


class EvictionQueue(Structure):
    """Cursors of a seat's eviction queue (src/eviction_queue.cuh): two rings, of QUEUE_SLOTS places and, behind it, of
    QUEUE_RESERVE. All -1: empty."""

    members = (
        ("i32", "begin, count", "of the first ring: a multiple of a warp's places; places in use"),
        ("i32", "reserve_begin", "slots that were ever moved out of the reserve"),
        ("i32", "reserve_end", "slots that were ever added to the reserve"),
        ("i32", "stamp, slot", "all older slots, and those of this stamp up to `slot`, are or have been queued"),
        ("i32", "refills_wanted, refills_done", "refills ever asked for; value of refills_wanted at the last refill"),
    )
    _fields_ = fields(members)


assert ctypes.sizeof(EvictionQueue) == 4 * QUEUE_WORDS


class OpenedRow(Structure):
    """What begin_step leaves of a batch row, so that a swap_in need not wait for the seat's number before it asks for
    the seat's tables."""

    align = 16
    members = (
        ("i32", "seat, length, hot, now", "hot -1: padding, or a seat that was refused"),
        ("i32", "page[OPENED_PAGES]", "index pages of the context's beginning, as far as it goes; -1 not granted"),
        ("i32", "chunk[OPENED_CHUNKS]", "of the hot buffer, likewise"),
    )
    _fields_ = fields(members)


class State(Structure):
    """Tables of a device (kernels/state.py has their shapes, and what each value means)."""

    members = (
        ("u8*", "rows"),
        ("u8*", "index_keys"),
        ("u16*", "slot_of"),
        ("i32*", "slot_token"),
        ("i32*", "stamp"),
        ("EvictionQueue*", "eviction_queue", "[groups, seats]"),
        ("u16*", "queue_slot", "[groups, seats, QUEUE_RING]"),
        ("i32*", "queue_stamp", "their stamps when they were queued"),
        ("const i32*", "index_table"),
        ("const i32*", "host_table"),
        ("const i32*", "chunk_table"),
        ("i32*", "hot_slots"),
        ("i32*", "tail"),
        ("i32*", "now"),
        ("i64*", "hits"),
        ("i64*", "misses"),
        ("i64*", "tripwires"),
        ("u8*", "host"),
        ("i64", "arena_rows, key_rows, page_bytes"),
        ("i32", "seats, max_pages, max_chunks, tail_slots, layers, groups"),
    )
    _fields_ = fields(members)


class Batch(Structure):
    """A StepBatch."""

    members = (
        ("const void*", "seats", "int32 or int64 [batch]"),
        ("const void*", "lengths", "likewise"),
        ("const i32*", "num_real"),
        ("i32", "size"),
        ("i32", "wide_seats, wide_lengths", "1 when int64"),
        ("i32", "unused"),
    )
    _fields_ = fields(members)


class Plan(Structure):
    """A MissPlan."""

    members = (
        ("i32*", "device_row", "[batch*k]: row b's copies begin at b*k"),
        ("i32*", "host_page", "likewise"),
        ("i32*", "host_offset", "likewise"),
        ("i32*", "count", "[batch]"),
    )
    _fields_ = fields(members)


class SwapIn(Structure):
    """What is read first lies together: parameters come by cache lines, too."""

    members = (
        ("const OpenedRow*", "opened", "[rows]"),
        ("const i32*", "topk", "[rows, k]"),
        ("i32*", "out_rows", "[rows, k]"),
        ("i32", "rows, k"),
        ("i32", "slots_limit", "slots that a seat can have"),
        ("u32", "block_entries", "top-k entries of one block: a power of two, whole warps"),
        ("i32", "copies", "0: everything but the copies"),
        ("u32", "page_bytes", "as in state"),
        ("i32", "refill_blocks", "1: blocks behind those of the rows refill eviction queues"),
        ("u32", "zero", "always 0, which the compiler does not know"),
        ("const u8*", "host_rows[2]", "of the anchor layer, by plane: in host page 0"),
        ("u8*", "device_rows[2]", "likewise: in its arena"),
        ("State", "state", "slot_of, slot_token, stamp, queues, tail, hits and misses of one group"),
        ("Plan", "plan"),
        ("i32*", "rejected", "[rows]: of the rows of a draft"),
    )
    _fields_ = fields(members)


class BeginStep(Structure):
    members = (
        ("State", "state"),
        ("Batch", "batch"),
        ("i32*", "new_rows", "[groups, batch]"),
        ("i32*", "new_index_rows", "[batch]"),
        ("OpenedRow*", "opened", "[batch]"),
        ("i32*", "device_row", "[groups, batch]"),
        ("i32*", "index_row", "[batch]"),
        ("i32*", "host_page", "[batch]"),
        ("i32*", "host_offset", "[batch]"),
        ("const i32*", "granted_rows", "[seats]"),
        ("i32*", "rejected", "[batch]"),
        ("i32", "seat_rows, unused", "rows of a seat in this batch"),
    )
    _fields_ = fields(members)


class ReplayMisses(Structure):
    members = (("State", "state"), ("Plan", "plan"), ("i32", "k, layer, rows, unused"))
    _fields_ = fields(members)


class CopyRows(Structure):
    members = (
        ("State", "state"),
        ("const i64*", "group_of_layer"),
        ("const void*", "device_row", "int32 or int64 [groups, n]; null: index keys alone"),
        ("const void*", "index_row", "[n]; null: rows alone"),
        ("const void*", "host_page", "[n]"),
        ("const void*", "host_offset", "[n]"),
        ("i32", "n"),
        ("i32", "wide_device_row, wide_index_row", "1 when int64"),
        ("i32", "wide_host_page, wide_host_offset", "likewise"),
        ("i32", "to_host"),
    )
    _fields_ = fields(members)


class MoveRows(Structure):
    members = (
        ("u8*", "section", "rows of one layer, or keys of one group"),
        ("void*", "data", "[n, bytes]"),
        ("const i32*", "places", "[n] rows of the section, -1: none; null: by table"),
        ("const i32*", "table", "pages of one seat"),
        ("i64*", "tripwires"),
        ("i64", "start", "position of the first row"),
        ("i32", "n, plane"),
    )
    _fields_ = fields(members)


class SeatChange(Structure):
    members = (
        ("State", "state"),
        ("i32", "seat, kind"),
        ("i32", "old_slots, hot_slots"),
        ("i32", "first_slot, chunks", "slots from here to the end of the last chunk are set"),
        ("i32", "first_token, tokens", "what slots 0.. hold from now on"),
    )
    _fields_ = fields(members)


class IndexTopk(Structure):
    members = (
        ("State", "state"),
        ("Batch", "batch"),
        ("const void*", "queries", "[batch, heads, dim]"),
        ("const float*", "weights", "[batch, heads]"),
        ("i32*", "topk_out", "[batch, k]"),
        ("float*", "scores", "[capacity]"),
        ("u32*", "histogram", "[rows, BINS + COARSE_BINS]"),
        ("i32*", "counters", "[rows, COUNTERS]"),
        ("i64", "capacity"),
        ("float", "scale"),
        ("i32", "k, group, rows"),
    )
    _fields_ = fields(members)


class IndexPart(Structure):
    """Neighbouring rows of a block, of one prompt."""

    members = (
        ("i32", "first_job", "number of its first job, of those of all parts"),
        ("i32", "row, tokens", "first row of the block; how many"),
        ("i32", "seat, start", "position of the first row"),
    )
    _fields_ = fields(members)


class PromptIndex(Structure):
    members = (
        ("State", "state"),
        ("const void*", "queries", "bfloat16 [rows, heads, dim]"),
        ("const float*", "weights", "[rows, heads]"),
        ("const IndexPart*", "part", "[parts], in order of their jobs"),
        ("const i32*", "slab_table", "[seats, slab_pages]"),
        ("i32*", "topk_out", "[rows, k]: positions"),
        ("i32*", "rows_out", "likewise: their rows in the slab; null: none"),
        ("u32*", "lists", "[blocks, 8, 2, 4096]: keys and positions (prompt_list.cuh)"),
        ("u32*", "heads", "[blocks, 8, 4]: count, bar, least and most of each list, where splits > 1"),
        ("float", "scale"),
        ("i32", "k, group, parts, jobs"),
        ("i32", "splits", "blocks that share the keys of a job; above 1, jobs * splits in all, then prompt_merge"),
        ("i32", "slab_pages, unused"),
    )
    _fields_ = fields(members)


class AttendRows(Structure):
    members = (
        ("const u8*", "rows", "of one layer"),
        ("const void*", "queries", "[batch, heads, dim]"),
        ("const i32*", "entries", "[batch, k]"),
        ("void*", "out", "[batch, heads, latent]"),
        ("float", "scale", "times log2(e)"),
        ("i32", "heads, k, splits"),
        ("i32", "span", "entries of a split"),
        ("const float*", "sinks", "[heads]; null without SINKS"),
    )
    _fields_ = fields(members)


class TensorMap(Structure):
    """A CUtensorMap, as the driver encodes it."""

    align = 64
    members = (("u32", "words[32]"),)
    _fields_ = fields(members)


class BlockLinear(Structure):
    """A product with block-FP8 weights: out [tokens, n] of one weight, or by experts (kernels/cuda/block_linear.py)."""

    members = (
        ("TensorMap", "codes", "[n / 2, 2, K], of all experts"),
        ("TensorMap", "others", "gate and up: up, and `codes` is gate, both [n, 1, K] of all experts"),
        ("TensorMap", "hidden", "[tokens, K]"),
        ("const float*", "scales", "[ceil(n / 128), blocks], of all experts"),
        ("const float*", "other_scales", "of `others`"),
        ("u16*", "out", "[tokens, n]"),
        ("float*", "partial", "[ranges, rows, tokens] of tiles; null where no range begins inside of a tile"),
        ("i32*", "flags", "[ranges, teams]: zero between launches"),
        ("const i32*", "tile_expert", "[jobs_max] of tiles of tokens, -1 behind them; dense: null"),
        ("const i32*", "slots", "[jobs_max, tokens of a tile] rows of `out`, -1: none; unless down: null"),
        ("i32", "tokens, n"),
        ("i32", "blocks", "of K"),
        ("i32", "units", "tiles * blocks; by experts: known to the device"),
        ("i32", "token_tiles", "dense"),
        ("i32", "row_tiles, jobs_max", "by experts"),
        ("float", "limit", "gate and up: of both products, of gate from above"),
        ("i32", "unused[10]"),
    )
    _fields_ = fields(members)


class EncodeRows(Structure):
    members = (
        ("const u8*", "values", "[n, values], bfloat16 or float32"),
        ("u8*", "out", "rows of four bits"),
        ("const i32*", "places", "[n] rows of `out`; -1: none; null: their numbers"),
        ("i64", "n"),
        ("float", "scale", "of values that are scaled: a power of two"),
    )
    _fields_ = fields(members)


class PlaceRows(Structure):
    members = (
        ("const void*", "chosen", "[tokens, choices] experts: int32, or int64; tokens `stride` apart"),
        ("i32*", "rows", "[assignments]; -1: no expert of this rank"),
        ("i32*", "ends", "[experts] behind the last row of each"),
        ("i32*", "counts", "[blocks, experts] of the run of each block; null: one block has all"),
        ("i32", "assignments, first, experts"),
        ("i32", "multiple", "an expert's rows begin at a multiple"),
        ("i32", "wide", "1: `chosen` is int64"),
        ("i32", "stride, choices"),
        ("i32", "span", "assignments of a run"),
    )
    _fields_ = fields(members)


class QuantizeRows(Structure):
    members = (
        ("const u16*", "hidden", "[rows, k] bfloat16, `stride` values apart"),
        ("const u16*", "factors", "of quantize_gated: likewise"),
        (
            "const i32*",
            "rows",
            "[count, choices] where each row goes, -1: nowhere; of quantize_gated where it is; null: its number",
        ),
        ("u8*", "values", "[rows, k] e4m3"),
        ("float*", "scales", "[blocks, span]"),
        ("i64", "stride"),
        ("i32", "count, choices"),
        ("i32", "k, blocks", "128 * blocks values of a row"),
        ("i32", "span", "at least as many as there are rows"),
        ("i32", "powers", "1: scales are powers of two"),
        ("float", "limit", "of quantize_gated: of both, of hidden from above"),
    )
    _fields_ = fields(members)


class SpreadRows(Structure):
    members = (
        ("const u8*", "codes", "[count, k] e4m3, `stride` bytes apart"),
        ("const float*", "given", "[count, blocks] their scales, rows and blocks of any distance"),
        ("const i32*", "rows", "[count, choices] places of a row; -1: none"),
        ("u8*", "values", "[rows, k] e4m3"),
        ("float*", "scales", "[blocks, span]"),
        ("i64", "stride, scale_stride, block_stride"),
        ("i32", "count, choices"),
        ("i32", "k, blocks", "128 * blocks values of a row"),
        ("i32", "span", "at least as many as there are rows"),
        ("i32", "unused"),
    )
    _fields_ = fields(members)


class SumRows(Structure):
    members = (
        ("const u16*", "products", "[rows, width] bfloat16"),
        ("const i32*", "rows", "[tokens, choices]; -1: none"),
        ("const void*", "shares", "[tokens, choices] float32, or bfloat16; tokens `stride` apart"),
        ("u16*", "out", "[tokens, width] bfloat16"),
        ("i32", "choices, width"),
        ("i32", "wide_shares", "1: float32"),
        ("i32", "stride"),
    )
    _fields_ = fields(members)


STRUCTURES: Final[tuple[type[Structure], ...]] = tuple(Structure.__subclasses__())
