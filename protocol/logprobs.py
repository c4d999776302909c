"""Log-probabilities of generated tokens, in words of four bytes. Pure.

What is told of one token is a *row*. It begins with the token itself, then come the likeliest tokens at its position:

    logprob float32 | id int32, logprob float32 | id int32, logprob float32 | ...
    of the token      likeliest                   second

So a row with fewer alternatives is the beginning of one with more. Rows are kept, journalled and sent as int32 arrays:
the bits of what the device computed, which no crash and no move of a request changes.

A log-probability is log-softmax, in float32, of the model's own logits: before temperature, penalties, biases and all
else that a request asks of its draws.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from protocol.arrays import Int32Array
from protocol.messages import LOGPROBS_MAX, NO_LOGPROBS

#: Lowest log-probability that is told, that of OpenAI: JSON has no infinity.
LOGPROB_MIN: Final = -9999.0


def row_words(logprobs: int) -> int:
    """Words of a row with so many alternatives; none for NO_LOGPROBS."""
    return 0 if logprobs == NO_LOGPROBS else 1 + 2 * logprobs


ROW_WORDS_MAX: Final = row_words(LOGPROBS_MAX)
ROW_BYTES_MAX: Final = 4 * ROW_WORDS_MAX
#: Of tokens without any.
NO_ROWS: Final[Int32Array] = np.empty((0, 0), np.int32)


class TokenLogprobs(NamedTuple):
    """Of one token: its own log-probability, and id and log-probability of the likeliest tokens at its position, the
    likeliest first. The token is among them only if it is one of them."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def read_rows(rows: Int32Array) -> list[TokenLogprobs]:
    """`rows` is int32[tokens, words]. Values below LOGPROB_MIN, or that are no number, become LOGPROB_MIN."""
    values = np.ascontiguousarray(rows).view(np.float32)
    numbers = np.maximum(np.nan_to_num(values[:, 2::2], nan=LOGPROB_MIN), LOGPROB_MIN).tolist()
    own = np.maximum(np.nan_to_num(values[:, 0], nan=LOGPROB_MIN), LOGPROB_MIN).tolist()
    ids = rows[:, 1::2].tolist()
    return [
        TokenLogprobs(logprob, tuple(zip(*it, strict=True))) for logprob, *it in zip(own, ids, numbers, strict=True)
    ]
