"""The time of each request's latest token, and the latencies that follow. Pure. Arrays by request index.

Times are of arrival at the coordinator; a client sees a token later, by the commit of the journal and one flush. A
worker reports at most once per interval, so tokens that arrive together count as evenly spaced since the previous
arrival. Tokens that arrive together with the first one give no latency between tokens.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from protocol.arrays import Int32Array, Int64Array

Float64Array: TypeAlias = npt.NDArray[np.float64]


class Latencies(NamedTuple):
    """`first` seconds from submission to first token; `between` seconds per token, `times` tokens each."""

    first: Float64Array
    between: Float64Array
    times: Int64Array


NO_LATENCIES: Final = Latencies(np.zeros(0), np.zeros(0), np.zeros(0, np.int64))


class TokenTimes:
    """Latest arrivals; NaN: not known, after a restart of the coordinator. `submitted` starts a reused index."""

    def __init__(self, request_indices: int) -> None:
        self._last = np.full(request_indices, np.nan)

    def submitted(self, request_index: int, now: float) -> None:
        self._last[request_index] = now

    def arrived(
        self, request_indices: npt.NDArray[np.intp], known: Int32Array, fresh: Int32Array, now: float
    ) -> Latencies:
        """Record that `fresh[i]` tokens arrived for `request_indices[i]`, behind `known[i]`; returns the latencies."""
        got = fresh > 0
        if not got.all():
            request_indices, known, fresh = request_indices[got], known[got], fresh[got]
        if not len(request_indices):
            return NO_LATENCIES
        elapsed = now - self._last[request_indices]
        self._last[request_indices] = now
        is_timed, is_first = elapsed >= 0, known == 0
        later = is_timed & ~is_first
        times = fresh[later].astype(np.int64)
        return Latencies(elapsed[is_timed & is_first], elapsed[later] / times, times)
