"""Twins: one DeviceState on the CPU and one on the GPU that are made equal before each kernel runs on both.

Which missed token goes to which of the chosen victims is not part of the contract, so after a comparison the CPU twin
takes over the GPU twin's tables and rows: the GPU's own history goes on, and every step starts from equal states.
Host rows are random, device rows begin as other random bytes, so that a row never loaded shows.
"""

from __future__ import annotations

import random
from dataclasses import fields
from itertools import product

import torch

from kernels.begin_step import begin_step
from kernels.copy_rows import copy_keys_to_device, copy_rows_to_device, copy_rows_to_host
from kernels.cuda.launch import prepare
from kernels.cuda.swap_in import swap_in as cuda_swap_in
from kernels.integrity import check_state
from kernels.layout import OPENED_CHUNKS, OPENED_PAGES, Geometry
from kernels.rows import gather_rows
from kernels.seat import grow_managed, init_managed, init_resident, shrink_managed
from kernels.state import BackupPlan, DeviceState, MissPlan, StepBatch, active_rows, real_rows
from kernels.swap_in import replay_misses, swap_in
from protocol.units import PAGE_TOKENS, managed_chunks, pages_for

TABLES = ("slot_of", "slot_token", "stamp", "tail", "now", "hits", "misses", "tripwires")
GIVEN = ("index_table", "host_table", "chunk_table", "hot_slots", "granted_rows")


