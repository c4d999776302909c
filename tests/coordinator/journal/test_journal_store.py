"""The journal on a real disk: what a crash leaves, what a torn write costs, what a full disk refuses."""

from __future__ import annotations

import itertools
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from coordinator.journal import store as journal_store
from coordinator.journal.journal import JournalError
from coordinator.journal.records import (
    Record,
    RequestAccepted,
    RequestEnded,
    RequestOrdered,
    RequestPlaced,
    RequestsForgotten,
    SummaryBegun,
    SummaryEnded,
    TokensAppended,
    encode,
)
from coordinator.journal.state import replay
from coordinator.journal.store import SqliteStore, open_store
from coordinator.tokens.token_log import TokenLog
from metrics.state import JournalCounters
from protocol.errors import ConfigError
from protocol.messages import Sampling
from tests import ROOT


def accepted(request_index: int, prompt_tokens: int = 10) -> RequestAccepted:
    return RequestAccepted(
        request_index, request_index, f"r{request_index}", "me", 0, bytes(4 * prompt_tokens), Sampling(9), 0.5
    )


def order(number: int) -> RequestOrdered:
    return RequestOrdered(0, held=False, forced_slots=number)


def tokens(count: int) -> TokensAppended:
    return TokensAppended(bytes(4), bytes(4), np.array([count], np.int32).tobytes(), bytes(4 * count), bytes(4))


BEGUN = SummaryBegun(1, 2, (), ())


def forgotten(*request_indices: int) -> RequestsForgotten:
    return RequestsForgotten(np.array(request_indices, np.int32).tobytes(), 9)


@contextmanager
def opened(path: Path) -> Iterator[SqliteStore]:
    store = open_store(path, JournalCounters())
    try:
        yield store
    finally:
        store.close()


def test_what_was_written_is_read_in_order_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.sqlite"
    groups: list[list[Record]] = [[accepted(1), order(1)], [tokens(3)], [order(2), order(3)]]
    with opened(path) as store:
        for group in groups:
            store.write_now(group)
    assert path.stat().st_mode & 0o077 == 0
    with opened(path) as store:
        assert store.read() == [record for group in groups for record in group]


def test_what_is_forgotten_or_summarized_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with opened(path) as store:
        store.write_now([accepted(1), accepted(2), order(1), tokens(3)])
        store.write_now([RequestEnded(1, "FINISHED", "eos", 3, "", 1.0), order(2), forgotten(1), accepted(1, 20)])
        assert store.read() == [accepted(2), order(1), tokens(3), order(2), forgotten(1), accepted(1, 20)]
        store.write_now([order(3), BEGUN, order(4)])
        store.write_now([order(5)])
        assert order(1) in store.read(), "it has not been said again yet"
        store.write_now([order(6), SummaryEnded(), order(7)])
        kept = [accepted(2), accepted(1, 20), BEGUN, order(4), order(5), order(6), SummaryEnded(), order(7)]
        assert store.read() == kept
    with opened(path) as store:
        assert store.read() == kept
        store.write_now([BEGUN, SummaryEnded()])
        assert store.read() == [accepted(2), accepted(1, 20), BEGUN, SummaryEnded()]


def rows_of(store: SqliteStore) -> int:
    return int(store._connection.execute("SELECT count(*) FROM records").fetchone()[0])


