"""A damaged journal is refused by name, and what is whole of it can be kept; one that is deleted while it runs takes
nothing more."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import trio
from click.testing import CliRunner, Result

from coordinator.journal.chain import StoredRecord
from coordinator.journal.files import head_path, log_path
from coordinator.journal.inspection import read_rows
from coordinator.journal.journal import RETRY_S, GroupCommit, JournalError, check_writes
from coordinator.journal.records import Record, RequestEnded, TokensAppended
from coordinator.journal.salvage import PLACEMENTS_SKIPPED, rebuild
from coordinator.journal.state import JournalState, replay
from coordinator.journal.store import SqliteStore, open_store
from coordinator.tokens.token_log import TokenLog
from hisparse.cli import main
from metrics.state import JournalCounters
from protocol.errors import ConfigError, Unavailable
from tests.coordinator.journal.test_store import (
    BEGUN,
    SummaryEnded,
    accepted,
    forgotten,
    opened,
    order,
    put,
    tokens,
)
from tests.support.limits import HANG_LIMIT_S
from tools.faults.journal_damage import outcomes

CASES = 80


def test_random_damage_is_served_whole_or_refused_by_name() -> None:
    found = list(outcomes(CASES, seed=7))
    assert [outcome for outcome in found if outcome.wrong] == []
    assert {outcome.is_served for outcome in found} == {True, False}


# ---------------------------------------------------------------- faults one by one


def said(request_index: int, start: int, *values: int) -> TokensAppended:
    arrays = [request_index], [start], [len(values)], list(values), [0]
    return TokensAppended(*(np.array(it, np.int32).tobytes() for it in arrays))


GROUPS: list[list[Record]] = [
    [accepted(0), accepted(1)],
    [said(0, 0, 5, 6), order(1)],
    [said(1, 0, 9)],
    [said(0, 2, 7), RequestEnded(1, "FINISHED", "eos", 1, "", 1.0)],
    [said(0, 3, 8)],
]


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A journal as a kill leaves it, all of it in the log."""
    with opened(tmp_path / "live" / "j") as store:
        for group in GROUPS:
            store.write_now(group)
        files = {file.name: file.read_bytes() for file in (tmp_path / "live").iterdir()}
    put(tmp_path / "killed" / "j", files)
    return tmp_path / "killed" / "j"


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        open_store(path, JournalCounters())
    assert refused.value.field == "coordinator.journal"
    assert refused.value.remedy
    return str(refused.value)


def spoil(path: Path, change: Callable[[bytearray], bytearray]) -> None:
    path.write_bytes(change(bytearray(path.read_bytes())))


def flipped(at: int) -> Callable[[bytearray], bytearray]:
    def change(data: bytearray) -> bytearray:
        data[at] ^= 4
        return data

    return change


