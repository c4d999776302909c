"""Rows of log-probabilities, and the bytes of tokens that they name."""

from __future__ import annotations

import math

import numpy as np
import pytest

from protocol.logprobs import LOGPROB_MIN, ROW_WORDS_MAX, TokenLogprobs, read_rows, row_words
from protocol.messages import LOGPROBS_MAX, NO_LOGPROBS


def test_words_of_a_row() -> None:
    assert [row_words(it) for it in (NO_LOGPROBS, 0, 1, LOGPROBS_MAX)] == [0, 1, 3, ROW_WORDS_MAX]


@pytest.mark.parametrize("top", [0, 2])
def test_row_with_fewer_alternatives_is_the_beginning_of_a_longer_one(top: int) -> None:
    rows = np.zeros((2, row_words(3)), np.int32)
    rows[:, 1::2] = [[5, 6, 7], [8, 9, 10]]
    rows.view(np.float32)[:, 0::2] = [[-1.5, -0.5, -2.0, -3.0], [-0.25, -0.25, -4.0, -5.0]]
    whole = [
        TokenLogprobs(-1.5, ((5, -0.5), (6, -2.0), (7, -3.0))),
        TokenLogprobs(-0.25, ((8, -0.25), (9, -4), (10, -5))),
    ]
    assert read_rows(rows) == whole
    assert read_rows(rows[:, : row_words(top)]) == [TokenLogprobs(it.logprob, it.top[:top]) for it in whole]


def test_values_that_json_has_not_are_the_lowest() -> None:
    rows = np.zeros((1, 5), np.int32)
    rows.view(np.float32)[0, 0::2] = [-math.inf, math.nan, -1e9]
    assert read_rows(rows) == [TokenLogprobs(LOGPROB_MIN, ((0, LOGPROB_MIN), (0, LOGPROB_MIN)))]
