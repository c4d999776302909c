"""Which pages of a prompt may be sent to another node, and whether all have come from one. Pure.

A page goes in parts, one for each layer group (layer_groups.py). A part may go once every row that the prompt has in it
was *seen* staged: those of full pages while later layers and chunks are still being computed, those of the last page,
which may be partial, at the end. What is taken in counts when every page has arrived with all of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.units import PAGE_TOKENS, pages_for


@dataclass(slots=True)
class Outgoing:
    """The pages of `prompt_tokens` rows, on their way out under `transfer_id`; `sent` counts those of each part."""

    transfer_id: int
    prompt_tokens: int
    parts: int = 1
    sent: list[int] = field(init=False)
    delivered: set[int] = field(default_factory=set)
    failure: str = ""

    def __post_init__(self) -> None:
        self.sent = [0] * self.parts

    @property
    def pages(self) -> int:
        return pages_for(self.prompt_tokens)

    def take_ready(self, staged_rows: int, part: int = 0) -> range:
        """Indices of pages whose `part` may go now and has not, given that it is in host memory for rows below
        `staged_rows`."""
        is_whole = staged_rows >= self.prompt_tokens
        ready = range(self.sent[part], self.pages if is_whole else staged_rows // PAGE_TOKENS)
        self.sent[part] = max(self.sent[part], ready.stop)
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
    """The pages of `prompt_tokens` rows, on their way in."""

    prompt_tokens: int
    host_pages: list[int]
    arrived: set[int] = field(default_factory=set)
    is_revoked: bool = False

    @property
    def pages(self) -> list[int]:
        """Where the rows go; the pages behind them wait for decoding."""
        return self.host_pages[: pages_for(self.prompt_tokens)]

    @property
    def is_whole(self) -> bool:
        return len(self.arrived) == pages_for(self.prompt_tokens)

    @property
    def is_over(self) -> bool:
        """Whether nothing is written to its pages any more."""
        return self.is_revoked or self.is_whole

    @property
    def durable_tokens(self) -> int:
        return self.prompt_tokens if self.is_whole else 0
