"""What one operation on the link moves at most."""

from __future__ import annotations

import pytest

from protocol.units import PAGE_TOKENS
from worker.loop.swap import PIECE_BYTES, PIECE_TOKENS, piece_tokens


@pytest.mark.parametrize("token_bytes", [1, 656, 8_191, 8_192, 8_193, 61 * 656])
def test_an_operation_moves_whole_pages_up_to_the_larger_bound(token_bytes: int) -> None:
    tokens = piece_tokens(token_bytes)
    assert tokens % PAGE_TOKENS == 0
    if tokens > PIECE_TOKENS:
        assert PIECE_BYTES - PAGE_TOKENS * token_bytes < tokens * token_bytes <= PIECE_BYTES
    else:
        assert tokens == PIECE_TOKENS
        assert (PIECE_TOKENS + PAGE_TOKENS) * token_bytes > PIECE_BYTES
