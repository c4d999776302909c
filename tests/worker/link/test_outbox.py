"""The outbox: coalescing, bounds, numbering, replay, inventory."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.arrays import pack_int32, pack_int64, unpack_int32, unpack_int64
from protocol.errors import InternalError, ProtocolError
from protocol.inventory import InventoryRow, unpack_rows
from protocol.messages import (
    Admit,
    Counters,
    Finished,
    Grant,
    Logprobs,
    Parked,
    Released,
    Report,
    Resize,
    Resized,
    Sampling,
    Staged,
    Started,
    encode,
)
from tests.support.limits import HANG_LIMIT_S
from worker.link import outbox as outbox_module
from worker.link.outbox import REPORTS_UNACKED_MAX, Outbox

SAMPLING = Sampling(max_tokens=9)


def entries(report: Report) -> dict[int, tuple[int, int, list[int], int]]:
    """admission -> slot, start, ids, durable of the report's progress."""
    if report.progress is None:
        return {}
    request_indices = unpack_int32(report.progress.request_indices, "request_indices")
    placements = unpack_int64(report.progress.placements, "placements")
    starts = unpack_int32(report.progress.starts, "starts")
    counts = unpack_int32(report.progress.counts, "counts")
    tokens = unpack_int32(report.progress.tokens, "tokens").tolist()
    durables = unpack_int32(report.progress.durables, "durables")
    found, at = {}, 0
    for i, placement in enumerate(placements.tolist()):
        found[placement] = (int(request_indices[i]), int(starts[i]), tokens[at : at + counts[i]], int(durables[i]))
        at += int(counts[i])
    assert at == len(tokens)
    return found


def taken(outbox: Outbox, command_ack: int = 0, now: float = 0.0) -> Report:
    report = outbox.take(command_ack, now)
    assert report is not None
    return report


def test_progress_coalesces_per_request() -> None:
    outbox = Outbox(epoch=7)
    outbox.add_tokens(3, 100, 0, [5], 64)
    outbox.add_tokens(4, 101, 9, [6], 10)
    outbox.add_tokens(3, 100, 1, [7, 8], 64)
    outbox.set_durable(3, 100, 66)
    report = taken(outbox)
    assert (report.number, report.epoch) == (1, 7)
    assert entries(report) == {100: (3, 0, [5, 7, 8], 66), 101: (4, 9, [6], 10)}
    assert outbox.take(0, 0.0) is None


def test_tokens_that_do_not_continue_are_refused() -> None:
    outbox = Outbox(epoch=1)
    outbox.add_tokens(0, 1, 4, [9], 0)
    with pytest.raises(InternalError, match="do not continue position 5"):
        outbox.add_tokens(0, 1, 7, [9], 0)


def test_durable_never_falls_or_moves_the_start() -> None:
    outbox = Outbox(epoch=1)
    outbox.set_durable(0, 1, 70)
    outbox.set_durable(0, 1, 60)
    outbox.add_tokens(0, 1, 12, [9], 65)
    assert entries(taken(outbox)) == {1: (0, 12, [9], 70)}


def test_lone_command_acknowledgement_is_reported_once() -> None:
    outbox = Outbox(epoch=1)
    assert outbox.take(0, 0.0) is None
    report = taken(outbox, command_ack=5)
    assert (report.command_ack, report.progress, report.events) == (5, None, ())
    assert outbox.take(5, 0.0) is None


def test_in_flight_reports_are_bounded_and_coalesce() -> None:
    """I8: a coordinator that does not acknowledge costs REPORTS_UNACKED_MAX reports and no more."""
    outbox = Outbox(epoch=1)
    for position in range(REPORTS_UNACKED_MAX):
        outbox.add_tokens(0, 1, position, [position], 0)
        taken(outbox)
    for position in range(REPORTS_UNACKED_MAX, 500):
        outbox.add_tokens(0, 1, position, [position], 0)
        assert outbox.take(0, 0.0) is None
    assert outbox.in_flight == REPORTS_UNACKED_MAX
    outbox.ack(1)
    report = taken(outbox)
    assert entries(report)[1][2] == list(range(REPORTS_UNACKED_MAX, 500))


def test_ack_is_cumulative_and_refuses_the_unsent() -> None:
    outbox = Outbox(epoch=1)
    for position in range(3):
        outbox.add_tokens(0, 1, position, [position], 0)
        taken(outbox)
    outbox.ack(2)
    outbox.ack(1)
    assert outbox.in_flight == 1
    with pytest.raises(ProtocolError, match="never sent"):
        outbox.ack(4)


def test_replay_returns_the_same_bytes_or_refuses() -> None:
    outbox = Outbox(epoch=1)
    sent = []
    for position in range(4):
        outbox.add_tokens(0, 1, position, [position], 0)
        sent.append(encode(taken(outbox)))
    outbox.ack(1)
    assert [encode(report) for report in outbox.replay(3)] == sent[2:]
    assert outbox.replay(5) == []
    for first in (1, 6):
        with pytest.raises(ProtocolError):
            outbox.replay(first)


