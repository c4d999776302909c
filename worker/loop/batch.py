"""One request on this worker, as plain host-side state: no tensor, no stream, no clock inside. Pure.

    PREFILLING ─ first token drawn ─► STAGING ─ staged ─┐
        for its prompt alone: LEAVING, or SENDING ─ its pages were delivered to another node, or cannot be ─► LEAVING
    LOADING ─ loaded (or nothing else runs) ──────────────┴► RUNNING ⇄ PARKED (next row's page not granted)
        ▲                                                       │
        └───────────── resize from managed to resident ─────────┘          any ─► LEAVING ─ quiesced ─► (gone)

`position` counts what was launched, not what was read. Steps are launched ahead, so `output` may be behind it; a token
that turns out to lie past the end is discarded when its step is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from protocol.arrays import Int32Array
from protocol.messages import NO_HOT_BUFFER, NO_TOKEN, FirstToken, Resize
from protocol.units import PAGE_TOKENS
from worker.device.hot_buffer import HotBuffer
from worker.loop.acceptance import RowProgress, known_tokens
from worker.loop.output import Output
from worker.streams import Fence
from worker.transfer.handover import Outgoing

if TYPE_CHECKING:
    from worker.loop.grammars import Grammar
    from worker.runners.adjust import Adjust


class Status(Enum):
    PREFILLING = "prefilling"
    STAGING = "staging"
    SENDING = "sending"
    LOADING = "loading"
    RUNNING = "running"
    PARKED = "parked"
    LEAVING = "leaving"


@dataclass(slots=True)
class SeatMemory:
    """What a request holds; only Seats changes it. `hot_slots` and `hot_chunks` are what was granted; `hot` is what is
    in use. `slab` are slab pages, of an open pass."""

    host_pages: list[int]
    index_pages: list[int]
    hot: HotBuffer
    hot_slots: int
    hot_chunks: int
    slab: list[int] = field(default_factory=list)

    @property
    def rows_max(self) -> int:
        """Rows of the longest context that fits."""
        granted, chunks = len(self.host_pages) * PAGE_TOKENS, self.hot.rows_max
        return granted if chunks is None else min(granted, chunks)


@dataclass(eq=False, slots=True)
class RunningRequest:
    """The first four fields never change. Tokens are `output`'s, memory is `memory`'s.

    `progress` counts its rows. `outgoing` are its pages for another node, `staged_marks` the fences after which a layer
    group of rows below a length may be sent.
    `fences` are what the status waits for, `first_token` the one after which prefill's token can be read.
    `chunk_marks` are the fences after which rows of its prompt below a length are in host memory, `staged_rows` how
    many were seen there. `is_faulty`: it has faulted, and what it wrote may be wrong.
    `prefix_load` is the fence of a shared prefix's index keys, until they were seen loaded. `is_filling`: a pass that
    ends its prompt has begun, and copies rows to its hot buffer.
    `adjust` is what it asks of its logits, `grammar` what holds its output to a grammar, `logprob_words` how long its
    rows of log-probabilities are. `owner` is whose it is. `since_s` is when prefill, then staging, or loading
    began. `topk_place` is where its last top-k is downloaded to. `drafted` tokens were verified for its output, of
    which `accepted` are in it.
    """

    placement: int
    request_index: int
    seat: int
    prompt: Int32Array
    output: Output
    memory: SeatMemory
    status: Status
    progress: RowProgress
    prefilled: int = 0
    started: bool = False
    fences: Sequence[Fence] = ()
    prefix_load: Fence | None = None
    is_filling: bool = False
    first_token: Fence | None = None
    resize: Resize | None = None
    adjust: Adjust | None = None
    logprob_words: int = 0
    owner: str = ""
    grammar: Grammar | None = None
    outgoing: Outgoing | None = None
    staged_marks: deque[tuple[Fence, int, int]] = field(default_factory=deque)
    chunk_marks: deque[tuple[Fence, int]] = field(default_factory=deque)
    staged_rows: int = 0
    is_faulty: bool = False
    topk_place: int | None = None
    drafted: int = 0
    accepted: int = 0
    since_s: float = 0.0
    prefill_s: float = 0.0
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.prompt)

    @property
    def position(self) -> int:
        """The first row that no launched step writes."""
        return self.progress.position

    @property
    def durable_rows(self) -> int:
        """Rows that were seen in host memory."""
        return self.progress.durable

    @property
    def prompt_rows(self) -> int:
        """Rows of its prompt that were computed, or were there before."""
        return min(self.prefilled, self.progress.certain)

    @property
    def is_leaving(self) -> bool:
        return self.status is Status.LEAVING

    @property
    def lacks_mask(self) -> bool:
        """Whether it has a grammar, and what may come next is not known yet."""
        return self.grammar is not None and not self.grammar.has_mask

    @property
    def awaits_mask(self) -> bool:
        """Whether no step takes it yet: its mask is not there; or it has a slow grammar, whose next mask no step waits
        for, and a step in flight draws the token before that."""
        grammar = self.grammar
        return grammar is not None and (not grammar.has_mask or (grammar.is_slow and self.progress.in_flight > 0))

    @property
    def prefills_only(self) -> bool:
        """Whether it leaves once its prompt is in host memory."""
        return self.memory.hot_slots == NO_HOT_BUFFER

    @property
    def has_hot_buffer(self) -> bool:
        """Whether its prompt was taken over: it is not being prefilled or staged."""
        return self.status not in (Status.PREFILLING, Status.STAGING)

    @property
    def may_resize(self) -> bool:
        """Tell whether its hot buffer may change now: no rows are on their way to it."""
        return self.status is not Status.LOADING and (self.has_hot_buffer or not self.is_filling)

    @property
    def rows_wanted(self) -> int:
        """Rows of the whole context: the last token never gets one."""
        return self.prompt_tokens + self.output.max_tokens - 1

    def note_staged(self) -> int | None:
        """Rows of full pages of its prompt in host memory, when more of them have been seen there."""
        before = self.staged_rows
        while self.chunk_marks and self.chunk_marks[0][0].done():
            self.staged_rows = self.chunk_marks.popleft()[1]
        pages = self.staged_rows // PAGE_TOKENS
        return pages * PAGE_TOKENS if pages > before // PAGE_TOKENS else None

    def note_memory(self) -> None:
        """Recompute `progress.rows_max` after a change of pages or chunks."""
        self.progress.rows_max = min(self.rows_wanted, self.memory.rows_max)

    @property
    def starved(self) -> bool:
        """Whether only memory keeps it from its next step, whatever the steps in flight bring."""
        return self.progress.starved(self.rows_wanted)

    def known_tokens(self, start: int, count: int) -> list[int]:
        """Tokens from position `start` on that were known when it came, `count` at most."""
        return known_tokens(self.prompt, self.output.tokens, self.output.forced, start, count)

    def next_input(self) -> int:
        """The token to feed at `position`: known from an earlier placement, or -1 for the last one drawn on device."""
        place = self.progress.position - self.prompt_tokens
        if place < 0:  # behind a shared prefix
            return int(self.prompt[place])
        return self.output.tokens[place] if place < self.output.forced else -1

    def is_drawn(self, position: int) -> bool:
        """Whether the step that wrote row `position` drew a token that was not known before."""
        return position + 1 - self.prompt_tokens >= self.output.forced

    def durable(self, rows: int | None = None) -> int:
        """Rows (`durable_rows` unless given) that a successor may build on: those of published tokens alone.

        Before the first token is published there are none: prefill's logits would be lost.
        """
        published, prompt = self.output.published, self.prompt_tokens
        rows = self.progress.durable if rows is None else rows
        if not published or rows < prompt:
            return 0
        said = prompt + published - 1
        return rows if rows < said else said

    def left_behind(self, rows: int) -> tuple[int, FirstToken]:
        """As `durable`, when it leaves; and the first token if that is needed to go on, being held back."""
        tokens = self.output.tokens
        if self.outgoing is not None and not self.outgoing.is_delivered:
            return 0, NO_TOKEN
        if self.output.published or not tokens or rows < self.prompt_tokens:
            return self.durable(rows), NO_TOKEN
        first = self.output.first_held
        return self.prompt_tokens, first if first.logprobs else first.token
