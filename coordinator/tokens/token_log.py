"""The generated tokens of every live request, in a few arrays: workers' reports append, client connections read. Pure.

Tokens are not messages between actors (docs/architecture.md, section 2): 10,000 requests at 20 tokens a second would be
200,000 task wake-ups. A report's arrays are appended here with numpy operations, and each client connection keeps a
cursor per request (coordinator.gateway.subscriptions). The log does not know states, pages or clients.

    request_index 0 to request_indices-1, one per request the coordinator knows; reused once closed, oldest first
    placement the placement whose reports count; reports of another one are stale and dropped
    source    number of the worker link that may append to the placement: a worker cannot write other workers' requests
    length    generated tokens known; position i of a request is `arena[base + i]`
    committed generated tokens in the journal; only these are delivered. Without a journal, equal to length
    durable   rows known to be in host memory (prompt included), at most prompt + length
    granted   tokens (prompt included) that fit the host pages granted so far
    room      tokens that its extent holds: at least what its grant lets its worker generate, at most max_tokens

Tokens lie in one arena, touched lazily, in extents of a power of two. Behind the tokens of
a request that asks for log-probabilities, its extent has a row of words for each of them (protocol/logprobs.py). Such
requests are few, and their rows are appended one request at a time. No array that leaves this class is a view into the
arena, so an extent may move at any time.

Room follows what is generated. A request begins with room for its first grant. The Scheduler asks for more before it
grants more pages (`make_room`); `cut`, at the end, leaves what was generated. `append` only writes where there is room:
a token never comes that cannot be kept. An extent that grows doubles, so a token is copied once on average.

Where there is too little room, the request waits without a grant, off its worker (coordinator.tokens.extents).

Rejected: an array per request (appending is a Python loop); pages with a table per request (a second gather for every
token).
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Hashable
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from basics.shares import check_share
from coordinator.tokens.extents import Extents, Places
from coordinator.tokens.logprob_rows import LogprobRows, unpack_logprobs
from coordinator.tokens.token_times import TokenTimes
from protocol.arrays import Int32Array, Int64Array, unpack_int32, unpack_int64
from protocol.errors import CapacityError, InternalError, ProtocolError
from protocol.messages import Progress
from protocol.units import PAGE_TOKENS

#: Generated tokens of all requests together, and words of their rows: 1 GiB of virtual memory, resident
#: as far as it is used.
ARENA_TOKENS: Final = 1 << 28
#: Smallest extent.
EXTENT_TOKENS_MIN: Final = 64
#: Tokens that a worker may report beyond the rows granted: the last one has no row, and a step may bring several.
BEYOND_GRANT_TOKENS: Final = PAGE_TOKENS
#: What refusals call the room of all outputs.
PLACES: Final = "output places"
#: Outputs stay until requests are forgotten.
FORGOTTEN: Final = "have been forgotten, some time after their end (coordinator.ended_keep_s)"

NO_PLACEMENT: Final = -1
NO_SOURCE: Final = -1
EMPTY: Final[Int32Array] = np.empty(0, np.int32)

assert ARENA_TOKENS % EXTENT_TOKENS_MIN == 0


#: Request indices in the type that numpy indexes with; on the wire and between actors they are int32.
RequestIndices: TypeAlias = npt.NDArray[np.intp]


class Appended(NamedTuple):
    """Result of appending one Progress.

    `request_indices` are the entries whose placement and source were current, each with `known` tokens before and
    `fresh` new ones. `tokens` counts new tokens, `repeated_tokens` those known already (a replay), `stale_entries` the
    entries of ended placements. Of `staged`, int32, more full pages of the prompt are durable.
    """

    request_indices: RequestIndices
    known: Int32Array
    fresh: Int32Array
    tokens: int
    repeated_tokens: int
    stale_entries: int
    staged: Int32Array


class News(NamedTuple):
    """Tokens and durable rows that the journal does not have yet, as int32 arrays.

    `counts[i]` tokens of `request_indices[i]` from generated position `starts[i]` on, concatenated in `tokens`;
    `durables[i]` is the request's number of durable rows. `logprobs`: where a request asks for them.
    """

    request_indices: Int32Array
    starts: Int32Array
    counts: Int32Array
    tokens: Int32Array
    durables: Int32Array
    logprobs: LogprobRows | None = None


class OutputPart(NamedTuple):
    """Tokens of one request from generated position `start` on, and its durable rows; rows of log-probabilities, int32
    [tokens * words], where it asks for them. `is_cut`: there are more."""

    request_index: int
    start: int
    tokens: Int32Array
    durable_tokens: int
    rows: Int32Array = EMPTY
    is_cut: bool = False


class TokenLog:
    """Owned by the coordinator's trio thread; every call is synchronous and completes or changes nothing."""

    def __init__(self, request_indices: int, arena_tokens: int = ARENA_TOKENS, *, journalled: bool = False) -> None:
        self.request_indices = request_indices
        self.arena_tokens = arena_tokens
        self.times = TokenTimes(request_indices)
        self.lengths: Int32Array = np.zeros(request_indices, np.int32)
        self.committed: Int32Array = np.zeros(request_indices, np.int32) if journalled else self.lengths
        self._taken: Int32Array = np.zeros(request_indices, np.int32)  # handed to the journal by take_news
        self._durable_taken: Int32Array = np.zeros(request_indices, np.int32)
        self._summed: Int32Array = np.zeros(request_indices, np.int32)  # handed to a summary by take_output
        self._arena = _lazy_array(arena_tokens)
        self._places = Places(request_indices, Extents(arena_tokens, EXTENT_TOKENS_MIN))
        self._free = deque(range(request_indices))
        self._base: Int64Array = np.zeros(request_indices, np.int64)
        self._room: Int32Array = np.zeros(request_indices, np.int32)
        self._capacity: Int32Array = np.full(request_indices, -1, np.int32)  # max_tokens, or what it ended with
        self._words: Int32Array = np.zeros(request_indices, np.int32)  # of a row of log-probabilities
        self._asking = 0  # open request indices that have rows
        self._placement: Int64Array = np.full(request_indices, NO_PLACEMENT, np.int64)
        self._source: Int32Array = np.full(request_indices, NO_SOURCE, np.int32)
        self._prompt: Int32Array = np.zeros(request_indices, np.int32)
        self._granted: Int32Array = np.zeros(request_indices, np.int32)
        self._durable: Int32Array = np.zeros(request_indices, np.int32)
        self._asked: npt.NDArray[np.bool_] = np.zeros(request_indices, np.bool_)
        self._mark: Int32Array = np.zeros(request_indices, np.int32)

    # ------------------------------------------------------------ request indices and placements

    def open(self, max_tokens: int, words: int = 0, *, tokens: int = 0, owner: Hashable = None) -> int:
        """A request index for an output of `max_tokens`, each with a row of `words`, with room for a grant of `tokens`.

        Raises CapacityError when indices or places are used up, or `owner` is at its share of the places.
        """
        if not self._free:
            raise CapacityError(
                f"all {self.request_indices} request indices are in use",
                field="request_indices",
                value=self.request_indices,
                remedy="retry when requests have ended",
            )
        places, used = self._places, self.arena_tokens - self.free_places()
        units_max = places.extents.rounded(max_tokens * (1 + words))
        if units_max > self.arena_tokens:
            each = f" with log-probabilities, {1 + words} places each" if words else ""
            text = f"no room for {max_tokens} tokens of output{each}: there are {self.arena_tokens} places in all"
            raise CapacityError(text, field="max_tokens", value=max_tokens, remedy="ask for fewer tokens")
        tokens = min(tokens + BEYOND_GRANT_TOKENS, max_tokens)
        asked = places.extents.rounded(tokens * (1 + words))
        check_share(
            PLACES,
            asked,
            held=self.held_by(owner),
            used=used,
            limit=self.arena_tokens,
            field="outputs",
            until=FORGOTTEN,
        )
        if not places.are_safe(units_max, asked):
            raise CapacityError(
                f"{used} {PLACES} already, and others need the rest of {self.arena_tokens} to come to their end",
                field="outputs",
                value=self.arena_tokens,
                remedy=f"retry when requests {FORGOTTEN}",
            )
        request_index = self._free.popleft()
        self._enter(request_index, max_tokens, words, owner)
        self._grow(request_index, tokens)
        return request_index

    def _enter(self, request_index: int, max_tokens: int, words: int, owner: Hashable) -> None:
        self._capacity[request_index], self._words[request_index] = max_tokens, words
        self._places.enter(request_index, self._places.extents.rounded(max_tokens * (1 + words)), owner)
        self._asking += words > 0

    def _leave(self, request_index: int) -> None:
        self._asking -= bool(self._words[request_index])
        self._capacity[request_index], self._words[request_index], self._room[request_index] = -1, 0, 0
        self._places.leave(request_index)

    def close(self, request_index: int) -> None:
        """Forget the request; free its index and its extent."""
        self._capacity_of(request_index)
        self._places.extents.free(int(self._base[request_index]), self._places.of(request_index))
        self.end_placement(request_index)
        self._leave(request_index)
        for cursor in (self.lengths, self.committed, self._taken, self._summed, self._durable, self._durable_taken):
            cursor[request_index] = 0
        self._free.append(request_index)

    def begin_placement(
        self, request_index: int, placement: int, prompt_tokens: int, granted_tokens: int, durable_tokens: int = 0
    ) -> None:
        """Let only `placement` append from now on, once `bind` has set its link."""
        self._fit(request_index, granted_tokens - prompt_tokens)
        self._placement[request_index] = placement
        self._prompt[request_index] = prompt_tokens
        self._granted[request_index] = granted_tokens
        self._durable[request_index] = durable_tokens
        self._asked[request_index] = False

    def bind(self, request_index: int, source: int) -> None:
        """The worker link with number `source` may append to the current placement."""
        self._source[request_index] = source

    def rebind(self, request_index: int, placement: int, source: int) -> None:
        """Do as `bind`, but only if the current placement is `placement`; a hello with other numbers has no effect."""
        if 0 <= request_index < self.request_indices and self._placement[request_index] == placement:
            self.bind(request_index, source)

    def end_placement(self, request_index: int) -> None:
        """No link may append until the next `begin_placement` and `bind`. The tokens stay."""
        self._placement[request_index] = NO_PLACEMENT
        self._source[request_index] = NO_SOURCE

    # ------------------------------------------------------------ grants

    def grant(self, request_index: int, granted_tokens: int) -> None:
        """The request may now hold `granted_tokens` in all; `report_short` may return it again."""
        self._fit(request_index, granted_tokens - int(self._prompt[request_index]))
        self._granted[request_index] = granted_tokens
        self._asked[request_index] = False

    def report_short(self, appended: Appended, ahead_tokens: int) -> Int32Array:
        """Request indices of `appended` with less than `ahead_tokens` granted and unused, each once until its `grant`.

        Requests that started together run short together. Requests with at least a quarter of `ahead_tokens` left are
        returned at the pace at which they use tokens, so that each is returned before it has less than a quarter.
        Requests with less are returned at once.
        """
        request_indices = appended.request_indices
        headroom = self._granted[request_indices] - self._prompt[request_indices] - self.lengths[request_indices]
        is_short = (headroom < ahead_tokens) & ~self._asked[request_indices]
        if not np.count_nonzero(is_short):
            return np.empty(0, np.int32)
        is_urgent = is_short & (headroom < ahead_tokens // 4)
        spread_tokens = max(3 * ahead_tokens // 4, 1)
        early = np.flatnonzero(is_short & ~is_urgent)[: -(-appended.tokens // spread_tokens)]
        short = np.concatenate([request_indices[is_urgent], request_indices[early]])
        self._asked[short] = True
        return short.astype(np.int32)

    # ------------------------------------------------------------ room

    def make_room(self, request_index: int, tokens: int) -> bool:
        """Give the request room for a grant of `tokens` of output, at most for max_tokens. False: not now. A refusal is
        repeated in microseconds until any request has more or fewer places."""
        tokens = self._needed(request_index, tokens)
        if tokens <= self._room[request_index] and self._places.of(request_index):
            return True
        more = self._extent_for(request_index, tokens) - self._places.of(request_index)
        return self._places.may_grow(request_index, more) and self._grow(request_index, tokens)

    def hold(self, request_index: int, is_held: bool) -> None:
        """Note whether an operator holds the request: others of its owner do not wait for its end."""
        self._places.hold(request_index, is_held)

    def cut(self, request_index: int) -> None:
        """The request has ended and generates no more: leave it room for what it has generated."""
        length = self.length(request_index)
        self._capacity_of(request_index)
        self._capacity[request_index] = length
        base, output = int(self._base[request_index]), self._content(request_index)
        kept = self._extent_for(request_index, length)
        self._places.extents.cut(base, self._places.of(request_index), kept)
        self._places.end(request_index)
        self._settle(request_index, base, kept, *output)

    def free_places(self) -> int:
        """Places of the arena that no request has."""
        return self._places.extents.free_units

    def held_by(self, owner: Hashable) -> int:
        """Places that requests of `owner` have, ended ones too."""
        return self._places.held_by(owner)

    def _fit(self, request_index: int, granted_tokens: int) -> None:
        """Make sure that what a grant lets its worker generate finds room. It was made before the grant was decided."""
        tokens = self._needed(request_index, granted_tokens)
        if tokens > self._room[request_index] and not self._grow(request_index, tokens):
            raise InternalError("more was granted than there is room for", field="granted_tokens", value=granted_tokens)

    def _needed(self, request_index: int, granted_tokens: int) -> int:
        """Tokens that a grant of so many tokens of output lets its worker generate."""
        return min(granted_tokens + BEYOND_GRANT_TOKENS, self._capacity_of(request_index))

    def _extent_for(self, request_index: int, tokens: int) -> int:
        return self._places.extents.rounded(tokens * (1 + int(self._words[request_index])))

    def _grow(self, request_index: int, tokens: int) -> bool:
        """Move the request to an extent for `tokens`. False, and nothing changed: there are too few places."""
        before, after = self._places.of(request_index), self._extent_for(request_index, tokens)
        base = self._places.extents.allocate(after)
        if base is None:
            return self._pack(request_index, after)
        output = self._content(request_index)
        if before:
            self._places.extents.free(int(self._base[request_index]), before)
        self._settle(request_index, base, after, *output)
        return True

    def _pack(self, request_index: int, units: int) -> bool:
        """Lay all extents down anew, without gaps, that of this request with `units`. Takes as long as copying all
        outputs; it is only needed when the arena is nearly full."""
        if self.free_places() < units - self._places.of(request_index):
            return False
        outputs = {it: self._content(it) for it in np.flatnonzero(self._places.units).tolist()}
        outputs[request_index] = self._content(request_index)
        sizes = {it: self._places.of(it) for it in outputs} | {request_index: units}
        extents = self._places.extents = Extents(self.arena_tokens, EXTENT_TOKENS_MIN)
        for index in sorted(sizes, key=lambda it: -sizes[it]):
            base = extents.allocate(sizes[index])
            assert base is not None
            self._settle(index, base, sizes[index], *outputs[index])
        return True

    def _content(self, request_index: int) -> tuple[Int32Array, Int32Array]:
        """Copies of its tokens and of their rows."""
        base, length = int(self._base[request_index]), int(self.lengths[request_index])
        tokens, words = self._arena[base : base + length].copy(), int(self._words[request_index])
        if not words:
            return tokens, EMPTY
        first = self._first_row(request_index)
        return tokens, self._arena[first : first + length * words].copy()

    def _settle(self, request_index: int, base: int, units: int, tokens: Int32Array, rows: Int32Array) -> None:
        """The request has that extent from now on; write there what it has generated."""
        self._base[request_index] = base
        self._places.set_units(request_index, units)
        fits = units // (1 + int(self._words[request_index]))
        self._room[request_index] = min(fits, int(self._capacity[request_index]))
        self._arena[base : base + len(tokens)] = tokens
        if len(rows):
            first = self._first_row(request_index)
            self._arena[first : first + len(rows)] = rows

    # ------------------------------------------------------------ tokens in

    def append(self, progress: Progress, source: int) -> Appended:
        """Append the tokens that link `source` reports. Drops known positions (I5) and entries of ended placements.

        Raises ProtocolError, with nothing changed, when arrays disagree, a request index appears twice, tokens exceed
        max_tokens or the grant, rows of log-probabilities are not what a request asks for, or a position is missing:
        reports apply in order, so the worker has skipped one.
        """
        request_indices, placements, starts, counts, tokens, durables = self._unpack(progress)
        logprobs = unpack_logprobs(progress.logprobs, counts)
        mine = (self._placement[request_indices] == placements) & (self._source[request_indices] == source)
        if self._asking or logprobs is not None:
            self._check_rows(request_indices, mine & (counts > 0), logprobs)
        stale = len(mine) - int(np.count_nonzero(mine))
        if stale:
            tokens = tokens[np.repeat(mine, counts)]
            if logprobs is not None:
                logprobs = logprobs.only(mine)
            request_indices, starts, counts, durables = (
                request_indices[mine],
                starts[mine],
                counts[mine],
                durables[mine],
            )
        known = self.lengths[request_indices]
        self._check_entries(request_indices, starts, counts, known)
        repeated = np.minimum(known - starts, counts)
        repeated_tokens = int(repeated.sum())
        fresh = counts - repeated if repeated_tokens else counts
        total = len(tokens) - repeated_tokens
        if total:
            self._write(request_indices, known, fresh, np.cumsum(counts) - fresh, tokens, total)
            if logprobs is not None:
                self._write_rows(request_indices, known, fresh, logprobs)
            self.lengths[request_indices] = known + fresh
        rows = self._prompt[request_indices] + known + fresh
        before = self._durable[request_indices]
        self._durable[request_indices] = after = np.maximum(before, np.minimum(durables, rows))
        staged = EMPTY
        if np.count_nonzero(is_prompt := before < self._prompt[request_indices]):
            is_longer = is_prompt & (after // PAGE_TOKENS > before // PAGE_TOKENS)
            staged = request_indices[is_longer].astype(np.int32)
        return Appended(request_indices, known, fresh, total, repeated_tokens, stale, staged)

    def _write(
        self,
        request_indices: RequestIndices,
        known: Int32Array,
        fresh: Int32Array,
        first: Int64Array,
        tokens: Int32Array,
        total: int,
    ) -> None:
        """Write `fresh[i]` tokens, from `tokens[first[i]]` on, behind the `known[i]` of `request_indices[i]`."""
        target = self._base[request_indices] + known
        if total == len(request_indices) and np.count_nonzero(fresh == 1) == total:  # a decode step: one token each
            self._arena[target] = tokens if len(tokens) == total else tokens[first]
            return
        offset = np.arange(total)
        before = np.cumsum(fresh) - fresh
        self._arena[np.repeat(target - before, fresh) + offset] = tokens[np.repeat(first - before, fresh) + offset]

    def _write_rows(
        self, request_indices: RequestIndices, known: Int32Array, fresh: Int32Array, logprobs: LogprobRows
    ) -> None:
        """Write the last `fresh[i]` rows of entry i behind the `known[i]` of `request_indices[i]`."""
        for entry in np.flatnonzero((fresh > 0) & (logprobs.words > 0)).tolist():
            words, stop = int(logprobs.words[entry]), int(logprobs.stop[entry])
            target = self._first_row(int(request_indices[entry])) + int(known[entry]) * words
            size = int(fresh[entry]) * words
            self._arena[target : target + size] = logprobs.rows[stop - size : stop]

    def _first_row(self, request_index: int) -> int:
        """Return the place where the rows of a request begin."""
        return int(self._base[request_index]) + int(self._room[request_index])

    def _check_rows(
        self, request_indices: RequestIndices, has_tokens: npt.NDArray[np.bool_], logprobs: LogprobRows | None
    ) -> None:
        wanted = self._words[request_indices]
        sent = 0 if logprobs is None else logprobs.words
        wrong = np.flatnonzero((wanted != sent) & has_tokens)
        if len(wrong):
            worst = int(wrong[0])
            raise ProtocolError(
                f"the request asks for rows of {wanted[worst]} words",
                field="logprobs.words",
                value=0 if logprobs is None else int(logprobs.words[worst]),
            )

    def _unpack(
        self, progress: Progress
    ) -> tuple[RequestIndices, Int64Array, Int32Array, Int32Array, Int32Array, Int32Array]:
        # converted once to numpy's index type: eight lookups follow
        request_indices = unpack_int32(progress.request_indices, "request_indices").astype(np.intp)
        placements = unpack_int64(progress.placements, "placements")
        starts = unpack_int32(progress.starts, "starts")
        counts = unpack_int32(progress.counts, "counts")
        tokens = unpack_int32(progress.tokens, "tokens")
        durables = unpack_int32(progress.durables, "durables")
        if not len(request_indices) == len(placements) == len(starts) == len(counts) == len(durables):
            raise ProtocolError(
                "arrays of different lengths", field="progress", remedy="send one element per request in each"
            )
        if len(request_indices) and (request_indices.min() < 0 or request_indices.max() >= self.request_indices):
            raise ProtocolError(
                "no such request index",
                field="request_indices",
                value=f"{request_indices.min()}..{request_indices.max()}",
            )
        if len(request_indices) and min(counts.min(), starts.min()) < 0:
            raise ProtocolError("negative positions", field="starts, counts")
        if int(counts.sum(dtype=np.int64)) != len(tokens):
            raise ProtocolError("counts do not add up to the tokens sent", field="tokens", value=len(tokens))
        return request_indices, placements, starts, counts, tokens, durables

    def _check_entries(
        self, request_indices: RequestIndices, starts: Int32Array, counts: Int32Array, known: Int32Array
    ) -> None:
        order = np.arange(len(request_indices), dtype=np.int32)
        self._mark[request_indices] = order
        if np.count_nonzero(self._mark[request_indices] != order):
            raise ProtocolError(
                "a request index appears twice",
                field="request_indices",
                remedy="send one entry per request in a report",
            )
        if np.count_nonzero(starts > known):
            worst = int(np.argmax(starts - known))
            raise ProtocolError(
                f"position {known[worst]} is missing",
                field="starts",
                value=int(starts[worst]),
                remedy="start a new epoch",
            )
        if np.count_nonzero(starts.astype(np.int64) + counts > self._room[request_indices]):
            raise ProtocolError("more tokens than the request asked for, or was granted", field="counts")

    # ------------------------------------------------------------ to and from the journal

    def take_news(self) -> News | None:
        """Tokens and durable rows that no earlier call returned; None: there are none."""
        request_indices = np.flatnonzero((self.lengths > self._taken) | (self._durable != self._durable_taken)).astype(
            np.int32
        )
        if not len(request_indices):
            return None
        starts, durables = self._taken[request_indices], self._durable[request_indices]
        counts = self.lengths[request_indices] - starts
        tokens = self.gather(request_indices, starts, counts)
        logprobs = self.gather_logprobs(request_indices, starts, counts)
        self._taken[request_indices] = self.lengths[request_indices]
        self._durable_taken[request_indices] = durables
        return News(request_indices, starts, counts, tokens, durables, logprobs)

    def commit(self, news: News) -> None:
        """`news`, returned by `take_news`, is in the journal now."""
        self.committed[news.request_indices] = news.starts + news.counts

    def take_output(self, request_index: int, tokens_max: int, *, has_rows: bool) -> OutputPart | None:
        """The next part of a request's output for a summary: at most `tokens_max` tokens and words of their rows, but
        one token at least.

        Only tokens that `take_news` has returned, and no earlier call of this, are returned. None: there are no such
        tokens, and without `has_rows` no durable rows to record.
        """
        start, taken, base = (
            int(self._summed[request_index]),
            int(self._taken[request_index]),
            int(self._base[request_index]),
        )
        if start == taken and not has_rows:
            return None
        words, rows = int(self._words[request_index]), self._first_row(request_index)
        stop = min(taken, start + max(1, tokens_max // (1 + words)))
        self._summed[request_index] = stop
        return OutputPart(
            request_index,
            start,
            self._arena[base + start : base + stop].copy(),
            int(self._durable_taken[request_index]),
            self._arena[rows + start * words : rows + stop * words].copy(),
            is_cut=stop < taken,
        )

    def reopen(self, request_index: int, max_tokens: int, words: int = 0, *, owner: Hashable = None) -> None:
        """Open `request_index` again; room for what it has comes with `recover`. Raises CapacityError when indices are
        fewer now."""
        if request_index >= self.request_indices:
            raise CapacityError(
                f"{self.request_indices} request indices are too few for the requests in the journal",
                field="coordinator.live_requests_max",
                value=request_index,
                remedy="raise live_requests_max or ended_keep_max to their earlier values",
            )
        self._enter(request_index, max_tokens, words, owner)
        self._regrow(request_index, 0)

    def _regrow(self, request_index: int, tokens: int) -> None:
        """Room for what the journal has: the incarnation that wrote it had as much."""
        if tokens > self._capacity[request_index] or not self._grow(request_index, tokens):
            raise CapacityError(
                f"{self.free_places()} of {self.arena_tokens} {PLACES} are free, and the journal has more outputs",
                field="coordinator.journal",
                value=request_index,
                remedy="start the version that wrote it, and let requests end",
            )

    def recover(self, news: News) -> None:
        """Restore tokens from the journal; those of forgotten requests are ignored."""
        request_indices, starts, counts, tokens, durables, logprobs = news
        is_open = self._capacity[request_indices] >= 0
        if not is_open.all():
            tokens = tokens[np.repeat(is_open, counts)]
            request_indices, starts, counts, durables = (
                it[is_open] for it in (request_indices, starts, counts, durables)
            )
            if logprobs is not None:
                logprobs = logprobs.only(is_open)
        places = request_indices.astype(np.intp)
        for entry in np.flatnonzero(starts + counts > self._room[places]).tolist():
            self._regrow(int(places[entry]), int(starts[entry] + counts[entry]))
        self._write(places, starts, counts, np.cumsum(counts) - counts, tokens, len(tokens))
        if logprobs is not None:
            self._write_rows(places, starts, counts, logprobs)
        self.lengths[places] = starts + counts
        self._durable[places] = durables

    def recover_output(self, output: OutputPart) -> None:
        """Restore a part of one request's output from a summary; its positions may be known already."""
        request_index, tokens = output.request_index, output.tokens
        if self._capacity[request_index] < 0:
            return
        stop = output.start + len(tokens)
        if stop > self._room[request_index]:
            self._regrow(request_index, stop)
        base = int(self._base[request_index])
        self._arena[base + output.start : base + stop] = tokens
        row = self._first_row(request_index) + output.start * int(self._words[request_index])
        self._arena[row : row + len(output.rows)] = output.rows
        self._summed[request_index] = stop
        self.lengths[request_index] = max(self.lengths[request_index], stop)
        self._durable[request_index] = output.durable_tokens

    def recovered(self) -> None:
        """Recovery is complete: all tokens are in the journal, so none of them is news."""
        self._free = deque(np.flatnonzero(self._capacity < 0).tolist())
        self.committed[:] = self._taken[:] = self.lengths
        self._durable_taken[:] = self._durable

    def set_durable(self, request_index: int, durable_tokens: int) -> None:
        """Restore the number of durable rows."""
        self._durable[request_index] = durable_tokens

    # ------------------------------------------------------------ tokens out

    def length(self, request_index: int) -> int:
        """Generated tokens known."""
        return int(self.lengths[request_index])

    def durable(self, request_index: int) -> int:
        """Rows known durable in this placement."""
        return int(self._durable[request_index])

    def tokens(self, request_index: int, start: int) -> bytes:
        """Tokens from generated position `start` on, as int32 bytes."""
        base = int(self._base[request_index])
        return self._arena[base + start : base + self.length(request_index)].tobytes()

    def gather(self, request_indices: Int32Array, starts: Int32Array, counts: Int32Array) -> Int32Array:
        """`counts[i]` tokens of `request_indices[i]` from position `starts[i]`, concatenated; all must be known."""
        before = np.cumsum(counts) - counts
        index = np.repeat(self._base[request_indices] + starts - before, counts)
        index += np.arange(len(index))
        gathered: Int32Array = self._arena[index]
        return gathered

    @property
    def has_logprobs(self) -> bool:
        """Return whether any known request asks for log-probabilities."""
        return self._asking > 0

    def words(self, request_indices: Int32Array) -> Int32Array:
        """Words of a row of each request, 0 where it asks for no log-probabilities."""
        found: Int32Array = self._words[request_indices]
        return found

    def gather_logprobs(
        self, request_indices: Int32Array, starts: Int32Array, counts: Int32Array
    ) -> LogprobRows | None:
        """Rows of the tokens that `gather` returns; None: no request asks for any."""
        if not self._asking or not np.count_nonzero(words := self._words[request_indices]):
            return None
        parts = [EMPTY]
        for entry in np.flatnonzero(words).tolist():
            size, first = int(words[entry]), self._first_row(int(request_indices[entry]))
            row = first + int(starts[entry]) * size
            parts.append(self._arena[row : row + int(counts[entry]) * size])
        return LogprobRows.of_entries(words, np.concatenate(parts), counts)

    def check_invariants(self) -> None:
        """Raise InternalError unless request indices, extents and lengths are consistent."""
        opened = np.flatnonzero(self._capacity >= 0)
        used, units = self._room.astype(np.int64) * (1 + self._words), self._places.units
        checks = {
            "every request index is open or free": len(opened) + len(self._free) == self.request_indices,
            "every token of the arena is free or in one extent": units.sum() + self.free_places() == self.arena_tokens,
            "requests with rows are counted": self._asking == np.count_nonzero(self._words),
            "committed tokens are known": bool((self.committed <= self.lengths).all()),
            "every output lies in its extent": bool((self.lengths <= self._room).all() and (used <= units).all()),
            "places are counted by owner": self._places.are_counted(),
            "extents do not overlap": self._extents_apart(opened),
            "no request has more room than it may use": bool((self._room[opened] <= self._capacity[opened]).all()),
            "durable rows exist": bool((self._durable <= self._prompt + self.lengths)[self._placement >= 0].all()),
        }
        for claim, holds in checks.items():
            if not holds:
                raise InternalError(f"token log: does not hold: {claim}")

    def _capacity_of(self, request_index: int) -> int:
        capacity = int(self._capacity[request_index])
        if capacity < 0:
            raise InternalError("the request index is not open", field="request_index", value=request_index)
        return capacity

    def _extents_apart(self, opened: RequestIndices) -> bool:
        order = opened[np.argsort(self._base[opened])]
        return bool((self._base[order][1:] >= (self._base[order] + self._places.units[order])[:-1]).all())


def _lazy_array(items: int) -> Int32Array:
    """Zeroed memory, resident page by page as it is touched. Without huge pages, most of which would stay unused."""
    memory = mmap.mmap(-1, 4 * items)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int32)