def test_overdue_names_the_oldest_report_and_touch_renews_it() -> None:
    outbox = Outbox(epoch=1)
    outbox.add_event(Started(1))
    taken(outbox, now=10.0)
    assert outbox.overdue(11.0, limit_s=2.0) is None
    assert outbox.overdue(12.5, limit_s=2.0) == 1
    outbox.touch(12.5)
    assert outbox.overdue(14.0, limit_s=2.0) is None


def counters(totals: tuple[int, int, int], **columns: list[int]) -> Counters:
    return Counters(*totals, **{name: pack_int64(values) for name, values in columns.items()})


def test_counts_coalesce_and_precede_their_release() -> None:
    outbox = Outbox(epoch=1)
    outbox.count_swaps({1: (5, 1), 2: (8, 0)}, (13, 1, 100))
    outbox.count_swaps({1: (6, 2)}, (14, 2, 200))
    outbox.add_event(Released(1, 64))
    counts = counters((14, 2, 200), placements=[1, 2], hits=[6, 8], misses=[2, 0])
    assert taken(outbox).events == (counts, Released(1, 64))
    assert outbox.take(0, 0.0) is None, "each count is said once"
    outbox.repeat_swap_totals()
    assert taken(outbox).events == (counters((14, 2, 200), placements=[], hits=[], misses=[]),)


def test_drafts_are_said_with_the_swaps_of_their_request() -> None:
    outbox = Outbox(epoch=1)
    outbox.count_swaps({1: (5, 1), 2: (8, 0)}, (13, 1, 100), {1: (4, 3), 3: (2, 1)})
    columns = {"placements": [1, 2], "hits": [5, 8], "misses": [1, 0], "drafted": [4, 0], "accepted": [3, 0]}
    assert taken(outbox).events == (counters((13, 1, 100), **columns),)
    outbox.count_swaps({2: (9, 0), 3: (1, 0)}, (15, 1, 100))
    columns = {"placements": [2, 3], "hits": [9, 1], "misses": [0, 0], "drafted": [0, 2], "accepted": [0, 1]}
    assert taken(outbox).events == (counters((15, 1, 100), **columns),)


def test_on_dirty_is_called_once_until_a_report_is_taken() -> None:
    calls: list[int] = []
    outbox = Outbox(epoch=1, on_dirty=lambda: calls.append(1))
    outbox.add_event(Started(1))
    outbox.add_event(Started(2))
    assert len(calls) == 1
    taken(outbox)
    outbox.add_event(Started(3))
    assert len(calls) == 2


def test_large_backlog_is_split_and_events_follow_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "REPORT_TOKENS_MAX", 10)
    outbox = Outbox(epoch=1)
    outbox.add_tokens(0, 1, 0, list(range(7)), 3)
    outbox.add_tokens(1, 2, 0, list(range(20)), 4)
    outbox.add_event(Finished(2, "eos", 20))
    reports = [taken(outbox) for _ in range(3)]
    assert entries(reports[0]) == {1: (0, 0, list(range(7)), 3), 2: (1, 0, [0, 1, 2], 4)}
    assert entries(reports[1]) == {2: (1, 3, list(range(3, 13)), 4)}
    assert entries(reports[2]) == {2: (1, 13, list(range(13, 20)), 4)}
    assert [len(report.events) for report in reports] == [0, 0, 1]
    assert outbox.take(0, 0.0) is None


def test_rows_of_log_probabilities_go_with_their_tokens_and_count_by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "REPORT_TOKENS_MAX", 12)
    outbox = Outbox(epoch=1)
    outbox.add_tokens(0, 1, 0, [5, 6], 0)
    outbox.add_tokens(1, 2, 0, [7, 8], 0, [pack_int32([70, 71, 72]), pack_int32([80, 81, 82])])
    outbox.add_tokens(1, 2, 2, [9], 0, [pack_int32([90, 91, 92])])
    outbox.add_tokens(2, 3, 0, [4], 0)
    reports = [taken(outbox) for _ in range(2)]
    assert entries(reports[0]) == {1: (0, 0, [5, 6], 0), 2: (1, 0, [7, 8], 0)}
    assert entries(reports[1]) == {2: (1, 2, [9], 0), 3: (2, 0, [4], 0)}
    sent = [report.progress.logprobs for report in reports if report.progress is not None]
    assert sent[0] == Logprobs(pack_int32([0, 3]), pack_int32([70, 71, 72, 80, 81, 82]))
    assert sent[1] == Logprobs(pack_int32([3, 0]), pack_int32([90, 91, 92]))
    outbox.add_tokens(2, 3, 1, [4], 0)
    plain = taken(outbox).progress
    assert plain is not None
    assert plain.logprobs is None


def test_pending_events_are_bounded_by_a_named_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """I8."""
    monkeypatch.setattr(outbox_module, "EVENTS_PENDING_MAX", 2)
    outbox = Outbox(epoch=1)
    outbox.add_event(Started(1))
    outbox.add_event(Started(2))
    with pytest.raises(InternalError, match="EVENTS_PENDING_MAX"):
        outbox.add_event(Started(3))


