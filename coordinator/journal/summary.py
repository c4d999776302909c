"""A summary: what the journal says, said again in fewer records, so that what was written before can go. Pure.

    SummaryBegun   NodePart, Ordered, Admission, Departed, Output ...   SummaryEnded
    │              a little at the end of each group that is            └─ the store lets go of what was written before
    │              written anyway, as true there                           the beginning, a little with each group too
    └─ pools, workers; ledgers are copied here, and their
       parts say what they were here

So no commit waits for a summary: each carries at most REQUESTS_EACH requests, one part of a ledger and TOKENS_EACH
tokens of output, and a summary of 10,000 requests takes some 800 of them, a few seconds. What happens meanwhile
is written as ever, between its records. A request is said as it is when its turn comes, which overrides whatever was
written of it before (coordinator.journal.state); one that comes later needs no saying again. A ledger does not
work like that, since the order of its free pages decides what its changes mean: it is frozen where the summary begins.

A crash in the middle leaves a beginning without an end: the journal is read from where the summary before it began, in
which what this one said is only repeated. The next life begins one anew.

Rejected: all at once in one commit (holds up everybody, for seconds at 10,000 requests); rows updated in place (each
group would write a page for every request that has said a token); a second thread with its own connection (the log is
locked exclusively, and it would hold the interpreter instead); saying again only what the oldest segment has, as
log-structured file systems do (a few tokens of thousands of requests, in as many rows, for every segment).
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
    RequestDeparted,
    RequestOutput,
    SummaryBegun,
    SummaryEnded,
    struck_of,
)
from coordinator.journal.state import JournalState, RequestRecord, no_order
from coordinator.tokens.token_log import TokenLog

#: Requests said again in one group.
REQUESTS_EACH: Final = 64
#: Tokens of their outputs: 32 KiB. A disk takes that beside a group's own records; with 256 KiB commits took 18 ms
#: instead of 3 on one.
TOKENS_EACH: Final = 8_192


class Summarizing:
    """One summary under way. Make it where all ledgers are as their changes in the journal say, append `begun` at once,
    and `more()` to the end of each group, after its tokens were taken from the token log."""

    def __init__(self, book: JournalState, token_log: TokenLog) -> None:
        book.workers = {(it.worker, it.epoch): it for node in book.ledgers for it in book.joined(node)}
        pools, workers = (book.pools[node] for node in book.ledgers), book.workers.values()
        self.begun = SummaryBegun(
            book.arrivals, book.placements, tuple(pools), tuple(workers), tuple(book.drains.values())
        )
        self.is_over = False
        self._book = book
        self._token_log = token_log
        self._request_indices = deque(book.requests)
        frozen = [parts_of(node, ledger) for node, ledger in book.ledgers.items()]
        self._parts: Iterator[NodePart] = chain.from_iterable(frozen)

    def more(self) -> list[Record]:
        """The next records, the last of them SummaryEnded."""
        parts: list[Record] = list(islice(self._parts, 1))
        facts, outputs = self._say_requests()
        self.is_over = not (parts or self._request_indices)
        return parts + facts + list(outputs) + ([SummaryEnded()] if self.is_over else [])

    def _say_requests(self) -> tuple[list[Record], list[RequestOutput]]:
        facts: list[Record] = []
        outputs: list[RequestOutput] = []
        room = TOKENS_EACH
        for _ in range(min(REQUESTS_EACH, len(self._request_indices))):
            known = self._book.requests.get(self._request_indices[0])
            if known is not None:
                facts += facts_of(known)
                part = self._token_log.take_output(self._request_indices[0], room, has_rows=known.stay is not None)
                if part is not None:
                    outputs.append(
                        RequestOutput(part.request_index, part.start, part.tokens.tobytes(), part.durable_tokens)
                    )
                    room -= len(part.tokens)
                if not room:
                    break  # there may be more of it
            self._request_indices.popleft()
        return facts, outputs


def facts_of(known: RequestRecord) -> Iterator[Record]:
    """All but what every request begins with."""
    request_index, stay = known.facts.request_index, known.stay
    if known.ended is None and known.ordered != no_order(request_index):
        yield known.ordered
    if known.strikes and known.ended is None:
        yield struck_of(known.killed, [(request_index, known.strikes, known.mark)])
    if stay is not None:
        yield stay
        if not known.on_worker:
            yield RequestDeparted(request_index, known.kept_tokens, known.first_token)
