"""A summary: the state of the journal in fewer records, which replace the earlier ones. Pure.

    SummaryBegun   NodePart, Ordered, Placed, PlacementEnded, Output    SummaryEnded
    │              some at the end of each group that is written        └─ now the store deletes the rows before
    │              anyway; each true at its place in the journal           SummaryBegun, some with each group
    └─ pools and workers; ledgers are copied at this point,
       and their parts describe them as of this point

So no commit waits for a summary: each carries at most REQUESTS_EACH requests, one part of a ledger and TOKENS_EACH
tokens of output, and a summary of 10,000 requests takes about 800 commits, a few seconds. Records of that time are
written as usual, between those of the summary. The summary's records of a request give its state at that moment, which
overrides earlier records (coordinator.journal.state); requests accepted after the SummaryBegun need none. A ledger is
different: the order of its free pages decides what its changes mean, so it is copied at the SummaryBegun.

A crash in the middle leaves a SummaryBegun without a SummaryEnded. Then the journal is read from the previous
SummaryBegun, and the records of the unfinished summary repeat known facts. The next process begins a new summary.

Rejected: all at once in one commit (it delays all other commits, for seconds at 10,000 requests); rows updated in place
(each group would write a page for every request with new tokens); a second thread with its own connection (the log is
locked exclusively, and the thread would hold the interpreter instead); repeating only the records of the oldest
segment, as log-structured file systems do (a few tokens of thousands of requests, in as many rows, for every segment).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Final

from coordinator.journal.ledger_image import parts_of
from coordinator.journal.records import (
    NodePart,
    Record,
    RequestOutput,
    RequestPlacementEnded,
    SummaryBegun,
    SummaryEnded,
    output_of,
    struck_of,
)
from coordinator.journal.state import JournalState, RequestRecord, no_order
from coordinator.tokens.token_log import TokenLog

#: Requests that a summary adds to one group.
REQUESTS_EACH: Final = 64
#: Tokens of their outputs, and words of their rows of log-probabilities: 32 KiB, which a disk writes with little more
#: time; with 256 KiB commits took 18 ms instead of 3 on one disk.
TOKENS_EACH: Final = 8_192


class Summarizing:
    """One summary in progress. Make it when the journal has all changes of the ledgers.

    Append `begun` at once, and `more()` to the end of each group, after its tokens were taken from the token log.
    """

    def __init__(self, state: JournalState, token_log: TokenLog) -> None:
        state.workers = {(it.worker, it.epoch): it for node in state.ledgers for it in state.joined(node)}
        pools, workers = (state.pools[node] for node in state.ledgers), state.workers.values()
        self.begun = SummaryBegun(
            state.arrivals, state.placements, tuple(pools), tuple(workers), tuple(state.drains.values())
        )
        self.is_over = False
        self._state = state
        self._token_log = token_log
        self._request_indices = deque(state.requests)
        frozen = [parts_of(node, ledger) for node, ledger in state.ledgers.items()]
        self._parts: Iterator[NodePart] = chain.from_iterable(frozen)

    def more(self) -> list[Record]:
        """The next records. After the last ones, with SummaryEnded, `is_over` is set."""
        parts: list[Record] = list(islice(self._parts, 1))
        facts, outputs = self._next_requests()
        self.is_over = not (parts or self._request_indices)
        return parts + facts + list(outputs) + ([SummaryEnded()] if self.is_over else [])

    def _next_requests(self) -> tuple[list[Record], list[RequestOutput]]:
        facts: list[Record] = []
        outputs: list[RequestOutput] = []
        room = TOKENS_EACH
        for _ in range(min(REQUESTS_EACH, len(self._request_indices))):
            record = self._state.requests.get(self._request_indices[0])
            if record is not None:
                facts += facts_of(record)
                part = self._token_log.take_output(self._request_indices[0], room, has_rows=record.placed is not None)
                if part is not None:
                    outputs.append(output_of(part))
                    room -= len(part.tokens) + len(part.rows)
                if room <= 0 or (part is not None and part.is_cut):
                    break  # the request may have more tokens
            self._request_indices.popleft()
        return facts, outputs


def facts_of(record: RequestRecord) -> Iterator[Record]:
    """Records of a request beside RequestAccepted, its output and its end, if they differ from the initial state."""
    request_index, placed = record.request_index, record.placed
    if record.ended is None and record.ordered != no_order(request_index):
        yield record.ordered
    if record.strikes and record.ended is None:
        yield struck_of(record.killed, [(request_index, record.strikes, record.mark)])
    if placed is not None:
        yield placed
        if not record.on_worker:
            yield RequestPlacementEnded(request_index, record.kept_tokens, record.first_token)
