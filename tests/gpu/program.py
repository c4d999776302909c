"""A script of kernel calls with all their inputs, carried out by either backend over a state of its own.

What a script does never depends on what kernels return, so a GPU can run it to the end without waiting for a reference,
and a reference can follow in another process from what was recorded. Device memory begins as one byte everywhere, host
pages as random bytes: a row that was never loaded shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import seat as seat_calls
from kernels.begin_step import begin_step
from kernels.copy_rows import copy_keys_to_device, copy_rows_to_device, copy_rows_to_host
from kernels.layout import Geometry
from kernels.rows import (
    gather_rows,
    read_index_keys,
    read_slab_rows,
    write_index_keys,
    write_new_rows,
    write_prompt_index_keys,
    write_slab_rows,
)
from kernels.state import BackupPlan, DeviceState, MissPlan, StepBatch
from kernels.swap_in import replay_misses, swap_in
from protocol.units import PAGE_TOKENS

EMPTY: Final = 0xDD  # device bytes before anything was written
UNWRITTEN: Final = 777  # in outputs before a kernel wrote them
WORDS_AT_ONCE: Final = 2**18  # fingerprinted together: a cache full
TABLES: Final = ("slot_of", "slot_token", "stamp", "tail", "now", "hits", "misses", "tripwires", "hot_slots")
OF_GROUP: Final = ("slot_of", "slot_token", "stamp", "hits", "misses")  # what one swap_in changes


class Op(NamedTuple):
    """A method of Machine and its arguments, arrays among them until `uploaded` makes them tensors."""

    call: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    """`label` tells where it came from. The last `host_used` of the host pages hold random bytes. `batch` counts rows.

    Made of numbers and numpy arrays alone, so that it travels between processes as it is.
    """

    label: str
    geometry: Geometry
    sizes: dict[str, int]  # arguments of DeviceState.allocate
    host_pages: int
    host_used: int
    batch: int
    ranks: int | None
    ops: list[Op]


class Machine:
    """A state on one device and the methods that scripts are made of. Each returns the tensors to compare."""

    def __init__(self, program: Program, host: Tensor, device: str) -> None:
        self.geometry, self.ranks, self.device = program.geometry, program.ranks, device
        self.planes = range(len(self.geometry.planes))
        self.state = DeviceState.allocate(self.geometry, **program.sizes, host=host, device=device)
        self.state.rows.fill_(EMPTY)
        self.state.slab_rows.fill_(EMPTY)
        self.state.index_keys.fill_(EMPTY)
        groups = self.geometry.groups
        rows, seat_rows = program.batch, self.state.seat_rows
        self.batch = StepBatch.allocate(rows, groups, device, seat_rows=seat_rows)
        self.plan = BackupPlan.allocate(rows, groups, device)
        self.misses = MissPlan.allocate(rows, self.geometry.topk, device)
        self.host_used = program.host_used

    def run(self, op: Op) -> list[Tensor]:
        return getattr(self, op.call)(*op.args) or []

    # -- what the host does to tables

    def set_table(self, name: str, seat: int, first: int, entries: Tensor) -> None:
        getattr(self.state, name)[seat, first : first + len(entries)].copy_(entries)

    def grant(self, seat: int, rows: int) -> None:
        self.state.granted_rows[seat] = rows

    def age(self, seat: int, steps: int) -> None:
        """As if `steps` steps had passed in which the seat took part but used nothing."""
        self.state.now[seat].add_(steps)

    def tables(self) -> list[Tensor]:
        return [getattr(self.state, name).clone() for name in TABLES]

    # -- calls

    def seat(self, call: str, *numbers: int) -> None:
        getattr(seat_calls, call)(self.state, *numbers)

    def write_prompt(self, seat: int, start: int, rows: Tensor, keys: Tensor) -> None:
        """`rows` uint8[L, n, row_bytes], `keys` uint8[G, n, index_row_bytes]."""
        for layer, plane, part in self._parts(rows):
            write_slab_rows(self.state, layer, seat, start, part, plane)
        for group, part in enumerate(keys):
            write_prompt_index_keys(self.state, group, seat, start, part)

    def read_prompt(self, seat: int, stop: int) -> list[Tensor]:
        layers, groups = range(self.geometry.layers), range(self.geometry.groups)
        rows = [read_slab_rows(self.state, layer, seat, stop, plane) for layer in layers for plane in self.planes]
        return rows + [read_index_keys(self.state, group, seat, stop) for group in groups]

    def copy(self, direction: str, *places: Tensor | None) -> None:
        calls = {"to_host": copy_rows_to_host, "to_device": copy_rows_to_device, "keys": copy_keys_to_device}
        calls[direction](self.state, *places)  # type: ignore[operator]

    def begin(self, seats: Tensor, lengths: Tensor, num_real: int) -> list[Tensor]:
        batch, plan = self.batch, self.plan
        batch.seats, batch.lengths = seats, lengths
        batch.num_real.fill_(num_real)
        outputs = [batch.new_rows, batch.new_index_rows, plan.device_row, plan.index_row]
        outputs += [plan.host_page, plan.host_offset, batch.rejected, seats, lengths]
        for output in outputs[:6]:
            output.fill_(UNWRITTEN)
        begin_step(self.state, batch, plan)
        return [output.clone() for output in outputs]

    def write_new(self, rows: Tensor, keys: Tensor) -> None:
        """`rows` uint8[L, B, row_bytes], `keys` uint8[G, B, index_row_bytes]; then their backup."""
        for layer, plane, part in self._parts(rows):
            write_new_rows(self.state, layer, self.batch, part, plane)
        for group, part in enumerate(keys):
            write_index_keys(self.state, group, self.batch, part)
        plan = self.plan
        copy_rows_to_host(self.state, plan.device_row, plan.index_row, plan.host_page, plan.host_offset)

    def swap_in(self, group: int, topk: Tensor) -> list[Tensor]:
        """out_rows, the plan, the group's tables, tripwires, rows rejected; then the bytes behind out_rows by layer and
        plane."""
        out = torch.full_like(topk, UNWRITTEN)
        self.misses.count.fill_(-5)
        self._swap_in()(self.state, group, topk, self.batch, out, self.misses)
        layers = self.geometry.layers_of_group(group)
        for layer in layers[1:]:
            replay_misses(self.state, layer, self.misses)
        plan = self.misses
        outputs = [out, plan.count, plan.device_row, plan.host_page, plan.host_offset]
        outputs += [getattr(self.state, name)[group] for name in OF_GROUP] + [self.state.tripwires, self.batch.rejected]
        outputs = [output.clone() for output in outputs]
        return outputs + [gather_rows(self.state, layer, out, plane) for layer in layers for plane in self.planes]

    def memory(self) -> list[Tensor]:
        """Fingerprints of all rows by layer, plane and chunk, of all keys by page, of the host pages in use."""
        used = self.state.host[-self.host_used :].to(self.device)
        sections = [plane.unflatten(1, (-1, PAGE_TOKENS)) for plane in self.state.planes]
        sections += [self.state.index_keys.unflatten(1, (-1, PAGE_TOKENS)), used.view(1, len(used), PAGE_TOKENS, -1)]
        return [fingerprints(section) for section in sections]

    def _parts(self, rows: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        for layer in range(self.geometry.layers):
            for plane, part in enumerate(rows[layer].split(self.geometry.planes, dim=1)):
                yield layer, plane, part.contiguous()

    def _swap_in(self) -> Any:
        if self.device == "cpu" or self.ranks is None:
            return swap_in
        from kernels.cuda.swap_in import swap_in as cuda_swap_in

        return partial(cuda_swap_in, ranks=self.ranks)


def fingerprints(section: Tensor) -> Tensor:
    """int64[sections, n]: a weighted sum modulo 2**64 of the bytes of each of uint8[sections, n, 64, bytes]."""
    words = section.flatten(2).view(torch.int64)
    weights = (
        torch.arange(words.shape[-1], dtype=torch.int64, device=words.device)
        .mul_(0x632BE59BD9B4E019)
        .add_(0x1B873593CC9E2D51)
    )
    pieces = [(piece * weights).sum(-1) for piece in words.split(max(1, WORDS_AT_ONCE // words.shape[-1]), dim=1)]
    return torch.cat(pieces, dim=1)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """All of them in one uint8 tensor, each at a multiple of 16 bytes; `unpack` needs their shapes and dtypes."""
    parts = []
    for tensor in tensors:
        flat = tensor.contiguous().flatten().view(torch.uint8)
        parts += [flat, flat.new_zeros(-len(flat) % 16)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What was packed, as views; `like` has the shapes and dtypes, on any device."""
    begin, views = 0, []
    for tensor in like:
        size = tensor.numel() * tensor.element_size()
        views.append(packed[begin : begin + size].view(tensor.dtype).view(tensor.shape))
        begin += size + -size % 16
    return views


def uploaded(ops: Sequence[Op], device: str) -> list[Op]:
    """The same script with tensors on `device` for its arrays, by one copy."""
    tensors = [torch.from_numpy(arg) for op in ops for arg in op.args if isinstance(arg, np.ndarray)]
    there = iter(unpack(pack(tensors).to(device), tensors))
    return [Op(op.call, tuple(next(there) if isinstance(arg, np.ndarray) else arg for arg in op.args)) for op in ops]
