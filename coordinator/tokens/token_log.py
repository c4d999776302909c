"""Every live request's tokens, in a few arrays: what workers report goes in, what clients read comes out.

Tokens are not messages between actors (docs/architecture.md, section 2): 10,000 requests at 20 tokens a second would be
200,000 task wake-ups. A report's arrays are appended here at numpy's speed, and each client connection keeps a cursor
per request (coordinator.gateway.subscriptions). The log knows nothing of states, pages or clients.

    slot      0..slots-1, one per request the coordinator knows; reused once closed, oldest first
    admission the stay whose reports count; what any other says is stale and dropped
    source    the worker link that may speak for the admission; a worker cannot write another's requests
    length    generated tokens known; position i of a request is `arena[base + i]`
    committed those of them that are in the journal: nothing beyond is delivered. Without a journal, all of them
    durable   rows known to be in host memory (prompt included), never above prompt + length
    granted   tokens (prompt included) that fit the host pages granted so far

Tokens lie in one arena, allocated once and touched lazily, in extents of a power of two; each request has room for
its max_tokens from the start. A binary buddy system (Knowlton 1965) hands extents out. Rejected: an array per request
(appending is a Python loop), pages with a table per request (a second gather for every token, for memory that is
virtual anyway).
"""

from __future__ import annotations

import mmap
from collections import deque
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from coordinator.tokens.token_times import TokenTimes
from protocol.arrays import Int32Array, Int64Array, unpack_int32, unpack_int64
from protocol.errors import CapacityError, InternalError, ProtocolError
from protocol.messages import Progress

#: Room for generated tokens of all requests: 1 GiB of virtual memory, resident as far as it is used.
ARENA_TOKENS: Final = 1 << 28
#: Smallest extent.
EXTENT_TOKENS_MIN: Final = 64

NO_ADMISSION: Final = -1
NO_SOURCE: Final = -1

assert ARENA_TOKENS % EXTENT_TOKENS_MIN == 0


#: Slots as numpy indexes with them; on the wire and between actors they are int32.
Slots: TypeAlias = npt.NDArray[np.intp]


class Appended(NamedTuple):
    """What became of one Progress.

    `slots` are those that it spoke for rightfully, each with `known` tokens before and `fresh` ones now; `tokens` were
    new, `repeated_tokens` known already (a replay), `stale_entries` of departed admissions.
    """

    slots: Slots
    known: Int32Array
    fresh: Int32Array
    tokens: int
    repeated_tokens: int
    stale_entries: int


class News(NamedTuple):
    """Tokens of `slots` from generated position `starts[i]` on, `counts[i]` of them, concatenated in `tokens`, and the
    rows that are durable: what the journal has not seen yet."""

    slots: Int32Array
    starts: Int32Array
    counts: Int32Array
    tokens: Int32Array
    durables: Int32Array


class OutputPart(NamedTuple):
    """Tokens of one request from generated position `start` on, and its durable rows."""

    slot: int
    start: int
    tokens: Int32Array
    durable_tokens: int


class Extents:
    """A buddy system over `size` units; every extent is a power of two, at least `smallest`, and aligned to itself."""

    def __init__(self, size: int, smallest: int) -> None:
        if size & (size - 1) or smallest & (smallest - 1) or not 0 < smallest <= size:
            raise InternalError("arena and smallest extent must be powers of two", field="size", value=size)
        self.size = size
        self._smallest = smallest
        self._free: dict[int, set[int]] = {size: {0}}

    def rounded(self, units: int) -> int:
        """The extent that holds `units`."""
        return max(self._smallest, 1 << max(units - 1, 0).bit_length())

    def allocate(self, units: int) -> int | None:
        """Base of a free extent of `rounded(units)`; None when no block is large enough."""
        extent = block = self.rounded(units)
        while not self._free.get(block):
            block *= 2
            if block > self.size:
                return None
        base = self._free[block].pop()
        while block > extent:
            block //= 2
            self._free.setdefault(block, set()).add(base + block)
        return base

    def free(self, base: int, units: int) -> None:
        """Return an extent, merging it with its free buddies."""
        block = self.rounded(units)
        while block < self.size and (base ^ block) in self._free.get(block, ()):
            self._free[block].remove(base ^ block)
            base &= ~block
            block *= 2
        self._free.setdefault(block, set()).add(base)

    def free_units(self) -> int:
        return sum(block * len(bases) for block, bases in self._free.items())


