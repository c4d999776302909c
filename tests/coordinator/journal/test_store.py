"""The journal on a real disk: what a crash leaves, what a torn write costs, what a full disk refuses."""

from __future__ import annotations

import itertools
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from coordinator.journal import files, salvage
from coordinator.journal import store as journal_store
from coordinator.journal.chain import RETIRED_ROWS
from coordinator.journal.journal import JournalError
from coordinator.journal.records import (
    Record,
    RequestAccepted,
    RequestEnded,
    RequestOrdered,
    RequestsForgotten,
    SummaryBegun,
    SummaryEnded,
    TokensAppended,
)
from coordinator.journal.store import SqliteStore, open_store
from metrics.state import JournalCounters
from protocol.errors import ConfigError
from tests import ROOT
from tests.support.facts import make_accepted


def accepted(request_index: int, prompt_tokens: int = 10) -> RequestAccepted:
    return make_accepted(request_index, bytes(4 * prompt_tokens), 9, rank=(0, 0, request_index))


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


def test_successor_reads_records_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.sqlite"
    groups: list[list[Record]] = [[accepted(1), order(1)], [tokens(3)], [order(2), order(3)]]
    with opened(path) as store:
        for group in groups:
            store.write_now(group)
    assert path.stat().st_mode & 0o077 == 0
    with opened(path) as store:
        assert store.read() == [record for group in groups for record in group]


def test_forgotten_and_summarized_records_are_removed(tmp_path: Path) -> None:
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


def test_void_rows_are_deleted_along_with_groups(tmp_path: Path) -> None:
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
            store.write_now([order(1)])
            left.append(rows_of(store) - len(left))
        steps = {before - after for before, after in itertools.pairwise(left)}
        assert (left[0], max(steps), store._contents.head.rows) == (202, RETIRED_ROWS, rows_of(store))


def test_journal_size_follows_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
from coordinator.journal import chain, store as journal_store
from coordinator.journal.store import open_store
from metrics.state import JournalCounters
from tests.coordinator.journal.test_store import BEGUN, SummaryEnded, order
journal_store.FREE_PAGES_KEPT, chain.RETIRED_ROWS = 4, 2
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
def test_kill_during_a_summary_loses_no_record(tmp_path: Path) -> None:
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


def test_torn_write_costs_unacknowledged_records_only(tmp_path: Path) -> None:
    """A power cut after each commit: the log cut or torn anywhere behind what was marked leaves a prefix of whole
    groups, with all that was acknowledged. Torn before that it is damaged, and refused."""
    groups = [[order(10 * number), order(10 * number + 1)] for number in range(20)]
    written: list[Record] = [record for group in groups for record in group]
    dice, marks, ends, read_lengths = random.Random(3), [], [], set()
    with opened(tmp_path / "j") as store:
        for group in groups:
            store.write_now(group)
            marks.append((tmp_path / "j.head").read_bytes())
            ends.append((tmp_path / "j-wal").stat().st_size)
        base, log = (tmp_path / "j").read_bytes(), (tmp_path / "j-wal").read_bytes()
    for attempt in range(30):
        marked, copy = dice.randrange(len(groups)), tmp_path / f"copy{attempt}" / "j"
        cut = dice.randrange(len(log))
        torn = bytearray(log[:cut])
        if attempt % 3 == 0 and cut > ends[marked]:
            torn[dice.randrange(ends[marked], cut)] ^= 0xFF
        put(copy, {"j": base, "j-wal": bytes(torn), "j.head": marks[marked]})
        if cut < ends[marked]:
            with pytest.raises(ConfigError, match=rf"{marked + 1} (is|are) missing at its end|missing: all"):
                open_store(copy, JournalCounters())
            continue
        with opened(copy) as torn_store:
            read = torn_store.read()
        assert read == written[: len(read)]
        assert len(read) % 2 == 0, "a group is whole or not there"
        assert len(read) >= 2 * (marked + 1), "what was acknowledged is there"
        read_lengths.add(len(read))
    assert len(read_lengths) > 3


def put(journal: Path, files: dict[str, bytes]) -> None:
    """Files of a journal as they are after a crash."""
    journal.parent.mkdir()
    for name, data in files.items():
        (journal.parent / name).write_bytes(data)
        (journal.parent / name).chmod(0o600)