class Twin:
    """Seats of any mode over both states; `batch` seats a step, of which some are padding, `seat_rows` rows each."""

    device = "cuda"

    def __init__(
        self,
        seed: int,
        *,
        groups: tuple[int, ...] = (0, 0, 1),
        row_bytes: int = 24,
        split: int = 0,
        index_row_bytes: int = 8,
        topk: int = 8,
        tail_slots: int = 2,
        seats: int = 3,
        batch: int = 4,
        max_tokens: int = 512,
        hot_max: int = 192,
        ranks: int | None = None,
        refill_blocks: bool = True,
        ids: torch.dtype = torch.int32,
        seat_rows: int = 1,
    ) -> None:
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.geometry = Geometry(len(groups), row_bytes, groups, index_row_bytes, topk, split)
        self.ranks, self.refill_blocks, self.ids, self.size = ranks, refill_blocks, ids, batch
        self.seat_rows = seat_rows
        pages = pages_for(max_tokens)
        slots = max(pages, managed_chunks(hot_max))
        host = torch.randint(0, 256, (seats * pages + 1, self.geometry.page_bytes), generator=self.torch).byte()
        sizes = {
            "seats": seats,
            "chunks": seats * slots + 1,
            "index_pages": seats * pages + 1,
            "max_pages": pages,
            "max_chunks": slots,
            "slab_pages": 1,
            "tail_slots": tail_slots,
            "seat_rows": seat_rows,
        }
        self.cpu = DeviceState.allocate(self.geometry, host=host, **sizes)
        self.gpu = DeviceState.allocate(self.geometry, host=self.pinned(host), device=self.device, **sizes)
        self.prepare()
        for rows in (self.cpu.rows, self.cpu.slab_rows):
            rows.random_(0, 256, generator=self.torch)
        self.cpu.index_keys.random_(0, 256, generator=self.torch)
        self.lengths = [0] * seats
        self.chunks = torch.randperm(seats * slots, generator=self.torch).int().view(seats, slots)
        self.pages = torch.randperm(seats * pages, generator=self.torch).int().view(seats, pages)
        self.host_pages = torch.randperm(seats * pages, generator=self.torch).int().view(seats, pages)
        self.upload()

    # -- what another device than a GPU does differently

    def pinned(self, host: torch.Tensor) -> torch.Tensor:
        """A copy of a host pool that the device reads."""
        return host.clone().pin_memory()

    def prepare(self) -> None:
        prepare(self.gpu)

    # -- states

    def upload(self) -> None:
        """The GPU twin becomes the CPU twin."""
        for name in (*TABLES, *GIVEN, "eviction_queue", "rows", "slab_rows", "index_keys"):
            getattr(self.gpu, name).copy_(getattr(self.cpu, name))
        self.gpu.host.copy_(self.cpu.host)

    def adopt(self) -> None:
        """The CPU twin takes over what the GPU twin may have chosen freely."""
        for name in (*TABLES, "rows"):
            getattr(self.cpu, name).copy_(getattr(self.gpu, name))

    def open(self, seat: int, length: int, hot_slots: int, tokens: int = 0) -> None:
        """A context of `length` tokens: resident (0) or managed, with the first `tokens` of them hot."""
        self.lengths[seat] = length
        self.cpu.index_table[seat], self.cpu.host_table[seat] = self.pages[seat], self.host_pages[seat]
        self.cpu.chunk_table[seat] = self.chunks[seat]
        if hot_slots:
            self.cpu.chunk_table[seat, managed_chunks(hot_slots) :] = -1
            init_managed(self.cpu, seat, hot_slots, 0, min(tokens, hot_slots, length))
        else:
            init_resident(self.cpu, seat)
        self.upload()

    def resize(self, seat: int, hot_slots: int) -> None:
        held = managed_chunks(hot_slots)
        old = int(self.cpu.hot_slots[seat])
        if hot_slots < old:
            shrink_managed(self.cpu, seat, old, hot_slots)
            self.cpu.chunk_table[seat, held:] = -1
        else:
            self.cpu.chunk_table[seat, :held] = self.chunks[seat, :held]
            grow_managed(self.cpu, seat, old, hot_slots)
        self.upload()

    # -- one step

    def begin(self, seats: list[int]) -> tuple[StepBatch, StepBatch]:
        """A step of `seats`, one token longer each, and padding; returns the CPU's and the GPU's batch."""
        for seat in seats:
            self.lengths[seat] += 1
        padding = self.size - len(seats)
        ids = seats + [self.random.randint(-2, 5) for _ in range(padding)]
        lengths = [self.lengths[seat] for seat in seats] + [self.random.randint(-2, 99) for _ in range(padding)]
        return self.begin_rows(ids, lengths, len(seats))

    def begin_drafts(self, seats: list[int], rows: list[int]) -> tuple[StepBatch, StepBatch]:
        """A step of `seats` with as many `rows` of each, all but the first rejected unless `lengths` grows by them."""
        for seat, count in zip(seats, rows, strict=True):
            for state in (self.cpu, self.gpu):
                state.granted_rows[seat] = self.lengths[seat] + count
        return self.begin(seats)

    def begin_rows(self, ids: list[int], lengths: list[int], real: int) -> tuple[StepBatch, StepBatch]:
        """begin_step on both, compared; returns the CPU's and the GPU's batch."""
        batches = []
        plans = []
        for state in (self.cpu, self.gpu):
            device, size = state.rows.device, self.size * self.seat_rows
            batch = StepBatch.allocate(size, self.geometry.places, device, seat_rows=self.seat_rows)
            batch.seats = torch.full((size,), -9, dtype=self.ids, device=device)
            batch.lengths = torch.full_like(batch.seats, 9)
            batch.seats[: self.size] = torch.tensor(ids, dtype=self.ids, device=device)
            batch.lengths[: self.size] = torch.tensor(lengths, dtype=self.ids, device=device)
            batch.num_real.fill_(real)
            plan = BackupPlan.allocate(size, self.geometry.places, device)
            for tensor in (batch.new_rows, plan.device_row, plan.index_row, plan.host_page, plan.host_offset):
                tensor.fill_(777)
            begin_step(state, batch, plan)
            batches.append(batch)
            plans.append(plan)
        for name in ("seats", "lengths", "new_rows", "new_index_rows", "rejected"):
            same(name, getattr(batches[0], name), getattr(batches[1], name))
        for field in fields(BackupPlan):
            same(field.name, getattr(plans[0], field.name), getattr(plans[1], field.name))
        for name in TABLES:
            same(f"begin_step: {name}", getattr(self.cpu, name), getattr(self.gpu, name))
        self._check_opened(*batches)
        return batches[0], batches[1]

    def _check_opened(self, inputs: StepBatch, opened: StepBatch) -> None:
        """What begin_step leaves to swap_in of each row, from the inputs and the CPU twin's tables."""
        active = active_rows(self.cpu, inputs)
        for row, words in enumerate(opened.opened.cpu()):
            (_, _, hot, _), pages, chunks = (part.tolist() for part in words.split([4, OPENED_PAGES, OPENED_CHUNKS]))
            if not active[row]:
                assert hot == -1, row
                continue
            seat, length = int(inputs.seats[row]), int(inputs.lengths[row])
            assert words[:4].tolist() == [seat, length, int(self.cpu.hot_slots[seat]), int(self.cpu.now[seat])], row
            if hot > 0:
                held = min(pages_for(length), OPENED_PAGES)
                assert pages[:held] == self.cpu.index_table[seat, :held].tolist(), row
                width = min(self.cpu.chunk_table.shape[1], OPENED_CHUNKS)
                assert chunks[:width] == self.cpu.chunk_table[seat, :width].tolist(), row
                assert chunks[width:] == [-1] * (OPENED_CHUNKS - width), row

    def write_new_rows(self, batch: StepBatch) -> None:
        """The new tokens' rows: on the device, and at once on the host."""
        for row in real_rows(batch).nonzero().flatten().tolist():
            seat = int(batch.seats[row])
            page, offset = divmod(int(batch.lengths[row]) - 1, PAGE_TOKENS)
            for layer, group in enumerate(self.geometry.group_of_layer):
                place = int(batch.new_rows[group, row])
                if place >= 0:
                    for host, device in zip(self.cpu.host_row_words, self.cpu.row_words, strict=True):
                        device[layer, place] = host[int(self.cpu.host_table[seat, page]), layer, offset]
        self.gpu.rows.copy_(self.cpu.rows)
        self.gpu.slab_rows.copy_(self.cpu.slab_rows)

    def swap_in(self, group: int, batches: tuple[StepBatch, StepBatch], topk: torch.Tensor) -> None:
        """swap_in and every replay on both, compared: sets, counters, bytes (I6)."""
        real = real_rows(batches[0])
        outs, plans = [], []
        for state, batch in zip((self.cpu, self.gpu), batches, strict=True):
            table = topk.to(state.rows.device)
            out, plan = torch.full_like(table, 12345), MissPlan.allocate(*topk.shape, state.rows.device)
            plan.count.fill_(-5)
            if state is self.gpu:
                cuda_swap_in(state, group, table, batch, out, plan, ranks=self.ranks, refill_blocks=self.refill_blocks)
            else:
                swap_in(state, group, table, batch, out, plan)
            for layer in self.geometry.layers_of_group(group)[1:]:
                replay_misses(state, layer, plan)
            outs.append(out)
            plans.append(plan)
        for name in ("stamp", "tail", "now", "hits", "misses", "tripwires"):
            same(f"swap_in: {name}", getattr(self.cpu, name), getattr(self.gpu, name))
        same("tokens held", *(self.tokens_held(state, group) for state in (self.cpu, self.gpu)))
        same("plan.count", plans[0].count, plans[1].count)
        same("copies", *(self.copies(plan) for plan in plans))
        same("absent", outs[0] < 0, outs[1] < 0)
        same("rejected", batches[0].rejected, batches[1].rejected)
        assert bool((outs[1].cpu()[~real] == -1).all()), "I6: padded rows are -1"
        for layer, plane in product(self.geometry.layers_of_group(group), range(len(self.geometry.planes))):
            rows = [
                gather_rows(state, layer, out, plane) for state, out in zip((self.cpu, self.gpu), outs, strict=True)
            ]
            same(f"rows of layer {layer}, plane {plane}", *rows)
        self.adopt()

    def tokens_held(self, state: DeviceState, group: int) -> torch.Tensor:
        """The sorted tokens in the slots of each seat: evicted sets are equal when these are."""
        held = []
        for seat in range(state.seats):
            chunks = state.chunk_table[seat]
            rows = (chunks[chunks >= 0].long().unsqueeze(1) * 64 + torch.arange(64, device=chunks.device)).flatten()
            held.append(state.slot_token[group][rows].sort().values.cpu() if int(state.hot_slots[seat]) > 0 else None)
        return torch.cat([h for h in held if h is not None] or [torch.zeros(0)])

    def copies(self, plan: MissPlan) -> torch.Tensor:
        """Host places that the plan copies from, sorted within each row."""
        places = plan.host_page.long() * 64 + plan.host_offset
        held = torch.arange(places.shape[1], device=places.device) < plan.count.unsqueeze(1)
        return torch.where(held, places, -1).sort(1).values

    def check(self) -> None:
        """Slot maps and slot tables of every managed seat are each other's inverse."""
        for seat, length in enumerate(self.lengths):
            if int(self.cpu.hot_slots[seat]) >= 0:
                check_state(self.cpu, seat, length)

    def copy(self, places: dict[str, torch.Tensor], direction: str, **more: range) -> None:
        """One copy_rows call on both, compared over all memory."""
        calls = {
            "to_host": copy_rows_to_host,
            "to_device": copy_rows_to_device,
            "keys": copy_keys_to_device,
        }
        for state in (self.cpu, self.gpu):
            own = {k: None if v is None else v.to(state.rows.device) for k, v in places.items()}
            calls[direction](state, **own, **more)
        if self.gpu.rows.is_cuda:
            torch.cuda.synchronize()
        for name in ("host", "rows", "index_keys"):
            same(f"{direction}: {name}", getattr(self.cpu, name), getattr(self.gpu, name))


def same(name: str, cpu: torch.Tensor, gpu: torch.Tensor) -> None:
    """Fails with the first place where the two differ."""
    gpu = gpu.cpu()
    if torch.equal(cpu, gpu):
        return
    assert cpu.shape == gpu.shape, f"{name}: {tuple(cpu.shape)} on the CPU, {tuple(gpu.shape)} on the GPU"
    places = (cpu != gpu).nonzero()
    at = tuple(places[0].tolist())
    raise AssertionError(f"{name}: {len(places)} differ, first at {at}: CPU {cpu[at]}, GPU {gpu[at]}")
