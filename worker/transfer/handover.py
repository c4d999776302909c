"""Which pages of a prompt may be sent to another node, and whether all have come from one. Pure.

A page goes in parts, one for each layer group (layer_groups.py). A part may go once every row that the prompt has in it
was *seen* staged: those of full pages while later layers and passes are still being computed, those of the last page,
which may be partial, at the end. What is taken in counts when every page has arrived with all of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.units import PAGE_TOKENS, pages_for


@dataclass(slots=True)
class Outgoing:
    """The pages of `prompt_tokens` rows, on their way out under `transfer_id`, but for the first `unsent_pages`, which
    the receiver has; `sent` counts those of each part, the unsent ones among them."""

    transfer_id: int
    prompt_tokens: int
    parts: int = 1
    unsent_pages: int = 0
    sent: list[int] = field(init=False)
    delivered: set[int] = field(default_factory=set)
    failure: str = ""

    def __post_init__(self) -> None:
        self.sent = [self.unsent_pages] * self.parts

    @property
    def pages(self) -> int:
        """That are to be sent. The transfer numbers them from 0."""
        return pages_for(self.prompt_tokens) - self.unsent_pages

    def take_ready(self, staged_rows: int, part: int = 0) -> range:
        """Indices, among the pages of the transfer, of those whose `part` may go now and has not, given that it is in
        host memory for rows below `staged_rows`."""
        is_whole = staged_rows >= self.prompt_tokens
        stop = pages_for(self.prompt_tokens) if is_whole else staged_rows // PAGE_TOKENS
        ready = range(self.sent[part] - self.unsent_pages, max(self.sent[part], stop) - self.unsent_pages)
        self.sent[part] = ready.stop + self.unsent_pages
        return ready

    @property
    def is_delivered(self) -> bool:
        return not self.failure and len(self.delivered) == self.pages

    @property
    def is_over(self) -> bool:
        """Whether nothing reads its pages any more."""
        return bool(self.failure) or self.is_delivered


@dataclass(slots=True)
class Incoming:
    """The pages of `prompt_tokens` rows, on their way in. The first `shared_pages` of `host_pages` have their rows, and
    are shared with other requests: they are no destinations."""

    prompt_tokens: int
    host_pages: list[int]
    shared_pages: int = 0
    arrived: set[int] = field(default_factory=set)
    is_revoked: bool = False

    @property
    def pages(self) -> list[int]:
        """Where the rows go; the pages behind them wait for decoding."""
        return self.host_pages[self.shared_pages : pages_for(self.prompt_tokens)]

    @property
    def is_whole(self) -> bool:
        return len(self.arrived) == len(self.pages)

    @property
    def is_over(self) -> bool:
        """Whether nothing is written to its pages any more."""
        return self.is_revoked or self.is_whole

    @property
    def durable_tokens(self) -> int:
        return self.prompt_tokens if self.is_whole else 0
