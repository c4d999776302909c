"""Rows of log-probabilities (protocol/logprobs.py) of many requests, as arrays. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.arrays import Int32Array, Int64Array, unpack_int32
from protocol.errors import ProtocolError
from protocol.messages import Logprobs


class LogprobRows(NamedTuple):
    """Log-probabilities of parallel entries: the words of a row of each, 0 where its request asks for none; int32
    `rows` of all their tokens, concatenated; the place in `rows` of each entry's first, and of what follows its
    last."""

    words: Int32Array
    rows: Int32Array
    first: Int64Array
    stop: Int64Array

    @classmethod
    def of_entries(cls, words: Int32Array, rows: Int32Array, counts: Int32Array) -> LogprobRows:
        """`counts` are the tokens of each entry."""
        stop = np.cumsum(words.astype(np.int64) * counts)
        return cls(words, rows, stop - words.astype(np.int64) * counts, stop)

    def of(self, entry: int) -> Int32Array:
        """The rows of one entry, int32[tokens * words]."""
        return self.rows[self.first[entry] : self.stop[entry]]

    def only(self, kept: npt.NDArray[np.bool_]) -> LogprobRows:
        """Those of the entries that are `kept`."""
        return LogprobRows(self.words[kept], self.rows, self.first[kept], self.stop[kept])

    def packed(self) -> Logprobs:
        return Logprobs(self.words.tobytes(), self.rows.tobytes())


def unpack_logprobs(logprobs: Logprobs | None, counts: Int32Array) -> LogprobRows | None:
    """Those of entries with `counts` tokens. Raises ProtocolError when sizes disagree."""
    if logprobs is None:
        return None
    words, rows = unpack_int32(logprobs.words, "logprobs.words"), unpack_int32(logprobs.rows, "logprobs.rows")
    if len(words) != len(counts) or (len(words) and words.min() < 0):
        raise ProtocolError("not one number of words for each entry", field="logprobs.words", value=len(words))
    found = LogprobRows.of_entries(words, rows, counts)
    if len(rows) != (int(found.stop[-1]) if len(words) else 0):
        raise ProtocolError("rows do not add up to the tokens sent", field="logprobs.rows", value=len(rows))
    return found
