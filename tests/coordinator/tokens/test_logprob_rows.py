"""Rows of log-probabilities in the token log: of each token once, with it and behind nothing else."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from coordinator.journal.records import news_of, output_of, tokens_of
from coordinator.journal.salvage import _Request
from coordinator.tokens.token_log import OutputPart, TokenLog
from protocol.arrays import pack_int32, unpack_int32
from protocol.errors import CapacityError, ProtocolError
from protocol.messages import Logprobs
from tests.support.facts import make_accepted
from tests.support.progress import LINK, RequestEntry, progress

WORDS = 3


def row(position: int) -> list[int]:
    return [100 * position + word for word in range(WORDS)]


def rows_from(start: int, stop: int) -> list[int]:
    return [word for position in range(start, stop) for word in row(position)]


def started(log: TokenLog, placement: int, words: int, max_tokens: int = 50) -> int:
    request_index = log.open(max_tokens, words)
    log.begin_placement(request_index, placement, 10, 64)
    log.bind(request_index, LINK)
    return request_index


def all_rows(log: TokenLog, request_index: int) -> list[int]:
    index, length = np.array([request_index], np.int32), log.length(request_index)
    found = log.gather_logprobs(index, np.zeros(1, np.int32), np.array([length], np.int32))
    return [] if found is None else found.rows.tolist()


@pytest.fixture
def log() -> TokenLog:
    return TokenLog(request_indices=8, arena_tokens=1024, journalled=True)


def test_rows_are_those_of_their_tokens_beside_others_and_repeated(log: TokenLog) -> None:
    plain, asking, stale = started(log, 1, 0), started(log, 2, WORDS), started(log, 3, WORDS)
    log.end_placement(stale)
    log.append(
        progress(
            RequestEntry(stale, 3, 0, [7], 0, WORDS, [9, 9, 9]),
            RequestEntry(plain, 1, 0, [1, 2]),
            RequestEntry(asking, 2, 0, [5, 6], 0, WORDS, rows_from(0, 2)),
        ),
        LINK,
    )
    log.append(progress(RequestEntry(asking, 2, 1, [66, 7], 0, WORDS, [8, 8, 8, *row(2)])), LINK)
    assert unpack_int32(log.tokens(asking, 0), "tokens").tolist() == [5, 6, 7]
    assert all_rows(log, asking) == rows_from(0, 3), "those of known positions never change (I5)"
    assert (all_rows(log, plain), all_rows(log, stale)) == ([], [])
    log.check_invariants()


@pytest.mark.parametrize(
    ("words", "rows", "field"),
    [
        (None, [], "logprobs.words"),
        ([WORDS + 2], [0] * 5, "logprobs.words"),
        ([0], [], "logprobs.words"),
        ([-1], [], "logprobs.words"),
        ([WORDS, WORDS], [0] * 6, "logprobs.words"),
        ([WORDS], [0] * 2, "logprobs.rows"),
    ],
)
def test_other_rows_than_were_asked_for_are_refused(
    log: TokenLog, words: list[int] | None, rows: list[int], field: str
) -> None:
    asking = started(log, 1, WORDS)
    sent = progress(RequestEntry(asking, 1, 0, [5]))
    logprobs = None if words is None else Logprobs(pack_int32(words), pack_int32(rows))
    with pytest.raises(ProtocolError) as caught:
        log.append(msgspec.structs.replace(sent, logprobs=logprobs), LINK)
    assert caught.value.field == field
    assert log.length(asking) == 0
    log.append(progress(RequestEntry(asking, 1, 0, [], durable=3)), LINK)  # no token, no row


def test_rows_of_no_request_that_asks_are_refused(log: TokenLog) -> None:
    plain = started(log, 1, 0)
    with pytest.raises(ProtocolError):
        log.append(progress(RequestEntry(plain, 1, 0, [5], 0, 1, [0])), LINK)


def test_extent_has_room_for_rows_and_is_given_back(log: TokenLog) -> None:
    with pytest.raises(CapacityError, match="with log-probabilities, 42 places each"):
        log.open(50, 41)
    held = [log.open(50, 4, tokens=50, owner=number) for number in range(2)]
    assert [log.held_by(number) for number in range(2)] == [256, 256]
    for request_index in held:
        log.close(request_index)
    log.check_invariants()
    assert log.make_room(log.open(1000), 1000)


def test_journal_and_summary_bring_them_back(log: TokenLog) -> None:
    plain, asking = started(log, 1, 0), started(log, 2, WORDS)
    entry = RequestEntry(asking, 2, 0, list(range(9)), 0, WORDS, rows_from(0, 9))
    log.append(progress(RequestEntry(plain, 1, 0, [1] * 9), entry), LINK)
    news = log.take_news()
    assert news is not None
    copy = TokenLog(request_indices=8, arena_tokens=1024, journalled=True)
    for request_index, words in ((plain, 0), (asking, WORDS)):
        copy.reopen(request_index, 50, words)
    copy.recover(news_of(tokens_of(news)))
    assert all_rows(copy, asking) == rows_from(0, 9)
    parts = summed(log, asking, room=8)
    assert [len(part.tokens) for part in parts] == [2, 2, 2, 2, 1], "a token with its row takes four places"
    assert [part.is_cut for part in parts] == [True, True, True, True, False]
    other = TokenLog(request_indices=8, arena_tokens=1024)
    other.reopen(asking, 50, WORDS)
    for part in parts:
        record = output_of(part)
        rows = unpack_int32(record.logprobs, "logprobs")
        other.recover_output(OutputPart(asking, record.start, unpack_int32(record.tokens, "t"), 0, rows))
    assert all_rows(other, asking) == rows_from(0, 9)


def summed(log: TokenLog, request_index: int, room: int) -> list[OutputPart]:
    parts = []
    while (part := log.take_output(request_index, room, has_rows=False)) is not None:
        parts.append(part)
    return parts


def test_log_without_any_gathers_none(log: TokenLog) -> None:
    plain = started(log, 1, 0)
    log.append(progress(RequestEntry(plain, 1, 0, [5])), LINK)
    news = log.take_news()
    assert news is not None
    assert news.logprobs is None
    assert tokens_of(news).logprobs is None


def test_salvage_joins_rows_with_their_tokens() -> None:
    accepted = make_accepted(0, bytes(4), logprobs=1)
    pieces = [
        (0, pack_int32([5, 6]), pack_int32(rows_from(0, 2))),
        (1, pack_int32([6, 7]), pack_int32(rows_from(1, 3))),
    ]
    assert _Request(accepted, pieces).output() == (pack_int32([5, 6, 7]), pack_int32(rows_from(0, 3)), True)
    gap = (4, pack_int32([9]), pack_int32(row(4)))
    assert _Request(accepted, [*pieces, gap]).output()[1:] == (pack_int32(rows_from(0, 3)), False)