def admit(placement: int, generated: int = 0, durable: int = 0, *, pages: int = 2, hot_slots: int = 0) -> Admit:
    ids = bytes(4 * generated)
    return Admit(placement, 7, "r", bytes(400), ids, durable, SAMPLING, bytes(4 * pages), pages, hot_slots, pages)


def rows(outbox: Outbox) -> list[InventoryRow]:
    return unpack_rows(outbox.inventory())


def test_inventory_follows_progress_until_released() -> None:
    outbox = Outbox(epoch=1)
    outbox.hold(admit(1, 2))
    outbox.hold(admit(2))
    outbox.add_event(Staged(1, 1.0, 1.0))
    outbox.set_durable(0, 1, 64)
    outbox.add_tokens(0, 1, 2, [4, 5], 60)
    assert [(it.placement, it.generated_tokens, it.durable_tokens) for it in rows(outbox)] == [(1, 4, 64), (2, 0, 0)]
    outbox.add_event(Released(1, 64))
    assert outbox.held() == [2]
    with pytest.raises(InternalError, match="held=1"):
        outbox.restart(2)
    outbox.add_event(Released(2, 0))
    outbox.restart(2)
    assert (outbox.epoch, outbox.next_number, outbox.take(0, 0.0), outbox.held()) == (2, 1, None, [])


def test_inventory_has_grants_and_acknowledged_progress() -> None:
    outbox = Outbox(epoch=1)
    outbox.hold(admit(1))
    outbox.give(Grant(1, bytes(12), 3, 3))
    outbox.give(Resize(1, 128, 3))
    outbox.give(Grant(99, bytes(12), 3, 3))  # of an admission that has departed
    outbox.add_event(Staged(1, 1.0, 1.0))
    resizing = InventoryRow(1, 5, 5, request_index=7, resize_slots=128, resize_chunks=3)
    first = taken(outbox)
    outbox.add_event(Started(1))
    outbox.add_event(Parked(1))
    outbox.add_event(Resized(1, 128, 3))
    second = taken(outbox)
    assert rows(outbox) == [resizing], "nothing was acknowledged"
    outbox.ack(first.number)
    assert rows(outbox) == [replace(resizing, is_staged=True)]
    outbox.ack(second.number)
    assert rows(outbox) == [
        InventoryRow(1, 5, 3, request_index=7, hot_slots=128, is_staged=True, is_started=True, is_parked=True)
    ]
    outbox.give(Grant(1, bytes(4), 1, 0))
    assert not rows(outbox)[0].is_parked


def test_release_stays_in_the_inventory_until_acknowledged() -> None:
    outbox = Outbox(epoch=1)
    outbox.hold(admit(1, durable=100))
    outbox.add_event(Released(1, 100))
    report = taken(outbox)
    assert (outbox.held(), [it.placement for it in rows(outbox)]) == ([], [1])
    assert outbox.first_number == report.number
    outbox.ack(report.number)
    assert (rows(outbox), outbox.first_number) == ([], report.number + 1)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from(["tokens", "durable", "event", "take", "ack"]), st.integers(0, 3)), max_size=60)
)
def test_every_token_leaves_once_and_in_order(moves: list[tuple[str, int]]) -> None:
    """I5, worker's side: whatever the order of writes, reports and acknowledgements, positions are 0, 1, 2, ..."""
    outbox = Outbox(epoch=1)
    written = dict.fromkeys(range(4), 0)
    received: dict[int, list[int]] = {placement: [] for placement in range(4)}

    def receive(report: Report | None) -> None:
        for placement, (_, start, ids, _) in entries(report).items() if report else ():
            assert not ids or start == len(received[placement])
            received[placement] += ids

    for move, n in moves:
        match move:
            case "tokens":
                outbox.add_tokens(n, n, written[n], [written[n], written[n] + 1], written[n])
                written[n] += 2
            case "durable":
                outbox.set_durable(n, n, written[n])
            case "event":
                outbox.add_event(Started(n))
            case "take":
                receive(outbox.take(0, 0.0))
            case _:
                outbox.ack(outbox.next_number - 1)
    outbox.ack(outbox.next_number - 1)
    receive(outbox.take(0, 0.0))
    assert received == {n: list(range(count)) for n, count in written.items()}
    assert outbox.pending_tokens == 0


def test_writer_and_reader_threads_lose_nothing() -> None:
    wake = threading.Event()
    outbox = Outbox(epoch=1, on_dirty=wake.set)
    received: list[int] = []

    def write() -> None:
        for position in range(3000):
            outbox.add_tokens(0, 1, position, [position], position)
        outbox.add_event(Finished(1, "length", 3000))

    writer = threading.Thread(target=write)
    writer.start()
    finished = False
    while not finished:
        assert wake.wait(HANG_LIMIT_S), "dirt without a wake-up"
        wake.clear()
        while (report := outbox.take(0, 0.0)) is not None:
            outbox.ack(report.number)
            received += [token for _, _, ids, _ in entries(report).values() for token in ids]
            finished = finished or bool(report.events)
    writer.join()
    assert received == list(range(3000))
