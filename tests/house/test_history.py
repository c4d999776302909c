"""How many commits there are (tests.support.history), and which seeds follow from that."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import history
from tests.support.history import COMMITS_VARIABLE, SEEDS, count_commits, dealt, first_parent_commits, header, seeds_of


def git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", "-C", str(root), *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Four commits by first parent, and two on a branch that was merged."""
    root = tmp_path / "whole"
    root.mkdir()
    git(root, "init")
    for number in range(3):
        git(root, "commit", "--allow-empty", "-m", f"{number}")
    git(root, "checkout", "-b", "beside")
    for number in range(2):
        git(root, "commit", "--allow-empty", "-m", f"beside {number}")
    git(root, "checkout", "main")
    git(root, "merge", "--no-ff", "-m", "merge", "beside")
    return root


def test_commits_are_counted_along_first_parents(repository: Path) -> None:
    assert count_commits(repository) == 4


def test_shallow_clone_has_no_history(repository: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--depth", "1", f"file://{repository}", "shallow")
    assert count_commits(tmp_path / "shallow") is None


def test_folder_that_is_no_repository_of_its_own_has_no_history(repository: Path, tmp_path: Path) -> None:
    unpacked = repository / "unpacked"
    unpacked.mkdir()
    assert count_commits(unpacked) is None
    (tmp_path / "bare").mkdir()
    assert count_commits(tmp_path / "bare") is None


def test_machine_without_git_has_no_history(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert count_commits(repository) is None


def test_dealt_pairs_all_meet_within_as_many_commits_as_there_are_partners(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for commits in range(3):
        monkeypatch.setattr(history, "first_parent_commits", lambda commits=commits: commits)
        runs.append(dealt("abcd", (1, 2, 3)))
    assert runs[1] == [("a", 2), ("b", 3), ("c", 1), ("d", 2)]
    assert all([value for value, _ in run] == [*"abcd"] and {it for _, it in run} == {1, 2, 3} for run in runs)
    assert len({pair for run in runs for pair in run}) == 12


@pytest.mark.parametrize("counted", [None, 7])
def test_processes_of_a_run_take_what_the_first_one_counted(
    counted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMMITS_VARIABLE, "to be removed again")
    monkeypatch.delenv(COMMITS_VARIABLE)
    monkeypatch.setattr(history, "count_commits", lambda _: counted)
    assert first_parent_commits.__wrapped__() == counted
    monkeypatch.setattr(history, "count_commits", lambda _: 99)
    assert first_parent_commits.__wrapped__() == counted


def test_each_commit_has_seeds_of_its_own() -> None:
    assert [*seeds_of(None)] == [*seeds_of(0)] == [*range(SEEDS)]
    assert [*seeds_of(3), *seeds_of(4)] == [*range(3 * SEEDS, 5 * SEEDS)]
    assert [*seeds_of(3, 2), *seeds_of(4, 2)] == [6, 7, 8, 9]


def test_run_says_its_seeds_and_why_they_are_the_first_ones() -> None:
    assert header(961) == "seeds of the simulated cluster: 240250 to 240499 (961 commits)"
    assert header(None) == "seeds of the simulated cluster: 0 to 249 (no history, or a shallow clone)"
