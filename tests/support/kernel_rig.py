"""A rig that drives the kernels through whole lives of requests and checks every byte against naive models.

Truth is a function: the row of (layer, owner, position) is a hash. Host pages hold poison until a backup wrote them,
and the backup of a step runs as late as the fences allow (T steps), so a read before it shows as wrong bytes (I3).
Page, chunk and index-page numbers are drawn apart, so that one used for another shows too. Offsets in host pages are
computed here from the diagram in kernels/layout.py, not by its code.

With `seat_rows` above 1 a step brings draft rows. They are rejected unless `accept` is called, and a position that is
written again has other bytes: a rejected row that is read shows.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from functools import lru_cache

import torch

from kernels.begin_step import begin_step
from kernels.copy_rows import copy_rows_to_host
from kernels.integrity import check_state
from kernels.layout import Geometry
from kernels.rows import gather_rows, read_dense_rows, write_index_keys, write_new_rows
from kernels.seat import clear_seat, grow_managed, hold_tokens, init_managed, init_resident, shrink_managed
from kernels.state import BackupPlan, DeviceState, MissPlan, StepBatch
from kernels.swap_in import replay_misses, swap_in
from tests.support.naive_hot_buffer import NaiveHotBuffer

POISON = 0xEE


@lru_cache(maxsize=1 << 16)
def row_bytes_of(kind: str, layer: int, owner: int, position: int, size: int) -> bytes:
    """What the row (kind "row") or index key (kind "key") of a token must be."""
    seed = f"{kind} {layer} {owner} {position}".encode()
    return b"".join(hashlib.blake2b(seed + bytes([part])).digest() for part in range(-(-size // 64)))[:size]


def bytes_of(memory: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, to read and to write."""
    return memory.view(-1).numpy().data


def tensor_of(row: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(row), dtype=torch.uint8)


def put(memory: memoryview, places: list[slice], row: bytes) -> None:
    begin = 0
    for place in places:
        end = begin + place.stop - place.start
        memory[place] = row[begin:end]
        begin = end


def take(memory: memoryview, places: list[slice]) -> bytes:
    return b"".join(memory[place] for place in places)


class Request:
    """One admission: its place, its pages and one naive buffer per group."""

    def __init__(self, owner: int, seat: int, length: int) -> None:
        self.owner = owner
        self.seat = seat
        self.length = length  # with the row that begins a step; its drafts lie behind
        self.rows = 0  # of the last step
        self.writes: dict[int, int] = {}  # position -> how often it was written by decoding
        self.pages: dict[int, tuple[int, int]] = {}  # page of the context -> (index page, host page)
        self.chunks: list[int] = []
        self.naive: list[NaiveHotBuffer] = []

    def writer(self, position: int) -> int:
        """What makes the bytes of a position different from those of others, and from those of a rejected row."""
        return self.owner + 10_000 * self.writes.get(position, 0)