class TokenLog:
    """Owned by the coordinator's trio thread; every call is synchronous and completes or changes nothing."""

    def __init__(self, slots: int, arena_tokens: int = ARENA_TOKENS, *, journalled: bool = False) -> None:
        self.slots = slots
        self.arena_tokens = arena_tokens
        self.times = TokenTimes(slots)
        self.lengths: Int32Array = np.zeros(slots, np.int32)
        self.committed: Int32Array = np.zeros(slots, np.int32) if journalled else self.lengths
        self._taken: Int32Array = np.zeros(slots, np.int32)  # for the journal
        self._durable_taken: Int32Array = np.zeros(slots, np.int32)
        self._summed: Int32Array = np.zeros(slots, np.int32)  # in its summaries
        self._arena = _lazy_array(arena_tokens)
        self._extents = Extents(arena_tokens, EXTENT_TOKENS_MIN)
        self._free = deque(range(slots))
        self._base: Int64Array = np.zeros(slots, np.int64)
        self._capacity: Int32Array = np.full(slots, -1, np.int32)
        self._admission: Int64Array = np.full(slots, NO_ADMISSION, np.int64)
        self._source: Int32Array = np.full(slots, NO_SOURCE, np.int32)
        self._prompt: Int32Array = np.zeros(slots, np.int32)
        self._granted: Int32Array = np.zeros(slots, np.int32)
        self._durable: Int32Array = np.zeros(slots, np.int32)
        self._asked: npt.NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self._mark: Int32Array = np.zeros(slots, np.int32)

    # ------------------------------------------------------------ life of a slot

    def open(self, max_tokens: int) -> int:
        """A slot with room for `max_tokens`. Raises CapacityError when slots or room are used up."""
        if not self._free:
            raise CapacityError(
                f"all {self.slots} slots are taken", field="slots", value=self.slots, remedy="retry when requests ended"
            )
        base = self._extents.allocate(max_tokens)
        if base is None:
            raise CapacityError(
                f"no room for {max_tokens} tokens of output, {self._extents.free_units()} of {self._extents.size} free",
                field="max_tokens",
                value=max_tokens,
                remedy="ask for fewer tokens, or retry when requests ended",
            )
        slot = self._free.popleft()
        self._base[slot] = base
        self._capacity[slot] = max_tokens
        return slot

    def close(self, slot: int) -> None:
        """Forget the request; the slot and its room are free."""
        self._extents.free(int(self._base[slot]), self._capacity_of(slot))
        self.end_admission(slot)
        self._capacity[slot] = -1
        for cursor in (self.lengths, self.committed, self._taken, self._summed, self._durable, self._durable_taken):
            cursor[slot] = 0
        self._free.append(slot)

    def begin_admission(
        self, slot: int, admission: int, prompt_tokens: int, granted_tokens: int, durable_tokens: int = 0
    ) -> None:
        """From now on only `admission` may append, and only once `bind` has named its link."""
        self._capacity_of(slot)
        self._admission[slot] = admission
        self._prompt[slot] = prompt_tokens
        self._granted[slot] = granted_tokens
        self._durable[slot] = durable_tokens
        self._asked[slot] = False

    def bind(self, slot: int, source: int) -> None:
        """The link with number `source` speaks for the slot's admission."""
        self._source[slot] = source

    def rebind(self, slot: int, admission: int, source: int) -> None:
        """As `bind`, if the slot's admission is that one: a worker's word is not taken for it."""
        if 0 <= slot < self.slots and self._admission[slot] == admission:
            self.bind(slot, source)

    def end_admission(self, slot: int) -> None:
        """Nobody may append until the next `begin_admission` and `bind`; what was said stays."""
        self._admission[slot] = NO_ADMISSION
        self._source[slot] = NO_SOURCE

    # ------------------------------------------------------------ grants

    def grant(self, slot: int, granted_tokens: int) -> None:
        """The request may now hold `granted_tokens` in all; a slot short of that is reported again."""
        self._granted[slot] = granted_tokens
        self._asked[slot] = False

    def report_short(self, appended: Appended, ahead_tokens: int) -> Int32Array:
        """Slots of `appended` with less than `ahead_tokens` of granted room, each once until its next `grant`.

        Requests that started together run short together. Those that can wait are told at the pace at which they use
        room up, so that all have been when three quarters of it are used; with less than that, at once.
        """
        slots = appended.slots
        headroom = self._granted[slots] - self._prompt[slots] - self.lengths[slots]
        is_short = (headroom < ahead_tokens) & ~self._asked[slots]
        if not np.count_nonzero(is_short):
            return np.empty(0, np.int32)
        is_urgent = is_short & (headroom < ahead_tokens // 4)
        spread_tokens = max(3 * ahead_tokens // 4, 1)
        early = np.flatnonzero(is_short & ~is_urgent)[: -(-appended.tokens // spread_tokens)]
        short = np.concatenate([slots[is_urgent], slots[early]])
        self._asked[short] = True
        return short.astype(np.int32)

    # ------------------------------------------------------------ tokens in

    def append(self, progress: Progress, source: int) -> Appended:
        """Take in what link `source` reports; positions known already are dropped (I5), stale admissions too.

        Raises ProtocolError, having changed nothing, when arrays disagree, a slot appears twice, tokens exceed what
        the request asked for, or a position is missed: reports apply in order, so the worker has lost count.
        """
        slots, admissions, starts, counts, tokens, durables = self._unpack(progress)
        mine = (self._admission[slots] == admissions) & (self._source[slots] == source)
        stale = len(mine) - int(np.count_nonzero(mine))
        if stale:
            tokens = tokens[np.repeat(mine, counts)]
            slots, starts, counts, durables = slots[mine], starts[mine], counts[mine], durables[mine]
        known = self.lengths[slots]
        self._check_entries(slots, starts, counts, known)
        repeated = np.minimum(known - starts, counts)
        repeated_tokens = int(repeated.sum())
        fresh = counts - repeated if repeated_tokens else counts
        total = len(tokens) - repeated_tokens
        if total:
            self._write(slots, known, fresh, np.cumsum(counts) - fresh, tokens, total)
            self.lengths[slots] = known + fresh
        rows = self._prompt[slots] + known + fresh
        self._durable[slots] = np.maximum(self._durable[slots], np.minimum(durables, rows))
        return Appended(slots, known, fresh, total, repeated_tokens, stale)

    def _write(
        self, slots: Slots, known: Int32Array, fresh: Int32Array, first: Int64Array, tokens: Int32Array, total: int
    ) -> None:
        """Write `fresh[i]` tokens, from `tokens[first[i]]` on, behind the `known[i]` of slot i."""
        target = self._base[slots] + known
        if total == len(slots) and np.count_nonzero(fresh == 1) == total:  # a decode step: one token each
            self._arena[target] = tokens if len(tokens) == total else tokens[first]
            return
        offset = np.arange(total)
        before = np.cumsum(fresh) - fresh
        self._arena[np.repeat(target - before, fresh) + offset] = tokens[np.repeat(first - before, fresh) + offset]

    def _unpack(self, progress: Progress) -> tuple[Slots, Int64Array, Int32Array, Int32Array, Int32Array, Int32Array]:
        slots = unpack_int32(progress.slots, "slots").astype(np.intp)  # as indices are: eight lookups follow
        admissions = unpack_int64(progress.admissions, "admissions")
        starts = unpack_int32(progress.starts, "starts")
        counts = unpack_int32(progress.counts, "counts")
        tokens = unpack_int32(progress.tokens, "tokens")
        durables = unpack_int32(progress.durables, "durables")
        if not len(slots) == len(admissions) == len(starts) == len(counts) == len(durables):
            raise ProtocolError(
                "arrays of different lengths", field="progress", remedy="one element per request in each"
            )
        if len(slots) and (slots.min() < 0 or slots.max() >= self.slots):
            raise ProtocolError("no such slot", field="slots", value=f"{slots.min()}..{slots.max()}")
        if len(slots) and min(counts.min(), starts.min()) < 0:
            raise ProtocolError("negative positions", field="starts, counts")
        if int(counts.sum(dtype=np.int64)) != len(tokens):
            raise ProtocolError("counts do not add up to the tokens sent", field="tokens", value=len(tokens))
        return slots, admissions, starts, counts, tokens, durables

    def _check_entries(self, slots: Slots, starts: Int32Array, counts: Int32Array, known: Int32Array) -> None:
        order = np.arange(len(slots), dtype=np.int32)
        self._mark[slots] = order
        if np.count_nonzero(self._mark[slots] != order):
            raise ProtocolError("a slot appears twice", field="slots", remedy="one entry per request in a report")
        if np.count_nonzero(starts > known):
            worst = int(np.argmax(starts - known))
            raise ProtocolError(
                f"position {known[worst]} is missing",
                field="starts",
                value=int(starts[worst]),
                remedy="start a new epoch",
            )
        if np.count_nonzero(starts.astype(np.int64) + counts > self._capacity[slots]):
            raise ProtocolError("more tokens than the request asked for", field="counts")

    # ------------------------------------------------------------ to and from the journal

    def take_news(self) -> News | None:
        """Tokens and durable lengths that no call before gave; None: there are none."""
        slots = np.flatnonzero((self.lengths > self._taken) | (self._durable != self._durable_taken)).astype(np.int32)
        if not len(slots):
            return None
        starts, durables = self._taken[slots], self._durable[slots]
        counts = self.lengths[slots] - starts
        tokens = self.gather(slots, starts, counts)
        self._taken[slots] = self.lengths[slots]
        self._durable_taken[slots] = durables
        return News(slots, starts, counts, tokens, durables)

    def commit(self, news: News) -> None:
        """What `take_news` gave is in the journal."""
        self.committed[news.slots] = news.starts + news.counts

    def take_output(self, slot: int, tokens_max: int, *, has_rows: bool) -> OutputPart | None:
        """For a summary, at most `tokens_max` tokens of a request that were taken by `take_news` and that no call of
        this gave before. None: there are none, nor rows in pages, whose number would have to be said."""
        start, taken, base = int(self._summed[slot]), int(self._taken[slot]), int(self._base[slot])
        if start == taken and not has_rows:
            return None
        stop = min(taken, start + tokens_max)
        self._summed[slot] = stop
        return OutputPart(slot, start, self._arena[base + start : base + stop].copy(), int(self._durable_taken[slot]))

    def reopen(self, slot: int, max_tokens: int) -> None:
        """The slot and the room that a request had. Raises CapacityError when there are not as many any more."""
        base = self._extents.allocate(max_tokens) if slot < self.slots else None
        if base is None:
            raise CapacityError(
                f"{self.slots} slots do not hold the requests in the journal",
                field="coordinator.live_requests_max",
                value=slot,
                remedy="raise live_requests_max or ended_keep_max to what they were",
            )
        self._base[slot] = base
        self._capacity[slot] = max_tokens

    def recover(self, news: News) -> None:
        """What an earlier coordinator has taken in; of requests that are forgotten: nothing."""
        slots, starts, counts, tokens, durables = news
        is_open = self._capacity[slots] >= 0
        if not is_open.all():
            tokens = tokens[np.repeat(is_open, counts)]
            slots, starts, counts, durables = (it[is_open] for it in (slots, starts, counts, durables))
        places = slots.astype(np.intp)
        self._write(places, starts, counts, np.cumsum(counts) - counts, tokens, len(tokens))
        self.lengths[places] = starts + counts
        self._durable[places] = durables

    def recover_output(self, output: OutputPart) -> None:
        """What a summary has of one request; all of it may be known, and more."""
        slot, tokens = output.slot, output.tokens
        if self._capacity[slot] < 0:
            return
        base, stop = int(self._base[slot]), output.start + len(tokens)
        self._arena[base + output.start : base + stop] = tokens
        self._summed[slot] = stop
        self.lengths[slot] = max(self.lengths[slot], stop)
        self._durable[slot] = output.durable_tokens

    def recovered(self) -> None:
        """All is in the journal: nothing of it is news."""
        self._free = deque(np.flatnonzero(self._capacity < 0).tolist())
        self.committed[:] = self._taken[:] = self.lengths
        self._durable_taken[:] = self._durable

    def set_durable(self, slot: int, durable_tokens: int) -> None:
        """Rows known durable, as an earlier life knew."""
        self._durable[slot] = durable_tokens

    # ------------------------------------------------------------ tokens out

    def length(self, slot: int) -> int:
        """Generated tokens known."""
        return int(self.lengths[slot])

    def durable(self, slot: int) -> int:
        """Rows known durable in this admission."""
        return int(self._durable[slot])

    def tokens(self, slot: int, start: int) -> bytes:
        """Tokens from generated position `start` on, as int32 bytes."""
        base = int(self._base[slot])
        return self._arena[base + start : base + self.length(slot)].tobytes()

    def gather(self, slots: Int32Array, starts: Int32Array, counts: Int32Array) -> Int32Array:
        """`counts[i]` tokens of `slots[i]` from position `starts[i]`, concatenated; all must be known."""
        before = np.cumsum(counts) - counts
        index = np.repeat(self._base[slots] + starts - before, counts)
        index += np.arange(len(index))
        gathered: Int32Array = self._arena[index]
        return gathered

    def check_invariants(self) -> None:
        """Raise InternalError unless slots, extents and lengths are consistent."""
        opened = np.flatnonzero(self._capacity >= 0)
        held = sum(self._extents.rounded(self._capacity_of(int(slot))) for slot in opened)
        checks = {
            "every slot is open or free": len(opened) + len(self._free) == self.slots,
            "every token of the arena is free or in one extent": held + self._extents.free_units()
            == self._extents.size,
            "what is committed is known": bool((self.committed <= self.lengths).all()),
            "no request is longer than it asked for": bool((self.lengths[opened] <= self._capacity[opened]).all()),
            "durable rows exist": bool((self._durable <= self._prompt + self.lengths)[self._admission >= 0].all()),
        }
        for claim, holds in checks.items():
            if not holds:
                raise InternalError(f"token log: not so: {claim}")

    def _capacity_of(self, slot: int) -> int:
        capacity = int(self._capacity[slot])
        if capacity < 0:
            raise InternalError("the slot is not open", field="slot", value=slot)
        return capacity


def _lazy_array(items: int) -> Int32Array:
    """Zeroed memory, resident page by page as it is touched; a huge page per short output would be mostly air."""
    memory = mmap.mmap(-1, 4 * items)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int32)