def change_token(path: Path, old: int, new: int) -> None:
    """In the one row that has it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for number, body in connection.execute("SELECT number, body FROM records").fetchall():
            changed = body.replace(old.to_bytes(4, "little"), new.to_bytes(4, "little"))
            connection.execute("UPDATE records SET body = ? WHERE number = ?", (changed, number))


def by_sql(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(statement, values)


def test_flipped_bit_is_refused_with_what_is_lost(killed: Path) -> None:
    spoil(log_path(killed), flipped(-2_000))
    before = {file.name: file.read_bytes() for file in killed.parent.iterdir()}
    text = refusal(killed)
    assert "the journal is damaged: commit 5 is missing at its end, all acknowledged" in text
    assert "hisparse journal salvage" in text
    assert {file.name: file.read_bytes() for file in killed.parent.iterdir()} == before


def test_a_cut_log_or_file_is_refused(killed: Path) -> None:
    spoil(log_path(killed), lambda data: data[: len(data) // 2])
    assert "missing at its end" in refusal(killed)
    log_path(killed).unlink()
    assert "commits 1 to 5 are missing" in refusal(killed)
    killed.write_bytes(b"")
    assert "damaged" in refusal(killed)
    killed.unlink()
    assert "commits 1 to 5 are missing: all that was acknowledged" in refusal(killed)


def test_a_changed_token_in_a_row_is_refused(killed: Path) -> None:
    change_token(killed, 6, 4)
    assert "is not what was written" in refusal(killed)


def test_row_with_foreign_digest_is_refused(killed: Path) -> None:
    """Each row is whole by itself."""
    with opened(killed) as store:
        rows = store._connection.execute("SELECT * FROM records ORDER BY number DESC").fetchall()
    by_sql(killed, "DELETE FROM records WHERE number = ?", rows[4][0])
    assert "missing in its middle" in refusal(killed)
    by_sql(killed, "INSERT INTO records VALUES (?, ?, ?, ?, ?)", *rows[4])
    with opened(killed) as store:
        assert len(store.read()) == 8
    by_sql(killed, "DELETE FROM records WHERE request_index = 1")
    assert "they do not add up" in refusal(killed)


def test_missing_or_foreign_mark_is_refused(killed: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "other") as store:
        store.write_now([order(1)])
    mark = head_path(killed).read_bytes()
    head_path(killed).write_bytes(head_path(tmp_path / "other").read_bytes())
    assert "j.head belongs to another journal" in refusal(killed)
    head_path(killed).write_bytes(bytes(len(mark)))
    assert "j.head, which has the last acknowledged commit, is missing or damaged" in refusal(killed)
    head_path(killed).write_bytes(flipped(4_100)(bytearray(mark)))
    with opened(killed) as store:
        assert len(store.read()) == 8, "the other of the two is whole"


def test_a_free_page_that_is_in_use_is_refused(tmp_path: Path) -> None:
    """A row that was written next would go over another one."""
    with opened(tmp_path / "j") as store:
        for _ in range(20):
            store.write_now([tokens(5_000)])
        store.write_now([BEGUN, order(1), SummaryEnded()])
        for _ in range(4):
            store.write_now([order(2)])
        assert store._ask("PRAGMA freelist_count") > 20

    def change(data: bytearray) -> bytearray:
        trunk = (int.from_bytes(data[32:36], "big") - 1) * 4_096
        data[trunk + 8 : trunk + 12] = (3).to_bytes(4, "big")
        return data

    spoil(tmp_path / "j", change)
    assert "SQLite's pages are damaged" in refusal(tmp_path / "j")


@pytest.mark.parametrize("name", ["j", "j-wal", "j.head"])
def test_shared_files_and_links_are_refused(killed: Path, name: str) -> None:
    file = killed.with_name(name)
    file.chmod(0o666)
    assert f"{name}: cannot keep the journal: owner {os.geteuid()}, mode 0666: others could read" in refusal(killed)
    file.chmod(0o600)
    file.rename(killed.with_name("elsewhere"))
    file.symlink_to("elsewhere")
    assert f"{name}: cannot keep the journal: it is a symlink" in refusal(killed)
    file.unlink()
    os.mkfifo(file, 0o600)
    assert "not a regular file" in refusal(killed)


# ---------------------------------------------------------------- while it runs


@pytest.mark.parametrize("name", ["j", "j-wal", "j.head"])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_missing_file_takes_no_records_until_restored(tmp_path: Path, name: str, is_replaced: bool) -> None:
    file, aside = tmp_path / name, tmp_path / "aside"
    with opened(tmp_path / "j") as store:
        store.write_now([accepted(1)])
        file.rename(aside)
        if is_replaced:
            file.write_bytes(aside.read_bytes())
        group = [order(1)]
        for _ in range(3):
            with pytest.raises(JournalError, match="replaced while" if is_replaced else "deleted while"):
                store.write_now(group)
        aside.rename(file)
        store.write_now(group)
        store.write_now([order(2)])
        assert store.read() == [accepted(1), order(1), order(2)], "each group once"
    with opened(tmp_path / "j") as store:
        assert store.read() == [accepted(1), order(1), order(2)]


async def test_a_deleted_journal_refuses_new_work(tmp_path: Path) -> None:
    store = open_store(tmp_path / "j", JournalCounters())
    journal = GroupCommit(store, JournalState(), TokenLog(4, 1 << 12, journalled=True), on_tokens=lambda: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.run)
        await journal.append([accepted(0)]).wait()
        (tmp_path / "j").unlink()
        commit = journal.append([order(1)])
        with trio.fail_after(HANG_LIMIT_S):
            while not journal.failing:  # noqa: ASYNC110
                await trio.sleep(RETRY_S / 10)
        assert not commit.done, "what is not in the journal is not acknowledged"
        with pytest.raises(Unavailable, match=r"j: deleted while it was in use.*put it back"):
            check_writes(journal)
        nursery.cancel_scope.cancel()
    store.close()
    assert "all that was acknowledged" in refusal(tmp_path / "j")


def test_unwritable_mark_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "j") as store:
        store.write_now([accepted(1)])
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fail)
            group = [order(1)]
            for _ in range(2):
                with pytest.raises(JournalError, match=r"j\.head: it is broken"):
                    store.write_now(group)
        store.write_now(group)
        assert store.read() == [accepted(1), order(1)]


def fail(*arguments: object) -> int:
    raise OSError(5, "it is broken")


# ---------------------------------------------------------------- check and salvage


def hisparse(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["journal", *map(str, args)])


def read(path: Path) -> tuple[JournalState, TokenLog]:
    with opened(path) as store:
        log = TokenLog(8, 1 << 12, journalled=True)
        return replay(store.read(), log), log


def test_check_reports_a_whole_journal_and_changes_nothing(killed: Path) -> None:
    before = {file.name: file.read_bytes() for file in killed.parent.iterdir()}
    for command, words in (("check", "every acknowledged commit exists"), ("salvage", "nothing to do")):
        done = hisparse(command, killed)
        assert (done.exit_code, words in done.output) == (0, True), done.output
        assert "1 live requests, 1 ended ones, 5 tokens" in done.output
    assert {file.name: file.read_bytes() for file in killed.parent.iterdir()} == before


@pytest.mark.refuses("the journal is damaged")
def test_salvage_keeps_whole_records(killed: Path) -> None:
    change_token(killed, 7, 4)
    checked = hisparse("check", killed)
    assert checked.exit_code == 8
    assert "is not what was written" in checked.output
    assert "lost: request r0: tokens from position 2 on" in checked.output
    done = hisparse("salvage", killed)
    assert done.exit_code == 0, done.output
    (aside,) = killed.parent.glob("j.damaged-*")
    assert {file.name for file in aside.iterdir()} >= {"j", "j.head"}
    state, log = read(killed)
    assert np.frombuffer(log.tokens(0, 0), np.int32).tolist() == [5, 6]
    assert (state.requests[0].facts, state.requests[0].prompt) == (accepted(0).facts, accepted(0).prompt)
    assert state.requests[0].ordered == order(1)
    ended = state.requests[1].ended
    assert ended is not None
    assert (ended.generated_tokens, log.length(1)) == (1, 1)
    assert (state.arrivals, state.placements >= PLACEMENTS_SKIPPED) == (1, True)
    assert hisparse("check", killed).exit_code == 0


def test_salvage_names_lost_records(killed: Path) -> None:
    by_sql(killed, "UPDATE records SET digest = zeroblob(16) WHERE number IN (1, 5)")
    done = hisparse("salvage", killed)
    assert done.exit_code == 0, done.output
    assert "lost: the request of index 0: its submission is gone" in done.output
    assert "lost: request r1, which has ended: 0 of 1 tokens are left" in done.output
    assert read(killed)[0].requests == {}


def test_forgotten_request_is_not_lost(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as store:
        for group in ([accepted(3)], [said(3, 0, 1)], [RequestEnded(3, "FINISHED", "eos", 1, "", 1.0), forgotten(3)]):
            store.write_now(group)
        rows = store_rows(store)
    salvaged = rebuild(rows)
    assert (salvaged.lost, salvaged.live, salvaged.ended) == ((), 0, 0)


def store_rows(store: SqliteStore) -> list[StoredRecord]:
    return list(read_rows(store._connection, []))


@pytest.mark.parametrize("command", ["check", "salvage"])
def test_journal_in_use_or_absent_is_refused(tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.journal.files.LOCK_WAIT_S", 0.05)
    assert hisparse(command, tmp_path / "none").exit_code == 8
    with opened(tmp_path / "j"):
        done = hisparse(command, tmp_path / "j")
    assert (done.exit_code, "a coordinator has it open" in done.output) == (8, True), done.output
    (tmp_path / "old").write_bytes(b"SQLite format 3\0" + bytes(47) + b"\2" + bytes(4_032))
    (tmp_path / "old").chmod(0o600)
    done = hisparse(command, tmp_path / "old")
    assert (done.exit_code, "it has form 2, this hisparse uses form 6" in done.output) == (8, True), done.output
