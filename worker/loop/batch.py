"""One request's stay on this worker, as plain host-side truth: no tensor, no stream, no clock inside.

    PREFILLING ─ last chunk launched ─► STAGING ─ staged ─┐
        for its prompt alone: LEAVING, or SENDING ─ its pages were delivered to another node, or cannot be ─► LEAVING
    LOADING ─ loaded (or nothing else runs) ──────────────┴► RUNNING ⇄ PARKED (next row's page not granted)
        ▲                                                       │
        └───────────── resize from managed to resident ─────────┘          any ─► LEAVING ─ quiesced ─► (gone)

`position` is the row that the next step writes: what was launched, not what was read. Steps are launched ahead, so
`output` may be behind it; a step whose token turns out to lie past the end is discarded when it is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from protocol.arrays import Int32Array
from protocol.messages import NO_HOT_BUFFER, NO_TOKEN, Resize, Sampling
from protocol.units import PAGE_TOKENS
from worker.device.hot_buffer import HotBuffer
from worker.loop.output import Output
from worker.streams import Fence
from worker.transfer.handover import Outgoing


class Status(Enum):
    PREFILLING = "prefilling"
    STAGING = "staging"
    SENDING = "sending"
    LOADING = "loading"
    RUNNING = "running"
    PARKED = "parked"
    LEAVING = "leaving"


@dataclass(eq=False, slots=True)
class RunningRequest:
    """`hot_slots` and `hot_chunks` are what was granted; `hot` is what it holds, nothing before the take-over.

    `outgoing` are its pages for another node, `staged_marks` the fences after which a layer group of rows below a
    length may be sent. `fences` are what the status waits for, `first_token` the one after which prefill's token can be
    read. `since_s` is when prefill, then staging, or loading began. `topk_place` is where its last
    top-k is downloaded to.
    """

    placement: int
    request_index: int
    seat: int
    prompt: Int32Array
    sampling: Sampling
    output: Output
    host_pages: list[int]
    index_pages: list[int]
    slab: list[int]
    hot: HotBuffer
    hot_slots: int
    hot_chunks: int
    status: Status
    position: int
    durable_rows: int
    prefilled: int = 0
    rows_max: int = 0
    started: bool = False
    fences: Sequence[Fence] = ()
    first_token: Fence | None = None
    resize: Resize | None = None
    outgoing: Outgoing | None = None
    staged_marks: deque[tuple[Fence, int, int]] = field(default_factory=deque)
    topk_place: int | None = None
    since_s: float = 0.0
    prefill_s: float = 0.0
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.prompt)

    @property
    def prefills_only(self) -> bool:
        """Whether it leaves once its prompt is in host memory."""
        return self.hot_slots == NO_HOT_BUFFER

    @property
    def rows_wanted(self) -> int:
        """Rows of the whole context: the last token never gets one."""
        return self.prompt_tokens + self.output.max_tokens - 1

    def note_memory(self) -> None:
        """Recompute `rows_max`, the first row that no step may write, after a change of pages or chunks."""
        granted = len(self.host_pages) * PAGE_TOKENS
        chunks = self.hot.rows_max
        self.rows_max = min(self.rows_wanted, granted if chunks is None else min(granted, chunks))

    @property
    def starved(self) -> bool:
        """Whether only memory keeps it from its next step."""
        return self.rows_max <= self.position < self.rows_wanted

    def next_input(self) -> int:
        """The token to feed at `position`: known from an earlier stay, or -1 for the one drawn last on the device."""
        place = self.position - self.prompt_tokens
        return self.output.tokens[place] if place < self.output.forced else -1

    def is_drawn(self, position: int) -> bool:
        """Whether the step that wrote row `position` drew a token that was not known before."""
        return position + 1 - self.prompt_tokens >= self.output.forced

    def durable(self, rows: int | None = None) -> int:
        """Rows (`durable_rows` unless given) that a successor may build on: those of published tokens alone.

        Before the first token is published there are none: prefill's logits would be lost.
        """
        published = self.output.published
        rows = self.durable_rows if rows is None else rows
        return min(rows, self.prompt_tokens + published - 1) if published and rows >= self.prompt_tokens else 0

    def left_behind(self, rows: int) -> tuple[int, int]:
        """As `durable`, when it leaves; and the first token if that is needed to go on, being held back."""
        tokens = self.output.tokens
        if self.outgoing is not None and not self.outgoing.is_delivered:
            return 0, NO_TOKEN
        if self.output.published or not tokens or rows < self.prompt_tokens:
            return self.durable(rows), NO_TOKEN
        return self.prompt_tokens, tokens[0]
