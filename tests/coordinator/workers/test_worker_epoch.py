"""coordinator.workers.worker_epoch and tokenizer_store: the pure parts behind worker links."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from coordinator.workers.tokenizer_store import CHUNKS_MAX, TokenizerStore
from coordinator.workers.worker_epoch import REPLAY_ASK_INTERVAL_S, Arrival, Course, KnownWorker, WorkerEpoch, judge
from metrics.state import COMMAND_BOUNDS_S, Buckets
from protocol.errors import BadInput, HiSparseError, NameTaken, ProtocolError, Unavailable, WrongState
from protocol.inventory import InventoryRow, pack_rows
from protocol.messages import Heartbeat, Report, TokenizerChunk, Withdraw
from tests.support.fakes.scheduler import MODEL
from tests.support.fakes.worker import hello

ME, OTHER = 100, 200
INCARNATION = 10
PAST = {"report_next": 5}


@pytest.fixture
def epoch() -> WorkerEpoch:
    return WorkerEpoch(hello(), Buckets(COMMAND_BOUNDS_S).observe, now=0.0)


def report(number: int, command_ack: int = 0) -> Report:
    return Report(number, 1, command_ack, None, ())


def beat(beats: int, command_ack: int = 0) -> Heartbeat:
    return Heartbeat(1, command_ack, beats, 1, 1.0)


def test_reports_are_placed_by_number(epoch: WorkerEpoch) -> None:
    arrivals = [epoch.report(report(number), 0.0) for number in (1, 1, 3, 2, 1, 3)]
    assert arrivals == [
        Arrival.NEXT,
        Arrival.REPEATED,
        Arrival.GAP,
        Arrival.NEXT,
        Arrival.REPEATED,
        Arrival.NEXT,
    ]
    assert epoch.report_ack == 3


def test_gap_request_is_rate_limited(epoch: WorkerEpoch) -> None:
    step = REPLAY_ASK_INTERVAL_S / 2
    assert [epoch.should_ask_again(now) for now in (0.0, step, 2 * step, 3 * step, 4 * step)] == [
        True,
        False,
        True,
        False,
        True,
    ]


def test_link_and_executor_have_separate_signs_of_life(epoch: WorkerEpoch) -> None:
    assert epoch.failing(5.0, 5.0) == ""
    assert epoch.failing(5.1, 5.0) == "no message for 5 s"
    for now in (1.0, 2.0, 3.0):
        epoch.heartbeat(beat(beats=7), now)
    assert epoch.failing(6.0, 5.0) == ""
    assert epoch.failing(6.5, 5.0) == "its executor has not turned for 5 s"
    epoch.report(report(1), 6.5)
    assert "executor" in epoch.failing(6.5, 5.0), "reports alone are the link's"
    epoch.heartbeat(beat(beats=8), 7.0)
    assert epoch.failing(7.5, 5.0) == ""


def test_time_in_which_the_coordinator_stood_still_is_no_silence(epoch: WorkerEpoch) -> None:
    epoch.heartbeat(beat(beats=7), 1.0)
    epoch.report(report(1), 2.0)
    epoch.excuse(20.0, 23.0)
    assert epoch.stats(23.0).link_age_s == 1.0
    assert epoch.failing(26.0, 5.0) == ""
    assert "executor" in epoch.failing(26.5, 5.0)
    epoch.excuse(100.0, 26.0)
    assert epoch.stats(26.0).link_age_s == 0.0, "never heard in the future"


def test_acknowledgements_come_with_reports_and_heartbeats(epoch: WorkerEpoch) -> None:
    for placement in range(3):
        epoch.commands.append(Withdraw(placement))
    epoch.commands.take(1.0)
    epoch.report(report(1, command_ack=1), 1.5)
    assert epoch.stats(2.0).command_ack_ms == 500.0
    epoch.heartbeat(beat(1, command_ack=3), 2.5)
    assert epoch.stats(3.0).command_ack_ms == 625.0
    assert epoch.stats(3.0).link_age_s == 0.5
    epoch.report(report(1, command_ack=1), 3.0)
    assert epoch.commands.acknowledged == 3, "an older number in a repeated report changes nothing"


@pytest.mark.parametrize("changes", [{"report_next": 2, "command_ack": 1}, {"report_next": 9, "command_ack": 9}])
def test_impossible_reconnect_is_refused(epoch: WorkerEpoch, changes: dict[str, int]) -> None:
    epoch.commands.append(Withdraw(1))
    epoch.commands.take(0.0)
    for number in (1, 2):
        epoch.report(report(number, command_ack=1), 0.0)
    with pytest.raises(WrongState):
        epoch.reconnect(hello(**changes), 1.0)  # type: ignore[arg-type]
    epoch.reconnect(hello(report_next=3, command_ack=1), 1.0)


@pytest.mark.parametrize(
    ("changes", "known", "expected"),
    [
        ({}, None, Course.JOIN),
        ({}, KnownWorker(1, ME, is_down=False), Course.CONTINUE),
        (PAST, KnownWorker(1, ME, is_down=False), Course.CONTINUE),
        ({}, KnownWorker(1, ME, is_down=True), WrongState),
        ({}, KnownWorker(1, OTHER, is_down=False), Unavailable),
        ({"epoch": 2}, KnownWorker(1, ME, is_down=False), Course.SUCCEED),
        ({"epoch": 2}, KnownWorker(1, ME, is_down=True), Course.SUCCEED),
        ({"epoch": 2}, KnownWorker(1, OTHER, is_down=False), Unavailable),
        ({"epoch": 2}, KnownWorker(1, OTHER, is_down=True), Course.JOIN),
        (PAST, None, Course.SEND_AWAY),
        ({"command_ack": 1}, None, Course.SEND_AWAY),
        ({"inventory": pack_rows([InventoryRow(1)])}, None, Course.SEND_AWAY),
        (PAST | {"epoch": 2}, KnownWorker(1, ME, is_down=False), Course.SEND_AWAY),
        (PAST | {"incarnation_seen": INCARNATION}, None, WrongState),
        ({"incarnation_seen": INCARNATION}, None, Course.JOIN),
        ({"incarnation_seen": INCARNATION + 1}, None, Unavailable),
        ({"protocol": 0}, None, ProtocolError),
        ({"worker": "w" * 129}, None, BadInput),
    ],
)
def test_hello_outcomes(
    changes: dict[str, object], known: KnownWorker | None, expected: Course | type[HiSparseError]
) -> None:
    said = hello(**changes)  # type: ignore[arg-type]
    if isinstance(expected, Course):
        assert judge(said, ME, known, INCARNATION) is expected
    else:
        with pytest.raises(expected):
            judge(said, ME, known, INCARNATION)


def test_without_attestation_every_process_differs() -> None:
    with pytest.raises(NameTaken, match="another process has this name"):
        judge(hello(epoch=2), 0, KnownWorker(1, 0, is_down=False), INCARNATION)
    assert judge(hello(epoch=2), 0, KnownWorker(1, 0, is_down=True), INCARNATION) is Course.JOIN
    assert judge(hello(), 0, KnownWorker(1, 0, is_down=False), INCARNATION) is Course.CONTINUE


DATA = b"tokenizer" * 10
JSON_MODEL = msgspec.structs.replace(MODEL, tokenizer_kind="json", tokenizer_hash=hashlib.sha256(DATA).hexdigest())


def pieces(*data: bytes) -> list[TokenizerChunk]:
    return [TokenizerChunk(1, JSON_MODEL.tokenizer_hash, i, len(data), piece) for i, piece in enumerate(data)]


def test_tokenizer_is_assembled_once() -> None:
    store = TokenizerStore()
    with pytest.raises(Unavailable, match="no worker has registered"):
        store.tokenizer(None)
    assert store.tokenizer(MODEL) == ("bytes", "", b"")
    assert store.wants(JSON_MODEL)
    assert not store.wants(MODEL)
    first, second = pieces(DATA[:50], DATA[50:])
    store.take("w0", JSON_MODEL, first)
    store.take("w1", JSON_MODEL, first)
    with pytest.raises(Unavailable, match="not arrived yet"):
        store.tokenizer(JSON_MODEL)
    store.take("w0", JSON_MODEL, second)
    assert store.tokenizer(JSON_MODEL) == ("json", JSON_MODEL.tokenizer_hash, DATA)
    store.take("w1", JSON_MODEL, second)
    assert not store.wants(JSON_MODEL)


def test_returning_worker_starts_over() -> None:
    store = TokenizerStore()
    first, second = pieces(DATA[:50], DATA[50:])
    store.take("w0", JSON_MODEL, first)
    store.take("w0", JSON_MODEL, first)
    store.forget("w0")
    with pytest.raises(ProtocolError, match="expected chunk 0"):
        store.take("w0", JSON_MODEL, second)
    for piece in (first, second):
        store.take("w0", JSON_MODEL, piece)
    assert not store.wants(JSON_MODEL)


@pytest.mark.parametrize(
    "chunk",
    [
        TokenizerChunk(1, "another hash", 0, 1, DATA),
        TokenizerChunk(1, JSON_MODEL.tokenizer_hash, 1, 2, DATA),
        TokenizerChunk(1, JSON_MODEL.tokenizer_hash, -1, 2, DATA),
        TokenizerChunk(1, JSON_MODEL.tokenizer_hash, 0, 0, DATA),
        TokenizerChunk(1, JSON_MODEL.tokenizer_hash, 0, CHUNKS_MAX + 1, DATA),
        TokenizerChunk(1, JSON_MODEL.tokenizer_hash, 0, 1, DATA + b"!"),
        TokenizerChunk(1, JSON_MODEL.tokenizer_hash, 0, 2, bytes(1024 * 1024 + 1)),
    ],
)
def test_wrong_pieces_are_refused(chunk: TokenizerChunk) -> None:
    store = TokenizerStore()
    with pytest.raises(ProtocolError):
        store.take("w0", JSON_MODEL, chunk)
    assert store.wants(JSON_MODEL)


def test_wait_for_a_rank_is_told_and_does_not_end_the_rank_that_waits(epoch: WorkerEpoch) -> None:
    for second in range(1, 9):
        epoch.heartbeat(msgspec.structs.replace(beat(second), awaits="w3"), float(second))
        assert epoch.failing(float(second), 2.0) == ""
    assert epoch.stats(8.0).awaits == "w3"
    epoch.heartbeat(beat(9), 9.0)
    assert epoch.stats(9.0).awaits == ""
