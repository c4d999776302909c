"""Progress of workers' reports, written down as lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from protocol.arrays import pack_int32, pack_int64
from protocol.messages import Logprobs, Progress

#: The number of the link that tests speak through.
LINK = 7


class RequestEntry(NamedTuple):
    request_index: int
    placement: int
    start: int
    tokens: Sequence[int]
    durable: int = 0
    words: int = 0  # of a row of log-probabilities
    rows: Sequence[int] = ()


def progress(*entries: RequestEntry) -> Progress:
    return Progress(
        request_indices=pack_int32([entry.request_index for entry in entries]),
        placements=pack_int64([entry.placement for entry in entries]),
        starts=pack_int32([entry.start for entry in entries]),
        counts=pack_int32([len(entry.tokens) for entry in entries]),
        tokens=pack_int32([token for entry in entries for token in entry.tokens]),
        durables=pack_int32([entry.durable for entry in entries]),
        logprobs=_logprobs(entries) if any(entry.words for entry in entries) else None,
    )


def _logprobs(entries: Sequence[RequestEntry]) -> Logprobs:
    rows = [word for entry in entries for word in entry.rows]
    return Logprobs(pack_int32([entry.words for entry in entries]), pack_int32(rows))
