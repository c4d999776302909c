"""A small coordinator in the executor's own thread: admits, grants, retracts, resumes, and keeps accounts.

It promises what the real ledger promises and no more: host pages by id, everything else by count, memory free again
when the worker says so. And it holds the worker to its side: positions in order and once, durable lengths that never
fall nor exceed what was published, one Released per admission and nothing after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from protocol.arrays import pack_int32
from protocol.messages import (
    DRAFT_TOKENS_MAX,
    NO_DRAFTS,
    NO_HOT_BUFFER,
    NO_TOKEN,
    Admit,
    Command,
    Event,
    Faulted,
    Finished,
    FirstToken,
    Grant,
    Parked,
    Rank,
    Released,
    Resize,
    Resized,
    Sampling,
    Staged,
    Withdraw,
)
from protocol.units import PAGE_TOKENS, managed_chunks, pages_for
from tests.support.fakes.hash_runner import ALTERNATING, expected_tokens
from worker.device.sizing import Sizing


@cache
def prompt_of(number: int, tokens: int) -> tuple[int, ...]:
    """A prompt of ids below 250, different for every number."""
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randint(0, 250, (tokens,), generator=generator).tolist())


@cache
def _expected(
    number: int,
    tokens: int,
    count: int,
    seed: int,
    groups: tuple[int, ...],
    prefilled: int,
    is_held: bool,
) -> tuple[int, ...]:
    return tuple(expected_tokens(prompt_of(number, tokens), count, seed, groups, prefilled, is_held))


@dataclass(eq=False)
class Life:
    """One request as its client sees it, across admissions."""

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    draft_tokens: int = DRAFT_TOKENS_MAX
    tokens: list[int] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)  # of log-probabilities
    durable: int = 0
    prompt_rows: int = 0  # said to be in host memory while the prompt was computed
    first_token: FirstToken = NO_TOKEN
    warm_start: bytes = b""
    host_pages: list[int] = field(default_factory=list)
    shared: tuple[int, ...] = ()  # host pages of another request that hold the first rows of the prompt
    rank: Rank = (0, 0, 0)
    by_steps: bool = False  # what follows them goes through decode steps
    placement: int = 0  # 0: not on the worker
    hot_slots: int = 0
    hot_chunks: int = 0
    index_pages: int = 0
    staged: bool = False
    resizing: Resize | None = None
    leaving: str = ""  # keep, drop, abort once withdrawn
    outcome: str = ""
    hits: int = 0
    misses: int = 0
    parked: int = 0

    @property
    def here(self) -> bool:
        return self.placement > 0 and not self.leaving

    @property
    def rows_wanted(self) -> int:
        return len(self.prompt) + self.sampling.max_tokens - 1

    def expected(self, groups: tuple[int, ...]) -> list[int]:
        """What the oracle says of a greedy or seeded request, or of one that is held to ALTERNATING."""
        assert self.sampling.grammar in ("", ALTERNATING)
        count, seed = self.sampling.max_tokens, self.sampling.seed
        prefilled = len(self.shared) * PAGE_TOKENS if self.by_steps else len(self.prompt)
        is_held = bool(self.sampling.grammar)
        return list(_expected(self.number, len(self.prompt), count, seed, groups, prefilled, is_held))


class FakeCoordinator:
    """Implements worker.loop.reporting.Reports; commands go out through `submit`, set once there is an executor."""

    submit: Callable[[Command], None]
    on_prompt_rows: Callable[[Life], None] = staticmethod(lambda life: None)

    def __init__(self, sizing: Sizing, *, ahead_tokens: int = 8, pages: range | None = None) -> None:
        """`pages`: the host pages that it gives; by default all of them."""
        capacity = sizing.capacity
        self.ahead_tokens = ahead_tokens
        self._pages = range(capacity.host_pages) if pages is None else pages
        self.host_pages: deque[int] = deque(self._pages)
        self.seats = capacity.seats
        self.hot_chunks = capacity.hot_chunks
        self.index_pages = capacity.index_pages
        self.lives: list[Life] = []
        self.events: list[Event] = []
        self.swaps: dict[int, tuple[int, int]] = {}  # hits and misses by placement, while it lasts
        self.drafts: dict[int, tuple[int, int]] = {}
        self.counts: list[dict[int, tuple[int, int]]] = []
        self._capacity = capacity
        self._by_admission: dict[int, Life] = {}
        self._next_admission = 1

    def create(
        self,
        number: int,
        prompt_tokens: int,
        max_tokens: int,
        *,
        draft_tokens: int = DRAFT_TOKENS_MAX,
        **sampling: object,
    ) -> Life:
        values: dict[str, object] = {"ignore_eos": True, **sampling}
        asked = Sampling(max_tokens, **values)  # type: ignore[arg-type]
        life = Life(number, prompt_of(number, prompt_tokens), asked, draft_tokens)
        self.lives.append(life)
        return life

    def admit(self, life: Life, hot_slots: int) -> bool:
        """Reserve everything and send the Admit; False, holding nothing, when something is short."""
        rows = max(life.durable, len(life.prompt))
        if not life.host_pages:
            life.host_pages = list(life.shared)
        pages = max(len(life.host_pages), min(pages_for(rows + self.ahead_tokens), pages_for(life.rows_wanted)))
        new_pages = pages - len(life.host_pages)
        chunks = 0 if hot_slots == NO_HOT_BUFFER else managed_chunks(hot_slots) if hot_slots else pages
        short = (
            self.seats < 1
            or len(self.host_pages) < new_pages
            or min(self.hot_chunks - chunks, self.index_pages - pages) < 0
        )
        if short:
            if not life.durable:
                life.host_pages = []
            return False
        self.seats -= 1
        self.hot_chunks -= chunks
        self.index_pages -= pages
        life.host_pages += [self.host_pages.popleft() for _ in range(new_pages)]
        life.placement, self._next_admission = self._next_admission, self._next_admission + 1
        life.hot_slots, life.hot_chunks, life.index_pages = hot_slots, chunks, pages
        life.leaving, life.staged, life.resizing = "", life.durable > 0, None
        life.prompt_rows = 0
        self._by_admission[life.placement] = life
        self.submit(self._admit_command(life))
        return True

    def grant(self, life: Life) -> None:
        """Pages up to `ahead_tokens` beyond the rows of the tokens seen, as far as there are any."""
        rows = min(len(life.prompt) + len(life.tokens) + self.ahead_tokens, life.rows_wanted)
        resident = (life.resizing or life).hot_slots == 0
        want = pages_for(rows) - len(life.host_pages)
        room = min(len(self.host_pages), self.index_pages, self.hot_chunks if resident else want)
        count = min(want, room)
        if count <= 0 or not life.here:
            return
        pages = [self.host_pages.popleft() for _ in range(count)]
        chunks = count if resident else 0
        life.host_pages += pages
        life.index_pages += count
        life.hot_chunks += chunks
        self.index_pages -= count
        self.hot_chunks -= chunks
        if life.resizing is not None:
            more = life.resizing.hot_chunks + chunks
            life.resizing = Resize(life.placement, life.resizing.hot_slots, more)
        self.submit(Grant(life.placement, pack_int32(pages), count, chunks))

    def resize(self, life: Life, hot_slots: int) -> bool:
        """Send a Resize, one at a time; False when it makes no sense now or does not fit."""
        chunks = managed_chunks(hot_slots) if hot_slots else len(life.host_pages)
        more = chunks - life.hot_chunks
        if not life.here or life.resizing is not None or hot_slots == life.hot_slots or more > self.hot_chunks:
            return False
        if more > 0:
            self.hot_chunks -= more
            life.hot_chunks = chunks
        life.resizing = Resize(life.placement, hot_slots, chunks)
        self.submit(life.resizing)
        return True

    def withdraw(self, life: Life, leaving: str) -> None:
        """`leaving` is keep, drop or abort."""
        if life.here:
            life.leaving = leaving
            self.submit(Withdraw(life.placement))

    # ---------------------------------------------------------------- reports

    def add_tokens(
        self, request_index: int, placement: int, start: int, ids: list[int], durable: int, rows: Sequence[bytes] = ()
    ) -> None:
        life = self._by_admission[placement]
        assert life.number == request_index
        assert start == len(life.tokens), "I5: each position once and in order"
        life.tokens += ids
        life.rows += rows
        self._note_durable(life, durable)
        self.grant(life)

    def set_durable(self, request_index: int, placement: int, durable: int) -> None:
        self._note_durable(self._by_admission[placement], durable)

    def count_swaps(
        self,
        requests: Mapping[int, tuple[int, int]],
        totals: tuple[int, int, int],
        drafts: Mapping[int, tuple[int, int]] = NO_DRAFTS,
    ) -> None:
        self.swaps.update(requests)
        self.drafts.update(drafts)
        self.counts.append(dict(requests))

    def add_event(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case Staged():
                life = self._by_admission[event.placement]
                is_said = bool(life.tokens) or bool(life.sampling.stop)
                assert is_said, "the first token comes before Staged: prefill's logits are lost afterwards"
                assert life.durable >= len(life.prompt) or not life.tokens
                life.staged = True
            case Parked():
                life = self._by_admission[event.placement]
                life.parked += 1
                self.grant(life)
            case Resized():
                self._resized(self._by_admission[event.placement], event)
            case Finished() | Faulted():
                life = self._by_admission[event.placement]
                assert not life.outcome
                life.outcome = event.reason if isinstance(event, Finished) else event.message
                if isinstance(event, Finished):
                    assert event.generated_tokens == len(life.tokens)
            case Released():
                self._released(self._by_admission.pop(event.placement), event)

    def _note_durable(self, life: Life, durable: int) -> None:
        if durable and durable <= len(life.prompt) and (durable < len(life.prompt) or not life.tokens):
            assert durable % PAGE_TOKENS == 0, "whole pages of a prompt"
            life.prompt_rows = max(life.prompt_rows, durable)
            self.on_prompt_rows(life)
            return
        assert durable <= len(life.prompt) + len(life.tokens) - 1, "only rows of published tokens"
        assert durable == 0 or durable >= len(life.prompt)
        assert durable >= life.durable or not life.staged, "a durable length never falls"
        life.durable = max(life.durable, durable)

    def _resized(self, life: Life, event: Resized) -> None:
        assert life.resizing is not None
        assert (event.hot_slots, event.hot_chunks) == (life.resizing.hot_slots, life.resizing.hot_chunks)
        self.hot_chunks += life.hot_chunks - event.hot_chunks
        life.hot_slots, life.hot_chunks, life.resizing = event.hot_slots, event.hot_chunks, None
        self.grant(life)

    def _released(self, life: Life, event: Released) -> None:
        assert event.durable_tokens >= life.durable or not life.staged, "what was called durable stays so"
        self.seats += 1
        self.hot_chunks += life.hot_chunks
        self.index_pages += life.index_pages
        hits, misses = self.swaps.pop(event.placement, (0, 0))
        life.hits += hits
        life.misses += misses
        life.placement = life.hot_chunks = life.index_pages = 0
        life.durable, life.first_token, life.warm_start = event.durable_tokens, event.first_token, event.warm_start
        if life.leaving == "abort" and not life.outcome:
            life.outcome = "aborted"
        if life.outcome or life.leaving == "drop" or not life.durable:
            self.host_pages.extend(life.host_pages[len(life.shared) :])
            life.host_pages, life.durable, life.first_token = [], 0, NO_TOKEN

    def _admit_command(self, life: Life) -> Admit:
        return Admit(
            placement=life.placement,
            request_index=life.number,
            request_id=f"r{life.number}",
            prompt=pack_int32(life.prompt),
            generated=pack_int32(life.tokens),
            durable_tokens=life.durable,
            sampling=life.sampling,
            host_pages=pack_int32(life.host_pages),
            index_pages=life.index_pages,
            hot_slots=life.hot_slots,
            hot_chunks=life.hot_chunks,
            first_token=NO_TOKEN if life.tokens else life.first_token,
            warm_start=life.warm_start if life.durable else b"",
            prefix_tokens=0 if life.durable else len(life.shared) * PAGE_TOKENS,
            rank=life.rank,
            draft_tokens=life.draft_tokens,
            by_steps=life.by_steps and not life.durable,
        )

    def adopt(self, other: FakeCoordinator) -> None:
        """Take over what `other` knew when its worker died: tokens seen, durable lengths reported, host pages."""
        self.lives = other.lives
        kept = {page for life in self.lives for page in life.host_pages}
        self.host_pages = deque(page for page in self.host_pages if page not in kept)
        for life in self.lives:
            life.placement, life.resizing, life.leaving = 0, None, ""

    def check_nothing_leaked(self) -> None:
        """With every life ended, all memory is free again (I1)."""
        capacity = self._capacity
        assert not self._by_admission
        assert sorted(self.host_pages) == list(self._pages)
        assert (self.seats, self.hot_chunks) == (capacity.seats, capacity.hot_chunks)
        assert self.index_pages == capacity.index_pages
