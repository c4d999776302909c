"""Scripts drawn by hypothesis: lives of requests that share a state, and single lives at the limits.

A *case* is one drawn life: up to three seats and what happens to them, step by step. Cases of one shape run side by
side in one state and one batch, on seats, pages and chunks of their own. At the limits a case has a state to itself.

State is kept here, on the host, as a worker keeps it: what a script does depends on nothing that a kernel returns.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from hypothesis import strategies as st

from kernels.layout import Geometry
from protocol.units import CONTEXT_MAX_TOKENS, PAGE_TOKENS, managed_chunks, pages_for
from tests.gpu.program import Op, Program

Array = np.ndarray[Any, Any]

CASE_SEATS: Final = 3
CASE_PAGES: Final = 8  # pages of the longest small context, and as many chunks
PROMPT_PAGES: Final = 3  # slab pages of each seat
PADDING: Final = 2
ODD: Final = (-1, -1, -2, -(2**31), 2**31 - 1)  # top-k entries that are no token
LENGTH_MAX: Final = CASE_PAGES * PAGE_TOKENS - 40

#: Bytes of a row, where it parts into planes, bytes of an index key. Each compiles once.
ROWS: Final = (
    (1, 0, 1),
    (7, 0, 8),
    (20, 0, 4),
    (24, 0, 132),
    (584, 512, 132),
    (656, 0, 132),
    (196, 0, 132),
    (26, 13, 7),
    (1152, 0, 256),
)
WORLDS = st.fixed_dictionaries(
    {
        "groups": st.sampled_from([(0,), (0, 0, 1), (0, 1, 1, 1)]),
        "rows": st.sampled_from(ROWS),
        "topk": st.sampled_from([1, 3, 8, 31, 64, 100]),
        "tail_slots": st.integers(1, 16),
        "seat_rows": st.integers(1, 5),
        "ranks": st.sampled_from([None, 1, 2, 4, 5, 8, 16]),
        "ids": st.sampled_from([np.int32, np.int64]),
    }
)
ACTIONS: Final = ("step", "step", "step", "resize", "reopen", "clear", "age", "prompt", "copy")
CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "seats": st.lists(
            st.tuples(st.integers(1, LENGTH_MAX), st.integers(0, 5), st.sampled_from([0, 64, 200]), st.booleans()),
            min_size=1,
            max_size=CASE_SEATS,
        ),
        "actions": st.lists(st.sampled_from(ACTIONS), min_size=2, max_size=4),
    }
)


@dataclass
class Seat:
    """What the host knows of a seat. `hot` -1: empty. Pages and chunks are its own while the script lasts."""

    number: int
    pages: Array
    host_pages: Array
    chunks: Array
    length: int = 0
    rows: int = 1  # that it brings to the next step
    hot: int = -1
    holes: set[int] = field(default_factory=set)  # pages of the context that are not wholly granted


@dataclass
class Script:
    """Collects ops. Its methods are what a worker does with a seat, and keep its state."""

    geometry: Geometry
    tail_slots: int
    ids: type[np.signedinteger[Any]]
    seat_rows: int = 1
    ops: list[Op] = field(default_factory=list)

    def add(self, call: str, *args: Any) -> None:
        self.ops.append(Op(call, args))

    def set_table(self, name: str, seat: Seat, entries: Array, first: int = 0) -> None:
        self.add("set_table", name, seat.number, first, entries.astype(np.int32))

    def open(self, seat: Seat, draw: random.Random, length: int, hot: int, preload: int, *, holes: bool) -> None:
        """A context of `length` tokens, the first `preload` of them hot; `holes`: some pages are not granted."""
        seat.length, seat.hot, seat.holes = length, hot, set()
        tokens = min(preload, hot, length)
        pages, host_pages, chunks = seat.pages.copy(), seat.host_pages.copy(), seat.chunks.copy()
        if holes:
            held = pages_for(tokens) if hot else 0
            for table, first in ((pages, held), (host_pages, 0)) if hot else ((pages, 0), (chunks, 0)):
                if first < len(table):
                    seat.holes.add(hole := draw.randrange(first, len(table)))
                    table[hole] = -1
        if hot:
            chunks[managed_chunks(hot) :] = -1
        for name, table in (("index_table", pages), ("host_table", host_pages), ("chunk_table", chunks)):
            self.set_table(name, seat, table)
        if hot and tokens and draw.random() < 0.5:
            self.copy("to_device", seat, tokens, draw)
        if hot:
            self.add("seat", "init_managed", seat.number, hot, 0, tokens)
        else:
            self.add("seat", "init_resident", seat.number)

    def resize(self, seat: Seat, hot: int) -> None:
        if seat.hot < 1 or seat.hot <= hot < seat.hot + self.tail_slots:
            return
        held, grows = managed_chunks(hot), hot > seat.hot
        chunks = seat.chunks.copy()
        chunks[held:] = -1
        if grows:
            self.set_table("chunk_table", seat, chunks)
        self.add("seat", "grow_managed" if grows else "shrink_managed", seat.number, seat.hot, hot)
        if not grows:
            self.set_table("chunk_table", seat, chunks)
        seat.hot = hot

    def clear(self, seat: Seat) -> None:
        self.add("seat", "clear_seat", seat.number)
        seat.hot, seat.length = -1, 0

    def prompt(self, seat: Seat, draw: random.Random) -> None:
        """Rows and keys by position, now and then on slab pages that are not granted."""
        slab = PROMPT_PAGES * seat.number + np.arange(PROMPT_PAGES)
        if draw.random() < 0.5:
            slab[draw.randrange(len(slab))] = -1
        self.set_table("slab_table", seat, slab)
        room = len(slab) * PAGE_TOKENS
        start = draw.randrange(room - 1)
        n, g = draw.randrange(room - start) + 1, self.geometry
        rows = noise(draw, g.layers, n, g.row_bytes)
        self.add("write_prompt", seat.number, start, rows, noise(draw, g.groups, n, g.index_row_bytes))
        self.add("read_prompt", seat.number, draw.randrange(room + 1))

    def copy(self, direction: str, seat: Seat, n: int, draw: random.Random) -> None:
        """`n` rows between the first slots of `seat`, or any of its chunks' rows, and host places of its own."""
        order = np.random.default_rng(draw.randrange(2**32))
        tokens = np.arange(n)
        places = order.permutation(len(seat.host_pages) * PAGE_TOKENS)[:n] if direction == "to_host" else tokens
        page = seat.host_pages[places // PAGE_TOKENS].astype(np.int64)
        page[order.random(n) < 0.1] = -1
        rows = seat.chunks[tokens // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + tokens % PAGE_TOKENS
        keys = seat.pages[tokens // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + tokens % PAGE_TOKENS
        dtypes = [draw.choice((np.int32, np.int64)) for _ in range(4)]
        device_row = np.tile(rows.astype(dtypes[0]), (self.geometry.groups, 1))
        index_row = None if direction != "keys" and draw.random() < 0.3 else keys.astype(dtypes[1])
        host = page.astype(dtypes[2]), (places % PAGE_TOKENS).astype(dtypes[3])
        self.add("copy", direction, *(() if direction == "keys" else (device_row,)), index_row, *host)

    def step(self, seats: Sequence[Seat], size: int, draw: random.Random, misses: float = 0.3) -> None:
        """One step of `seats`, a stranger that must trip among them now and then, padding of garbage behind; `size`
        seats in all. With drafts each seat brings a drawn number of rows, of which a drawn number is accepted.

        A token whose place is not granted trips too. Its row then selects nothing: `now` stands still for its seat, so
        there may be fewer victims than misses, and no contract says which of them are loaded.
        """
        rows, stuck = [], set()
        for seat in seats:
            if self.seat_rows > 1:
                seat.rows = draw.choice([self.seat_rows, draw.randint(0, self.seat_rows)])
                self.add("grant", seat.number, seat.length + seat.rows)
            if not seat.holes.isdisjoint(
                range(seat.length // PAGE_TOKENS, (seat.length + seat.rows) // PAGE_TOKENS + 1)
            ):
                stuck.add(seat.number)
            rows.append([seat.number, seat.length + 1])
            seat.length += draw.randint(1, seat.rows) if seat.rows else 0
        if len(rows) < size and draw.random() < 0.3:
            wide = self.ids == np.int64
            number, length = draw.choice([(-1, 9), (10**6, 9), (0, 0), (2**32 if wide else -7, 9), (-(2**31), 1)])
            if number or all(row[0] for row in rows):
                rows.insert(draw.randrange(len(rows) + 1), [number, length])
        lengths = [row[1] for row in rows]
        padding = [[draw.randint(-2, 5), draw.randint(-2, 99)] for _ in range(size - len(rows))]
        inputs = np.array(rows + padding).astype(self.ids).T
        seats_of, lengths_of = (np.tile(ids, self.seat_rows) for ids in inputs)  # behind depth 0: garbage
        self.add("begin", seats_of, lengths_of, len(rows))
        self.add("tables")
        g, size = self.geometry, size * self.seat_rows
        self.add("write_new", noise(draw, g.layers, size, g.row_bytes), noise(draw, g.groups, size, g.index_row_bytes))
        lengths = [length + depth for depth in range(self.seat_rows) for length in (*lengths, *[50] * len(padding))]
        for group in range(g.groups):
            topk = draw_topk(draw, lengths, g.topk, misses)
            topk.reshape(self.seat_rows, -1, g.topk)[:, [n for n, (seat, _) in enumerate(rows) if seat in stuck]] = -1
            self.add("swap_in", group, topk)

    def program(
        self, label: str, *, host_used: int, host_pages: int, batch: int, ranks: int | None, **sizes: int
    ) -> Program:
        self.add("tables")
        self.add("memory")
        sizes |= {"tail_slots": self.tail_slots, "seat_rows": self.seat_rows}
        batch *= self.seat_rows
        return Program(label, self.geometry, sizes, host_pages, host_used, batch, ranks, self.ops)


def small(label: str, world: dict[str, Any], cases: Sequence[dict[str, Any]]) -> Program:
    """Cases of one shape, side by side."""
    row_bytes, split, key_bytes = world["rows"]
    groups, k = world["groups"], world["topk"]
    geometry, seat_rows = Geometry(len(groups), row_bytes, groups, key_bytes, k, split), world["seat_rows"]
    tail_slots = max(world["tail_slots"], 2 * seat_rows if seat_rows > 1 else 1)
    script = Script(geometry, tail_slots, world["ids"], seat_rows)
    count = len(cases) * CASE_SEATS
    orders = [np.random.default_rng(cases[0]["seed"] + n).permutation(count * CASE_PAGES) for n in range(3)]
    pages, host_pages, chunks = (order.reshape(count, CASE_PAGES) for order in orders)
    seats = [Seat(n, pages[n], host_pages[n], chunks[n]) for n in range(count)]
    draws = [random.Random(case["seed"]) for case in cases]
    for case, draw, number in zip(cases, draws, range(len(cases)), strict=True):
        for seat, (length, size, preload, holes) in zip(seats[number * CASE_SEATS :], case["seats"], strict=False):
            script.open(seat, draw, length, _hot(k, size), preload, holes=holes)
    script.add("tables")
    size = count + len(cases) + PADDING
    for turn in range(max(len(case["actions"]) for case in cases)):
        taking = []
        for number, (case, draw) in enumerate(zip(cases, draws, strict=True)):
            mine = seats[number * CASE_SEATS : number * CASE_SEATS + len(case["seats"])]
            if turn < len(case["actions"]):
                _act(script, case["actions"][turn], draw.choice(mine), draw)
                taking += [seat for seat in mine if seat.length < LENGTH_MAX + 30 and draw.random() < 0.9]
        script.add("tables")
        draws[0].shuffle(taking)
        script.step(taking, size, draws[0])
    return script.program(
        label,
        host_used=count * CASE_PAGES,
        host_pages=count * CASE_PAGES,
        batch=size,
        ranks=world["ranks"],
        seats=count,
        chunks=count * CASE_PAGES,
        index_pages=count * CASE_PAGES,
        max_pages=CASE_PAGES,
        max_chunks=CASE_PAGES,
        slab_pages=PROMPT_PAGES * count,
    )


def _hot(k: int, choice: int) -> int:
    """0 is resident; else one of the sizes that hold k and fit a small seat."""
    sizes = [size for size in (k, k + 1, 2 * k + 5, 64, 130, 192) if k <= size <= 192]
    return 0 if choice == 0 else sizes[choice % len(sizes)]


def _act(script: Script, action: str, seat: Seat, draw: random.Random) -> None:
    k = script.geometry.topk
    if action == "resize":
        script.resize(seat, _hot(k, draw.randint(1, 6)))
    elif action == "reopen":
        script.open(
            seat, draw, draw.randint(1, LENGTH_MAX), _hot(k, draw.randint(0, 6)), draw.choice([0, 99]), holes=False
        )
    elif action == "clear":
        script.clear(seat)
    elif action == "age":
        script.add("age", seat.number, draw.choice([1, 2046, 2047, 5000, 250_000]))
    elif action == "prompt":
        script.prompt(seat, draw)
    elif action == "copy":
        script.copy(draw.choice(["to_host", "to_device", "keys"]), seat, draw.randint(1, 150), draw)


# -- at the limits

USUAL: Final = ("context", "batch", "rows", "context", "rows")
LARGE: Final = ("arena", "tables", "host")  # memory beyond 32-bit offsets: gigabytes, so rarer
KINDS: Final = (*USUAL, *LARGE, *USUAL * 8)  # each once within the ten that tests/gpu/test_kernels.py runs
LIMIT_ROWS: Final = (*ROWS, (16, 0, 4), (1152, 0, 132))
LIMITS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "k": st.sampled_from([1, 2047, 2048, 4096]),
        "hot": st.sampled_from([4096, 8192, 16_384, 32_768]),
        "tail_slots": st.sampled_from([1, 15, 16]),
        "ranks": st.sampled_from([None, 1, 2, 8, 16]),
        "ids": st.sampled_from([np.int32, np.int64]),
        "rows": st.sampled_from(ROWS),
        "misses": st.sampled_from([0.02, 0.3, 1.0]),
        "below": st.integers(2, 70),
    }
)


@dataclass(frozen=True)
class Extent:
    """How large a state at the limits is. Pages and chunks in use lie at its far end, seats likewise."""

    seats: int
    used_seats: int
    length: int
    hot: int
    rows: tuple[int, int, int]
    layers: int = 2
    chunks: int = 0
    index_pages: int = 0
    host_pages: int = 2048


def limit(label: str, kind: str, drawn: dict[str, Any]) -> Program:
    """Two steps of one state whose sizes are at the limits of `kind`, the others as drawn."""
    extent = _extent(kind, drawn)
    row_bytes, split, key_bytes = extent.rows
    groups = (0,) * extent.layers
    geometry = Geometry(extent.layers, row_bytes, groups, key_bytes, drawn["k"], split)
    script, draw = Script(geometry, drawn["tail_slots"], drawn["ids"]), random.Random(drawn["seed"])
    order = np.random.default_rng(drawn["seed"])
    max_pages, resident = pages_for(extent.length + 2), kind == "context" and drawn["seed"] % 4 == 0
    held = max_pages if resident else managed_chunks(extent.hot)
    used = extent.used_seats
    chunks = max(extent.chunks, used * held)
    index_pages = max(extent.index_pages, used * max_pages)
    shared = 512
    newest, host_used = shared + np.arange(2), shared + 2 * used  # the newest two pages of a context are its own
    seats = [
        Seat(
            extent.seats - 1 - n,
            (index_pages - (n + 1) * max_pages + order.permutation(max_pages)),
            extent.host_pages - host_used + np.append(order.integers(0, shared, max_pages - 2), newest + 2 * n),
            (chunks - (n + 1) * held + order.permutation(held)),
        )
        for n in range(used)
    ]
    for seat in seats:
        script.open(seat, draw, extent.length, 0 if resident else extent.hot, draw.choice([0, extent.hot]), holes=False)
    script.add("tables")
    for _ in range(2):
        script.step(seats, used + (used < 256), draw, drawn["misses"])
    return script.program(
        f"{label} {kind}",
        host_used=host_used,
        host_pages=extent.host_pages,
        batch=used + (used < 256),
        ranks=drawn["ranks"],
        seats=extent.seats,
        chunks=chunks,
        index_pages=index_pages,
        max_pages=max_pages,
        max_chunks=held,
        slab_pages=1,
    )


def _extent(kind: str, drawn: dict[str, Any]) -> Extent:
    hot, length, rows = drawn["hot"], CONTEXT_MAX_TOKENS - drawn["below"], drawn["rows"]
    small_rows = (16, 0, 4) if rows[0] > 26 else rows
    extents = {
        "context": Extent(2, 2, length, hot, small_rows),
        "batch": Extent(256, 256, 9000 + drawn["below"], 4096, small_rows, layers=1),
        "rows": Extent(2, 2, 70_000, 32_768, rows),
        "arena": Extent(
            2, 2, 40_000, hot, (1152, 0, 132), layers=1, chunks=2**32 // (64 * 1152) + 99, index_pages=520_000
        ),
        "tables": Extent(33_000, 3, length, hot, small_rows, layers=1),
        "host": Extent(2, 2, 40_000, hot, (656, 0, 132), layers=1, host_pages=2**32 // (64 * 788) + 600),
    }
    return extents[kind]


# -- draws


def noise(draw: random.Random, *shape: int) -> Array:
    return np.random.default_rng(draw.randrange(2**32)).integers(0, 256, shape, dtype=np.uint8)


def draw_topk(draw: random.Random, lengths: Sequence[int], k: int, misses: float) -> Array:
    """Any order: recent and old tokens, duplicates, padding, positions out of range: int32[B, k]."""
    order = np.random.default_rng(draw.randrange(2**32))
    length = np.maximum(np.array(lengths, dtype=np.int64), 1)[:, None]
    shape = (len(lengths), k)
    near = length - 1 - np.minimum(order.integers(0, k, shape), length - 1)
    tokens = np.where(order.random(shape) < misses, order.integers(0, 2**40, shape) % length, near)
    odd = np.where(order.random(shape) < 0.3, length + order.integers(0, 70, shape), order.choice(ODD, shape))
    return np.where(order.random(shape) < 0.04, odd, tokens).astype(np.int32)
