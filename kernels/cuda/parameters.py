"""Kernel parameters as ctypes structures: the host's twin of kernels/layout.cuh. A test proves both equal.

A parameter block is passed by value; tensors enter it as addresses, so whoever launches keeps them alive.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Final

import torch

from kernels.layout import NEXT_RESERVE, NEXT_SLOTS, OPENED_CHUNKS, OPENED_PAGES, SLOT_ABSENT
from kernels.state import DeviceState, MissPlan, StepBatch, Tripwire
from protocol.units import CONTEXT_MAX_TOKENS, PAGE_TOKENS, SLOTS_MAX, TAIL_SLOTS_MAX, TOPK_MAX


class SeatVerb(IntEnum):
    """What change_slots does."""

    INIT = 0
    SHRINK = 1
    GROW = 2


SWAP_IN_SHARED_BYTES: Final = 99_568  # of a block: any device since sm_80 has room for one

CONSTANTS: Final = {
    "SWAP_IN_SHARED_BYTES": SWAP_IN_SHARED_BYTES,
    "PAGE_TOKENS": PAGE_TOKENS,
    "SLOT_ABSENT": SLOT_ABSENT,
    "SLOTS_MAX": SLOTS_MAX,
    "TAIL_SLOTS_MAX": TAIL_SLOTS_MAX,
    "TOPK_MAX": TOPK_MAX,
    "NEXT_SLOTS": NEXT_SLOTS,
    "NEXT_RESERVE": NEXT_RESERVE,
    "CONTEXT_MAX_TOKENS": CONTEXT_MAX_TOKENS,
    "OPENED_PAGES": OPENED_PAGES,
    "OPENED_CHUNKS": OPENED_CHUNKS,
    **{name.name: int(name) for kind in (Tripwire, SeatVerb) for name in kind},
}
_POINTERS = (
    "rows",
    "index_keys",
    "slot_of",
    "slot_token",
    "stamp",
    "next_list",
    "next_slot",
    "next_stamp",
    "index_table",
    "host_table",
    "chunk_table",
    "hot_slots",
    "tail",
    "now",
    "hits",
    "misses",
    "tripwires",
    "host",
)


class State(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("arena_rows", ctypes.c_int64),
        ("key_rows", ctypes.c_int64),
        ("page_bytes", ctypes.c_int64),
        ("seats", ctypes.c_int32),
        ("max_pages", ctypes.c_int32),
        ("max_chunks", ctypes.c_int32),
        ("tail_slots", ctypes.c_int32),
        ("layers", ctypes.c_int32),
        ("groups", ctypes.c_int32),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("seats", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("num_real", ctypes.c_void_p),
        ("size", ctypes.c_int32),
        ("wide_seats", ctypes.c_int32),
        ("wide_lengths", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class OpenedRow(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("seat", "length", "hot", "now")),
        ("page", ctypes.c_int32 * OPENED_PAGES),
        ("chunk", ctypes.c_int32 * OPENED_CHUNKS),
    )


class Plan(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("device_row", "host_page", "host_offset", "count"))


class SwapIn(ctypes.Structure):
    _fields_ = (
        ("opened", ctypes.c_void_p),
        ("topk", ctypes.c_void_p),
        ("out_rows", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("slots_limit", ctypes.c_int32),
        ("share", ctypes.c_uint32),
        ("copies", ctypes.c_int32),
        ("page_bytes", ctypes.c_uint32),
        ("keepers", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("host_rows", ctypes.c_void_p * 2),
        ("device_rows", ctypes.c_void_p * 2),
        ("state", State),
        ("plan", Plan),
    )


class BeginStep(ctypes.Structure):
    _fields_ = (
        ("state", State),
        ("batch", Batch),
        ("new_rows", ctypes.c_void_p),
        ("new_index_rows", ctypes.c_void_p),
        ("opened", ctypes.c_void_p),
        ("device_row", ctypes.c_void_p),
        ("index_row", ctypes.c_void_p),
        ("host_page", ctypes.c_void_p),
        ("host_offset", ctypes.c_void_p),
    )


class ReplayMisses(ctypes.Structure):
    _fields_ = (
        ("state", State),
        ("plan", Plan),
        ("k", ctypes.c_int32),
        ("layer", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class CopyRows(ctypes.Structure):
    _fields_ = (
        ("state", State),
        ("group_of_layer", ctypes.c_void_p),
        ("device_row", ctypes.c_void_p),
        ("index_row", ctypes.c_void_p),
        ("host_page", ctypes.c_void_p),
        ("host_offset", ctypes.c_void_p),
        ("n", ctypes.c_int32),
        ("wide_device_row", ctypes.c_int32),
        ("wide_index_row", ctypes.c_int32),
        ("wide_host_page", ctypes.c_int32),
        ("wide_host_offset", ctypes.c_int32),
        ("to_host", ctypes.c_int32),
    )


class MoveRows(ctypes.Structure):
    _fields_ = (
        ("section", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("tripwires", ctypes.c_void_p),
        ("start", ctypes.c_int64),
        ("n", ctypes.c_int32),
        ("plane", ctypes.c_int32),
    )


class SeatChange(ctypes.Structure):
    _fields_ = (
        ("state", State),
        ("seat", ctypes.c_int32),
        ("verb", ctypes.c_int32),
        ("old_slots", ctypes.c_int32),
        ("hot_slots", ctypes.c_int32),
        ("first_slot", ctypes.c_int32),
        ("chunks", ctypes.c_int32),
        ("first_token", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
    )


class IndexTopk(ctypes.Structure):
    _fields_ = (
        ("state", State),
        ("batch", Batch),
        *((name, ctypes.c_void_p) for name in ("queries", "weights", "topk_out")),
        *((name, ctypes.c_void_p) for name in ("scores", "histogram", "edges", "sure", "counters")),
        ("capacity", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("k", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("rows", ctypes.c_int32),
    )


class AttendRows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "queries", "entries", "out")),
        ("scale", ctypes.c_float),
        ("heads", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("splits", ctypes.c_int32),
        ("span", ctypes.c_int32),
        ("sides", ctypes.c_int32),
    )


STRUCTURES: Final[tuple[type[ctypes.Structure], ...]] = (
    State,
    Batch,
    OpenedRow,
    Plan,
    SwapIn,
    BeginStep,
    ReplayMisses,
    CopyRows,
    MoveRows,
    SeatChange,
    IndexTopk,
    AttendRows,
)


def state_parameters(state: DeviceState) -> State:
    """Addresses and sizes of `state`. They never change while it lives."""
    geometry = state.geometry
    return State(
        **{name: getattr(state, name).data_ptr() for name in _POINTERS},
        arena_rows=state.rows.shape[1],
        key_rows=state.index_keys.shape[1],
        page_bytes=geometry.page_bytes,
        seats=state.seats,
        max_pages=state.index_table.shape[1],
        max_chunks=state.chunk_table.shape[1],
        tail_slots=state.tail_slots,
        layers=geometry.layers,
        groups=geometry.groups,
    )


def group_parameters(state: DeviceState, group: int) -> State:
    """`state_parameters` with the slot tables, tails and counters of one group instead of those of all."""
    block = state_parameters(state)
    for name in ("slot_of", "slot_token", "stamp", "next_list", "next_slot", "next_stamp", "tail", "hits", "misses"):
        table: torch.Tensor = getattr(state, name)
        setattr(block, name, table.data_ptr() + group * table.stride(0) * table.element_size())
    return block


def layers_parameters(state: DeviceState, layers: range) -> State:
    """`state_parameters` as of a model that has these layers alone. Its index keys lie behind the rows of its last
    layer, as they do in a host page, if that is the last one of all."""
    block = state_parameters(state)
    row_bytes = layers.start * state.geometry.row_bytes
    block.rows += row_bytes * block.arena_rows
    block.host += row_bytes * PAGE_TOKENS
    block.layers = len(layers)
    return block


def batch_parameters(batch: StepBatch) -> Batch:
    return Batch(
        seats=batch.seats.data_ptr(),
        lengths=batch.lengths.data_ptr(),
        num_real=batch.num_real.data_ptr(),
        size=batch.seats.shape[0],
        wide_seats=is_wide(batch.seats),
        wide_lengths=is_wide(batch.lengths),
    )


def plan_parameters(plan: MissPlan) -> Plan:
    return Plan(
        device_row=plan.device_row.data_ptr(),
        host_page=plan.host_page.data_ptr(),
        host_offset=plan.host_offset.data_ptr(),
        count=plan.count.data_ptr(),
    )


def is_wide(tensor: torch.Tensor) -> int:
    """1 for int64, 0 for int32."""
    return int(tensor.dtype == torch.int64)


def assertions() -> str:
    """CUDA C++ that compiles only if layout.cuh has the constants, sizes and offsets of this file."""
    lines = ['#include "layout.cuh"']
    for name, value in CONSTANTS.items():
        lines.append(f'static_assert(hisparse::{name} == {value}, "{name}");')
    for structure in STRUCTURES:
        kind = structure.__name__
        size = ctypes.sizeof(structure)
        lines.append(f'static_assert(sizeof(hisparse::{kind}) == {size}, "{kind}");')
        for name, *_ in structure._fields_:
            offset = getattr(structure, name).offset
            lines.append(f'static_assert(__builtin_offsetof(hisparse::{kind}, {name}) == {offset}, "{kind}.{name}");')
    return "\n".join(lines) + "\n"
