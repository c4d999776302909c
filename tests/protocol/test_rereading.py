"""What a reload of files says, and what it changes when a file cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.rereading import FileState, ReloadableFiles, change_text, state_of

A, B = FileState(1, 10, b"a"), FileState(1, 11, b"b")


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ([A], [A], "unchanged: the same file (inode 10) and content as before"),
        ([A], [FileState(1, 12, b"a")], "the same content in another file (inode 12)"),
        ([A], [FileState(2, 10, b"a")], "the same content in another file (inode 10)"),
        ([A], [FileState(1, 10, b"z")], "changed"),
        ([A, B], [A, FileState(1, 11, b"z")], "changed"),
        ([A, B], [A, B], "unchanged: the same file (inode 10, 11) and content as before"),
    ],
)
def test_three_outcomes_are_told_apart(before: list[FileState], after: list[FileState], text: str) -> None:
    assert change_text(before, after) == text


def test_file_that_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("good")
    used: list[str] = []

    def read() -> str:
        if path.read_text() == "bad":
            raise ConfigError("no list", field="list", value=path)
        used.append(path.read_text())
        return f"{len(used)} in use"

    files = ReloadableFiles("the list", [path], read)
    path.write_text("bad")
    with pytest.raises(ConfigError, match="no list"):
        files.reload()
    path.write_text("good")
    assert files.reload().startswith("the list: unchanged"), "compared with what is in use, not with the bad one"
    path.write_text("better")
    assert files.reload() == "the list: changed; 2 in use"
    assert files.reload().startswith("the list: unchanged")
    path.unlink()
    with pytest.raises(ConfigError, match=r"file=.*list: cannot be read: No such file"):
        files.reload()
    assert used == ["good", "better", "better"]


def test_only_files_that_can_be_read_have_a_state(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        state_of(tmp_path / "missing")