class Rig:
    def __init__(
        self,
        *,
        groups: tuple[int, ...] = (0, 0, 1),
        row_bytes: int = 24,
        split: int = 0,
        index_row_bytes: int = 8,
        seats: int = 3,
        batch: int = 4,
        tail_slots: int = 2,
        topk: int = 4,
        chunks: int = 48,
        pages: int = 48,
        max_pages: int = 16,
        max_chunks: int = 16,
        seed: int = 0,
        seat_rows: int = 1,
        heads: int = 1,
        slot_tokens: int = 1,
    ) -> None:
        self.random = random.Random(seed)
        self.geometry = Geometry(len(groups), row_bytes, groups, index_row_bytes, topk, split, heads, slot_tokens)
        self.host = torch.full((pages, self.geometry.page_bytes), POISON, dtype=torch.uint8)
        self.state = DeviceState.allocate(
            self.geometry,
            seats=seats,
            chunks=chunks,
            index_pages=pages,
            max_pages=max_pages,
            max_chunks=max_chunks,
            slab_pages=max_pages,
            tail_slots=tail_slots,
            host=self.host,
            seat_rows=seat_rows,
        )
        self.state.rows.fill_(0xDD)
        self.state.dense_rows.fill_(0xDD)
        self.state.slot_of.random_(-5, 5)  # what earlier owners left
        self.state.slot_token.random_(0, 5)
        self.state.stamp.random_(0, 5)
        self.step_seats = batch
        self.plans: list[BackupPlan] = []
        self.placed: list[tuple[int, Request, int]] = []  # of the last step: row of the batch, request, position
        self.free = {
            name: self._shuffled(size)
            for name, size in (("chunk", chunks), ("index", pages), ("host", pages), ("slab", max_pages))
        }
        self.steps = 0
        self.owners = 0
        self.requests: dict[int, Request] = {}
        self.take_rows(seat_rows)

    def take_rows(self, seat_rows: int) -> None:
        """From the next step on a seat may bring so many rows: another graph, with a batch and plans of its own."""
        self.finish_backups()
        rows, places = self.step_seats * seat_rows, self.geometry.places
        self.batch = StepBatch.allocate(rows, places, seat_rows=seat_rows)
        ring = self.state.backup_steps(self.state.seat_rows)
        self.plans = [BackupPlan.allocate(rows, places) for _ in range(ring)]
        self.miss_plan = MissPlan.allocate(rows, self.geometry.topk)
        self.rejected = torch.zeros(rows, dtype=torch.int32)  # what the naive buffers say

    def _shuffled(self, size: int) -> list[int]:
        numbers = list(range(size))
        self.random.shuffle(numbers)
        return numbers

    # -- naive memory --------------------------------------------------------------------------------------------------

    def row_places(self, begin: int, rows: int, row: int) -> list[slice]:
        """Return where the bytes of one of `rows` rows lie that begin at byte `begin`: a slice for each plane."""
        places = []
        for plane in self.geometry.planes:
            places.append(slice(begin + row * plane, begin + (row + 1) * plane))
            begin += rows * plane
        return places

    def host_places(self, kind: str, layer: int, page: int, token: int) -> list[slice]:
        """Return where a row of `layer`, or a key of group `layer`, lies in the pool."""
        rows, key = 64 * self.geometry.row_bytes, self.geometry.index_row_bytes
        begin = page * self.geometry.page_bytes
        if kind == "row":
            return self.row_places(begin + layer * rows, 64, token % 64)
        begin += self.geometry.layers * rows + (layer * 64 + token % 64) * key
        return [slice(begin, begin + key)]

    def arena(self, layer: int) -> torch.Tensor:
        """Return the memory of a layer's rows on the device."""
        dense = self.geometry.dense
        return self.state.dense_rows[layer] if layer < dense else self.state.rows[layer - dense]

    def read_row(self, layer: int, row: int) -> torch.Tensor:
        """Return the bytes at a device row, all planes."""
        arena = self.arena(layer)
        return tensor_of(take(bytes_of(arena), self.row_places(0, len(arena), row)))

    def write_host(self, request: Request, positions: Iterable[int]) -> None:
        """Make rows and keys of `positions` durable without any kernel."""
        pool = bytes_of(self.host)
        for position in positions:
            page = request.pages[position // 64][1]
            for kind, layer in self._kept():
                put(
                    pool, self.host_places(kind, layer, page, position), self.true_bytes(kind, layer, request, position)
                )

    def read_host(self, kind: str, layer: int, request: Request, position: int) -> torch.Tensor:
        places = self.host_places(kind, layer, request.pages[position // 64][1], position)
        return tensor_of(take(bytes_of(self.host), places))

    def truth(self, kind: str, layer: int, request: Request, position: int) -> torch.Tensor:
        return tensor_of(self.true_bytes(kind, layer, request, position))

    def true_bytes(self, kind: str, layer: int, request: Request, position: int) -> bytes:
        size = self.geometry.row_bytes if kind == "row" else self.geometry.index_row_bytes
        return row_bytes_of(kind, layer, request.writer(position), position, size)

    def _kept(self) -> list[tuple[str, int]]:
        """Return what host memory has of a position: rows by layer, keys by group."""
        layers, groups = self.geometry.layers, self.geometry.groups
        return [*(("row", layer) for layer in range(layers)), *(("key", group) for group in range(groups))]

    def check_host(self) -> None:
        """All rows and keys are durable and right once the backups are done (I3)."""
        self.finish_backups()
        pool = bytes_of(self.host)
        for request in self.requests.values():
            for position in (p for p in range(request.length) if p // 64 in request.pages):
                page = request.pages[position // 64][1]
                for kind, layer in self._kept():
                    got = take(pool, self.host_places(kind, layer, page, position))
                    assert got == self.true_bytes(kind, layer, request, position), (kind, layer, position)

    # -- lives ---------------------------------------------------------------------------------------------------------

    def open(self, seat: int, length: int, hot_slots: int, preload: bool = False, first_page: int = 0) -> Request:
        """A request of `length` durable tokens. Pages below `first_page` but the first are not granted (sparse)."""
        self.owners += 1
        request = self.requests[seat] = Request(self.owners, seat, length)
        for page in {0, *range(first_page, -(-length // 64))} if length else set():
            self.grant(request, page)
        self.write_host(request, [p for p in range(length) if p // 64 in request.pages])
        self.set_mode(request, hot_slots, preload)
        return request

    def grant(self, request: Request, page: int) -> None:
        request.pages[page] = self.free["index"].pop(), self.free["host"].pop()
        self.state.index_table[request.seat, page], self.state.host_table[request.seat, page] = request.pages[page]

    def set_mode(self, request: Request, hot_slots: int, preload: bool = False) -> None:
        """Set the hot buffer up anew: resident (0), or managed, empty or with the newest rows that fit."""
        self.finish_backups()
        self.free["chunk"] += request.chunks
        request.chunks = []
        pages, unit = -(-request.length // 64), self.geometry.slot_tokens
        first = max(0, pages - hot_slots // self.geometry.page_slots) * 64 if hot_slots else 0
        first, tokens = (first, request.length - first) if first < request.length and preload else (0, 0)
        self.take_chunks(request, self.state.buffer_chunks(hot_slots) if hot_slots else pages)
        self.copy_in(request, range(first, first + tokens) if hot_slots else range(request.length), first)
        if hot_slots:
            init_managed(self.state, request.seat, hot_slots, first, tokens)
        else:
            init_resident(self.state, request.seat)
        tail, units = self.state.tail_slots, -(-tokens // unit) if hot_slots else 0
        request.naive = [NaiveHotBuffer(hot_slots, tail, first // unit, units) for _ in range(self.geometry.selections)]
        if hot_slots and not tokens and request.length % unit:
            self.hold(request, request.length // unit)

    def hold(self, request: Request, unit: int) -> None:
        """Put the unit that the next token lies in into slot 0 of every selection."""
        count = self.geometry.selections
        self.copy_in(request, range(unit * self.geometry.slot_tokens, request.length), unit * self.geometry.slot_tokens)
        groups, slots = torch.arange(count), torch.zeros(count, dtype=torch.int64)
        hold_tokens(self.state, request.seat, request.naive[0].hot_slots, groups, slots, slots + unit)
        for naive in request.naive:
            naive.hold(0, unit)

    def take_chunks(self, request: Request, count: int) -> None:
        """Take chunks up to `count`, or free those beyond."""
        while len(request.chunks) < count:
            request.chunks.append(self.free["chunk"].pop())
        while len(request.chunks) > count:
            self.free["chunk"].insert(0, request.chunks.pop())
        self.state.chunk_table[request.seat] = -1
        self.state.chunk_table[request.seat, :count] = torch.tensor(request.chunks, dtype=torch.int32)

    def copy_in(self, request: Request, positions: range, base: int) -> None:
        """Write rows of `positions` into slots position-base without any kernel; those of dense layers that have pages
        to these."""
        for layer in range(self.geometry.layers):
            arena, memory, is_dense = self.arena(layer), bytes_of(self.arena(layer)), layer < self.geometry.dense
            for position in sorted(self.paged(request)) if is_dense else positions:
                page, place = divmod(position if is_dense else position - base, 64)
                row = (request.pages[page][0] if is_dense else request.chunks[page]) * 64 + place
                put(memory, self.row_places(0, len(arena), row), self.true_bytes("row", layer, request, position))

    def paged(self, request: Request) -> set[int]:
        """Return the positions of the context whose pages are granted."""
        return {position for position in range(request.length) if position // 64 in request.pages}

    def resize_about(self, request: Request, hot_slots: int) -> None:
        """Resize a managed buffer to `hot_slots`, or to the least that a larger one may have."""
        old = request.naive[0].hot_slots
        self.resize(request, hot_slots if hot_slots < old else max(hot_slots, old + self.state.tail_slots))

    def resize(self, request: Request, hot_slots: int) -> None:
        """Shrink or grow a managed buffer; one of pages is set up anew where it shrinks."""
        self.finish_backups()
        old = request.naive[0].hot_slots
        if hot_slots < old and self.geometry.slot_tokens > 1:
            self.set_mode(request, hot_slots)
            return
        chunks = self.state.buffer_chunks(hot_slots)
        if hot_slots > old:
            self.take_chunks(request, chunks)
            grow_managed(self.state, request.seat, old, hot_slots)
        else:
            shrink_managed(self.state, request.seat, old, hot_slots)
            self.take_chunks(request, chunks)
        for naive in request.naive:
            (naive.grow if hot_slots > old else naive.shrink)(hot_slots)

    def close(self, request: Request) -> None:
        self.finish_backups()
        clear_seat(self.state, request.seat)
        self.free["chunk"] += request.chunks
        for index, host in request.pages.values():
            self.free["index"].append(index)
            self.free["host"].append(host)
            self.host[host] = POISON
        del self.requests[request.seat]

    # -- steps ---------------------------------------------------------------------------------------------------------

    def begin(self, requests: list[Request], rows: list[int] | None = None) -> None:
        """begin_step for `requests` in this order, with garbage in the padded rows; checks its outputs.

        `rows`: how many each of them may bring; by default as many as the batch has room for.
        """
        plan = self.plans[self.steps % len(self.plans)]
        copy_rows_to_host(self.state, plan.device_row, plan.index_row, plan.host_page, plan.host_offset)
        self.steps += 1
        self.batch.seats.random_(-2, self.state.seats + 2)
        self.batch.lengths.random_(-2, 200)
        self.placed = []
        for number, request in enumerate(requests):
            request.rows = self.batch.seat_rows if rows is None else rows[number]
            self.batch.seats[number], self.batch.lengths[number] = request.seat, request.length + 1
            self.state.granted_rows[request.seat] = request.length + request.rows
            positions = range(request.length, request.length + request.rows)
            self.placed += [(depth * self.step_seats + number, request, p) for depth, p in enumerate(positions)]
            self._make_room(request, positions)
            request.length += request.rows > 0
        self.placed.sort(key=lambda placed: placed[0])
        self.batch.num_real.fill_(len(requests))
        begin_step(self.state, self.batch, plan)
        self._check_begun(plan)
        self._write_new()

    def _make_room(self, request: Request, positions: range) -> None:
        for position in positions:
            request.writes[position] = request.writes.get(position, -1) + 1
            if position // 64 not in request.pages:
                self.grant(request, position // 64)
        if not request.naive[0].hot_slots:
            self.take_chunks(request, -(-(request.length + len(positions)) // 64))
        for naive in request.naive if positions else ():
            naive.begin(*(position // self.geometry.slot_tokens for position in positions))

    def _check_begun(self, plan: BackupPlan) -> None:
        held = torch.zeros(len(self.batch.seats), dtype=torch.bool)
        for row, request, position in self.placed:
            held[row] = True
            assert (int(self.batch.seats[row]), int(self.batch.lengths[row])) == (request.seat, position + 1)
        for output in (self.batch.new_rows, plan.host_page.unsqueeze(0)):
            assert torch.equal(output >= 0, held.expand_as(output))
        if self.state.seat_rows > 1:
            self.rejected = 1 - held.int()
            assert not self.batch.lengths[~held].any()
        assert torch.equal(self.batch.rejected, self.rejected)

    def accept(self, request: Request, rows: int) -> None:
        """Of the last step, as many rows of `request`: at least one if it brought any, none that was rejected."""
        brought = [row for row, of, _ in self.placed if of is request]
        assert min(1, len(brought)) <= rows <= len(brought)
        assert not self.rejected[brought[:rows]].any()
        request.length += max(0, rows - 1)

    def acceptable(self, request: Request) -> int:
        """How many rows of the last step may be accepted: those before the first that was rejected."""
        brought = [row for row, of, _ in self.placed if of is request]
        return next((n for n, row in enumerate(brought) if self.rejected[row]), len(brought))

    def _write_new(self) -> None:
        size = self.batch.seats.shape[0]
        for layer in range(self.geometry.layers):
            rows = torch.zeros(size, self.geometry.row_bytes, dtype=torch.uint8)
            for row, request, position in self.placed:
                rows[row] = self.truth("row", layer, request, position)
            for plane, part in enumerate(rows.split(self.geometry.planes, dim=1)):
                write_new_rows(self.state, layer, self.batch, part.contiguous(), plane)
        for group in range(self.geometry.groups):
            keys = torch.zeros(size, self.geometry.index_row_bytes, dtype=torch.uint8)
            for row, request, position in self.placed:
                keys[row] = self.truth("key", group, request, position)
            write_index_keys(self.state, group, self.batch, keys)

    def finish_backups(self) -> None:
        """All backups that may still be in flight, oldest first; then nothing is."""
        for age in range(len(self.plans)):
            plan = self.plans[(self.steps + age) % len(self.plans)]
            copy_rows_to_host(self.state, plan.device_row, plan.index_row, plan.host_page, plan.host_offset)
            plan.host_page.fill_(-1)

    def swap_in(self, group: int, requests: list[Request], topk: list[list[int]]) -> torch.Tensor:
        """swap_in and replay for one selection; checks counters, tripwires and the bytes behind every output.

        `topk`: of each row that the step of `requests` placed, depth by depth.
        """
        unit, head = self.geometry.slot_tokens, group % self.geometry.heads
        size, k = self.batch.seats.shape[0], self.geometry.topk
        table = torch.randint(-9, 99, (size, k), dtype=torch.int32)
        for (row, _, _), chosen in zip(self.placed, topk, strict=True):
            table[row] = torch.tensor(chosen, dtype=torch.int32)
        out = torch.full((size, k), 12345, dtype=torch.int32)
        before = self.state.hits.clone(), self.state.misses.clone(), self.state.tripwires.clone()
        held = [self.held(group, request) for request in requests]
        swap_in(self.state, group, table, self.batch, out, self.miss_plan)
        layers = self.geometry.layers_of_group(group // self.geometry.heads)
        for layer in layers[1:]:
            replay_misses(self.state, layer, self.miss_plan, head)
        wanted = [
            request.naive[group].resolve(chosen, position // unit + 1, draft=row >= self.step_seats)
            for (row, request, position), chosen in zip(self.placed, topk, strict=True)
        ]
        assert int(self.miss_plan.count.sum()) == sum(len(w.misses) for w in wanted)
        for request, had in zip(requests, held, strict=True):
            mine = [w for (_, of, _), w in zip(self.placed, wanted, strict=True) if of is request]
            gone = (
                set().union(*(w.evicted for w in mine)) - request.naive[group].held
            )  # a later depth may load it again
            assert had - self.held(group, request) == gone
            hits, misses = (
                int((new - old)[group, request.seat])
                for new, old in zip((self.state.hits, self.state.misses), before[:2], strict=True)
            )
            assert hits == sum(w.hits for w in mine)
            assert misses == sum(len(w.misses) for w in mine)
        assert int((self.state.tripwires - before[2])[0]) == sum(w.out_of_range for w in wanted)
        assert self.state.tripwires[1:].sum() == 0
        for (row, _, _), w in zip(self.placed, wanted, strict=True):
            self.rejected[row] |= not w.fits
        assert torch.equal(self.batch.rejected, self.rejected)
        for layer in layers:
            planes = [
                gather_rows(self.state, layer, out, plane).unflatten(-1, (unit, -1))
                for plane in self.geometry.planes_of(head)
            ]
            self._check_bytes(layer, torch.cat(planes, dim=-1), out, [w.tokens for w in wanted], head)
        return out

    def held(self, group: int, request: Request) -> set[int]:
        """Tokens that the device tables place in the request's slots."""
        slots = range(len(request.naive[group].slots))
        each = self.geometry.page_slots
        rows = [request.chunks[slot // each] * each + slot % each for slot in slots]
        return set(self.state.slot_token[group, rows].tolist()) - {-1}

    def _check_dense(self, request: Request) -> None:
        for layer in range(self.geometry.dense):
            planes = [
                read_dense_rows(self.state, layer, request.seat, request.length, plane)
                for plane in range(len(self.geometry.planes))
            ]
            rows = torch.cat(planes, dim=-1).numpy()
            for position in self.paged(request):
                want = self.true_bytes("row", layer, request, position)
                assert rows[position].tobytes() == want, f"dense layer, position {(layer, position)}"

    def _check_bytes(
        self, layer: int, got: torch.Tensor, out: torch.Tensor, tokens: list[list[int | None]], head: int
    ) -> None:
        """Check what lies at `out`, the rows `got` [B, k, slot_tokens, bytes] of one head, for units `tokens`."""
        padding = torch.ones(len(out), dtype=torch.bool)
        missing, read, unit, size = (out == -1).tolist(), got.numpy(), got.shape[2], self.geometry.head_bytes
        for (row, request, last), wanted in zip(self.placed, tokens, strict=True):
            padding[row] = False
            for column, token in enumerate(wanted):
                where = (layer, row, column, token)
                assert missing[row][column] == (token is None), f"I6: layer, row, entry, token {where}"
                if token is None:
                    assert not read[row, column].any(), f"I3: layer, row, entry, token {where}"
                    continue
                for place in range(min(unit, last + 1 - token * unit)):
                    want = self.true_bytes("row", layer, request, token * unit + place)[head * size : (head + 1) * size]
                    assert read[row, column, place].tobytes() == want, f"I3: layer, row, entry, token {where}"
        assert (out[padding] == -1).all(), "I6: padded rows are -1"
        assert not got[padding].any()

    def check(self) -> None:
        """Tables consistent in themselves, and equal to the naive buffers; rows of dense layers right."""
        for request in self.requests.values():
            self._check_dense(request)
            check_state(self.state, request.seat, request.length)
            for group, naive in enumerate(request.naive):
                assert int(self.state.now[request.seat]) == naive.now
                each = self.geometry.page_slots
                rows = [request.chunks[n // each] * each + n % each for n in range(len(naive.slots))]
                assert self.state.slot_token[group, rows].tolist() == [
                    -1 if slot.token is None else slot.token for slot in naive.slots
                ]
                if naive.slots:
                    assert self.state.stamp[group, rows].tolist() == [slot.used for slot in naive.slots]
                tail = [-1 if slot is None else slot for slot in naive.tail] if naive.slots else [-1] * naive.tail_slots
                assert self.state.tail[group, request.seat].tolist() == tail
