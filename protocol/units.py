"""Units of memory in coordinator, worker and kernels. The layout of bytes is in kernels/layout.py. Pure."""

from __future__ import annotations

from typing import Final

#: Tokens of a host page, an index page, a slab page and a hot chunk.
PAGE_TOKENS: Final = 64
#: Slots of the largest hot size class and its tail chunk.
SLOTS_MAX: Final = 32_768 + 64
TAIL_SLOTS_MAX: Final = 16
#: Slots of a tail where slots hold a page: the one that is written, and the one before.
TAIL_PAGES: Final = 2
SEAT_ROWS_MAX: Final = 5  # rows of one request in a decode step: the last token and four drafts
TOPK_MAX: Final = 4_096
CONTEXT_MAX_TOKENS: Final = 1_048_576
#: Prompt tokens that go through one layer together on a GPU: rows of the largest block.
BLOCK_TOKENS_MAX: Final = 4_096
#: Prompt tokens that go through all layers together.
PASS_TOKENS_MAX: Final = 65_536

assert TAIL_SLOTS_MAX <= PAGE_TOKENS  # the tail fits its one chunk
assert BLOCK_TOKENS_MAX <= PASS_TOKENS_MAX  # a block is a part of a pass


def pages_for(tokens: int) -> int:
    """Pages (or chunks) that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


def managed_chunks(hot_slots: int) -> int:
    """Chunks of a managed hot buffer of `hot_slots` slots, tail chunk included."""
    return pages_for(hot_slots) + 1