def test_void_rows_go_a_few_with_each_group(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as store:
        for number in range(50):
            store.write_now([accepted(number), order(number)])
        store.write_now([BEGUN, SummaryEnded()])
        assert (rows_of(store), len(store.read())) == (102, 52), "void at once, deleted later"
    with opened(tmp_path / "other") as store:
        for number in range(100):
            store.write_now([accepted(number), order(number)])
        store.write_now([BEGUN, SummaryEnded()])
        left = [rows_of(store)]
        while left[-1] > 102:
            store.write_now([])
            left.append(rows_of(store))
        steps = {before - after for before, after in itertools.pairwise(left)}
        assert (left[0], max(steps)) == (202, journal_store.RETIRED_ROWS // 2), "every other one outlives summaries"


def test_a_journal_is_as_long_as_what_it_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_store, "SUMMARY_BYTES", 1 << 20)
    monkeypatch.setattr(journal_store, "FREE_PAGES_KEPT", 8)
    path = tmp_path / "j"
    with opened(path) as store:
        store.write_now([accepted(1)])
        while not store.wants_summary:
            store.write_now([tokens(10_000)])
        store.write_now([BEGUN])
        assert store._flow_bytes < 100
        store.write_now([SummaryEnded()])
        for _ in range(10):
            store.write_now([order(1)])
        assert store._ask("PRAGMA freelist_count") <= 8
    assert path.stat().st_size < 1 << 18
    with opened(path) as store:
        assert store.read()[:3] == [accepted(1), BEGUN, SummaryEnded()]


SUMMARIZER = """
import sys
from pathlib import Path
from coordinator.tokens.token_log import TokenLog
from coordinator.journal import store as journal_store
from coordinator.journal.state import replay
from coordinator.journal.store import open_store
from metrics.state import JournalCounters
from tests.coordinator.journal.test_journal_store import BEGUN, SummaryEnded, order
journal_store.FREE_PAGES_KEPT, journal_store.RETIRED_ROWS = 4, 2
store = open_store(Path(sys.argv[1]), JournalCounters())
store.read()
for number in range(int(sys.argv[2]), 1_000_000):
    group = [order(number)]
    if number % 8 == 0:
        group.append(BEGUN)
    if number % 8 == 5:
        group.append(SummaryEnded())
    store.write_now(group)
    print(number, flush=True)
"""


@pytest.mark.process
def test_a_kill_at_any_moment_of_a_summary_leaves_all_that_counts(tmp_path: Path) -> None:
    """Lives that end by SIGKILL amid summaries, deletions and vacuum; after each, everything since the last complete
    summary is there, in order."""
    path, dice, said = tmp_path / "j", random.Random(7), -1
    for _ in range(8):
        life = [sys.executable, "-c", SUMMARIZER, str(path), str(said + 1)]
        with subprocess.Popen(life, cwd=ROOT, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(dice.randrange(20, 60)):
                said = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            said = max([said, *map(int, writer.stdout.read().split())])
        with opened(path) as store:
            read = store.read()
        numbers = [record.forced_slots for record in read if isinstance(record, RequestOrdered)]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "in order, without a gap"
        assert said <= numbers[-1] <= said + 1
        begun = said // 8 * 8 if said % 8 >= 5 else said // 8 * 8 - 8
        assert numbers[0] in (begun + 1, begun + 9), "what the last complete summary left"
        said = numbers[-1]


def test_a_torn_write_costs_the_last_group_at_most(tmp_path: Path) -> None:
    """The files as they are at some moment, the log cut anywhere: a prefix of whole groups is read."""
    groups = [[order(10 * number), order(10 * number + 1)] for number in range(20)]
    dice = random.Random(3)
    with opened(tmp_path / "j") as store:
        for group in groups:
            store.write_now(group)
        log = (tmp_path / "j-wal").read_bytes()
        lengths = set()
        for attempt in range(15):
            copy = tmp_path / f"copy{attempt}" / "j"
            copy.parent.mkdir()
            shutil.copy(tmp_path / "j", copy)
            torn = bytearray(log[: dice.randrange(len(log))])
            if attempt % 3 == 0 and len(torn) > 100:
                torn[dice.randrange(len(torn) // 2, len(torn))] ^= 0xFF
            copy.with_name("j-wal").write_bytes(torn)
            with opened(copy) as torn_store:
                read = torn_store.read()
            assert read == [record for group in groups for record in group][: len(read)]
            assert len(read) % 2 == 0, "a group is whole or not there"
            lengths.add(len(read))
    assert len(lengths) > 3


WRITER = """
import sys
from pathlib import Path
from coordinator.journal.store import open_store
from metrics.state import JournalCounters
from tests.coordinator.journal.test_journal_store import order
store = open_store(Path(sys.argv[1]), JournalCounters())
for number in range(1_000_000):
    store.write_now([order(2 * number), order(2 * number + 1)])
    print(2 * number + 1, flush=True)
"""


@pytest.mark.process
def test_what_a_killed_process_had_committed_is_there(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], cwd=ROOT, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for _ in range(50):
            said = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        said = max([said, *map(int, writer.stdout.read().split())])
    with opened(path) as store:
        read = store.read()
    assert read == [order(number) for number in range(len(read))]
    assert said < len(read) <= said + 3


FILLER = """
import resource, sys
from pathlib import Path
from coordinator.journal.journal import JournalError
from coordinator.journal.store import open_store
from metrics.state import JournalCounters
from tests.coordinator.journal.test_journal_store import order, tokens
store = open_store(Path(sys.argv[1]), JournalCounters())
store.write_now([order(0)])
resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, resource.RLIM_INFINITY))
written = failed = 0
while not failed:
    try:
        store.write_now([tokens(20_000)])
        written += 1
    except JournalError as error:
        failed += 1
        print(error)
assert store.short == "" or "reserve" in store.short, store.short
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.write_now([order(1)])
print(len(store.read()) == written + 2)
store.close()
"""


def test_a_group_that_does_not_fit_is_refused_whole_and_the_next_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "j"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    answer = subprocess.run(
        [sys.executable, "-c", FILLER, str(path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    reason, went_on = answer.stdout.splitlines()
    assert str(path) in reason
    assert went_on == "True"
    with opened(path) as store:
        assert store.read()[-1] == order(1)


def fill(store: SqliteStore) -> int:
    """Groups that were written until one failed."""
    written = 0
    while _fits(store):
        written += 1
    return written


def _fits(store: SqliteStore) -> bool:
    try:
        store.write_now([tokens(50_000)])
    except JournalError:
        return False
    return True


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a tmpfs here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_leaves_running_work_its_reserve(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_store, "RESERVE_RETRY_S", 0.0)
    with opened(small_disk / "j") as store:
        assert store.short == ""
        store.write_now([order(0)])
        (small_disk / "other").write_bytes(bytes(7 << 20))
        written = 0
        while not store.short:
            store.write_now([tokens(50_000)])
            written += 1
        assert "running work lives on the reserve" in store.short
        assert fill(store) > 10, "megabytes more"
        (small_disk / "other").unlink()
        store.write_now([BEGUN, order(1), SummaryEnded()])
        store.write_now([order(2)])
        assert store.read() == [BEGUN, order(1), SummaryEnded(), order(2)]
        for _ in range(20):
            store.write_now([])
        assert store.short == "", "found out without a group"


def test_a_journal_has_one_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_store, "LOCK_WAIT_S", 0.05)
    with opened(tmp_path / "j"), pytest.raises(ConfigError, match=r"cannot keep the journal.*locked.*no other"):
        open_store(tmp_path / "j", JournalCounters())


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to be taken for one" * 100)
    with pytest.raises(ConfigError, match="cannot keep the journal"):
        open_store(tmp_path / "text", JournalCounters())
    with opened(tmp_path / "j"):
        pass
    connection = sqlite3.connect(tmp_path / "j")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="form 99"):
        open_store(tmp_path / "j", JournalCounters())


def test_a_journal_of_the_form_before_goes_on(tmp_path: Path) -> None:
    """Its rows, written down here as that form had them, and summaries of this one behind."""
    path = tmp_path / "j"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE records (number INTEGER PRIMARY KEY, slot INTEGER, body BLOB NOT NULL)")
    connection.execute("CREATE INDEX by_slot ON records (slot) WHERE slot IS NOT NULL")
    ordered, stay = ["Ordered", 0, True, -1, "", ""], ["Admission", 0, 7, "n0", "w0", 1, 64, False, 0]
    old = [[["Summary", 5, 9, [ordered], [stay], [["Departed", 0, 64, -1]]]], [["Ordered", 0, False, 3, "", ""]]]
    rows = [(4, 0, encode([accepted(0)])), (700, None, encode(old[0])), (701, None, encode(old[1]))]
    connection.executemany("INSERT INTO records VALUES (?, ?, ?)", rows)
    connection.execute("PRAGMA user_version = 1")
    connection.commit()
    connection.close()
    with opened(path) as store:
        book = replay(store.read(), TokenLog(4, 1 << 12, journalled=True))
        known = book.requests[0]
        assert (book.arrivals, book.placements, known.ordered) == (5, 9, order(3))
        assert (known.stay, known.on_worker, known.kept_tokens) == (
            RequestPlaced(0, 7, "n0", "w0", 1, 64),
            False,
            64,
        )
        store.write_now([BEGUN, order(4), SummaryEnded()])
        store.write_now([])
        assert rows_of(store) == 3, "what the form before had written went like any other"
        assert store.read() == [accepted(0), BEGUN, order(4), SummaryEnded()]


def test_a_damaged_record_is_said(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as store:
        store._connection.execute("INSERT INTO records (body) VALUES (x'00')")
        with pytest.raises(JournalError, match="j: "):
            store.read()
