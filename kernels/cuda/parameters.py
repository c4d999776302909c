"""Kernel parameters (structures.py) of a state, a batch, a plan.

A parameter block is passed by value. Tensors enter it as addresses: the launcher's caller keeps them alive.
"""

from __future__ import annotations

import torch

from kernels.cuda.structures import Batch, Plan, State
from kernels.state import DeviceState, MissPlan, StepBatch
from protocol.units import PAGE_TOKENS

POINTERS = tuple(name for kind, name, *_ in State.members if kind.endswith("*"))
BY_GROUP = ("slot_of", "slot_token", "stamp", "eviction_queue", "queue_slot", "queue_stamp", "tail", "hits", "misses")


def state_parameters(state: DeviceState) -> State:
    """Addresses and sizes of `state`. They never change while it lives."""
    geometry = state.geometry
    return State(
        **{name: getattr(state, name).data_ptr() for name in POINTERS},
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
    for name in BY_GROUP:
        table: torch.Tensor = getattr(state, name)
        setattr(block, name, table.data_ptr() + group * table.stride(0) * table.element_size())
    return block


def layers_parameters(state: DeviceState, layers: range) -> State:
    """`state_parameters` as of a model that has these layers alone. Its index keys lie behind the rows of its last
    layer, as they do in a host page, if that is the last one of all."""
    block = state_parameters(state)
    block.rows = state.rows[layers.start].data_ptr()
    block.host += layers.start * state.geometry.row_bytes * PAGE_TOKENS
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


def rows_parameters(batch: StepBatch) -> Batch:
    """As begin_step left them: of a batch with drafts, rows are told by their lengths, and all are looked at."""
    block = batch_parameters(batch)
    if batch.seat_rows > 1:
        block.num_real = batch.size.data_ptr()
    return block


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