WRITER = """
import sys
from pathlib import Path
from coordinator.journal.store import open_store
from metrics.state import JournalCounters
from tests.coordinator.journal.test_store import order
store = open_store(Path(sys.argv[1]), JournalCounters())
for number in range(1_000_000):
    store.write_now([order(2 * number), order(2 * number + 1)])
    print(2 * number + 1, flush=True)
"""


@pytest.mark.process
def test_killed_process_loses_no_committed_record(tmp_path: Path) -> None:
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
from tests.coordinator.journal.test_store import order, tokens
from tests.support.facts import make_accepted
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


def test_oversized_group_is_refused_whole(tmp_path: Path) -> None:
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
    """A separate file system of 24 MiB."""
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
        assert "running requests use the reserve" in store.short
        assert fill(store) > 10, "megabytes more"
        (small_disk / "other").unlink()
        store.write_now([BEGUN, order(1), SummaryEnded()])
        store.write_now([order(2)])
        assert store.read() == [BEGUN, order(1), SummaryEnded(), order(2)]
        for _ in range(20):
            store.write_now([])
        assert store.short == "", "found out without a group"


def test_a_disk_that_has_filled_counts_as_full_until_a_tenth_is_free(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the reserve alone would be used up by the next commits, and new requests refused and taken in turn."""
    monkeypatch.setattr(journal_store, "RESERVE_RETRY_S", 0.0)
    with opened(small_disk / "j") as store:
        (small_disk / "other").write_bytes(bytes(7 << 20))
        while not store.short:
            store.write_now([tokens(50_000)])
        store.write_now([BEGUN, SummaryEnded()])
        for _ in range(20):
            store.write_now([])
        assert store.short, "room for the reserve alone is no reason to take new requests"
        disk = shutil.disk_usage(small_disk)
        needed = journal_store.RESERVE_BYTES + journal_store.FREE_SHARE * disk.total
        os.truncate(small_disk / "other", int((7 << 20) + disk.free - needed + (256 << 10)))
        assert journal_store.RESERVE_BYTES < shutil.disk_usage(small_disk).free < needed
        for _ in range(10):
            store.write_now([order(0)])
            assert "running requests use the reserve" in store.short
        (small_disk / "other").unlink()
        for _ in range(20):
            store.write_now([])
        for _ in range(10):
            store.write_now([order(0)])
            assert store.short == ""


def test_journal_of_a_killed_process_opens_on_a_full_disk(small_disk: Path) -> None:
    """With its log, and with the reserve for the first commit. The inspection writes no file either."""
    path = small_disk / "j"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], cwd=ROOT, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for _ in range(5):
            writer.stdout.readline()
        writer.kill()
    with suppress(OSError), (small_disk / "other").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4_096))
    assert shutil.disk_usage(small_disk).free == 0
    files_there = sorted(small_disk.iterdir())
    assert not salvage.check(path).damages
    assert sorted(small_disk.iterdir()) == files_there
    with opened(path) as store:
        read = store.read()
        assert len(read) >= 10
        assert store.short == ""
        store.write_now([order(len(read))])
        assert "running requests use the reserve" in store.short
    with opened(path) as store:
        assert store.read() == [order(number) for number in range(len(read) + 1)]


def test_journal_has_a_single_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_WAIT_S", 0.05)
    with opened(tmp_path / "j"), pytest.raises(ConfigError, match=r"cannot keep the journal.*locked.*no other"):
        open_store(tmp_path / "j", JournalCounters())


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to be taken for one" * 100)
    (tmp_path / "text").chmod(0o600)
    with pytest.raises(ConfigError, match="cannot keep the journal: it is not a journal"):
        open_store(tmp_path / "text", JournalCounters())


@pytest.mark.parametrize("form", [2, 99])
def test_journal_of_another_version_is_refused(tmp_path: Path, form: int) -> None:
    connection = sqlite3.connect(tmp_path / "j")
    connection.execute("CREATE TABLE records (number INTEGER PRIMARY KEY, request_index INTEGER, body BLOB NOT NULL)")
    connection.execute(f"PRAGMA user_version = {form}")
    connection.close()
    (tmp_path / "j").chmod(0o600)
    before = (tmp_path / "j").read_bytes()
    with pytest.raises(
        ConfigError, match=rf"coordinator.journal=.*j: it has form {form}, .* form 6 \(let its requests"
    ):
        open_store(tmp_path / "j", JournalCounters())
    assert (tmp_path / "j").read_bytes() == before
