"""How far this repository's history goes, and which seeds of the simulated cluster are this commit's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from tests import ROOT

T = TypeVar("T")
U = TypeVar("U")

#: Seeds of the simulated cluster that one run of the suite takes; the next commit takes the ones behind them.
SEEDS: Final = 250
#: What the first process of a run has counted, for the processes that it starts: a decimal number, or nothing.
COMMITS_VARIABLE: Final = "TEST_RUN_COMMITS"


@cache
def first_parent_commits() -> int | None:
    """Commits from the root to HEAD along first parents; None without history, as in an archive or a shallow clone.

    All processes of a run have one answer, that of the process which asks before it starts the others.
    """
    known = os.environ.get(COMMITS_VARIABLE)
    if known is None:
        counted = count_commits(ROOT)
        os.environ[COMMITS_VARIABLE] = "" if counted is None else str(counted)
        return counted
    return int(known) if known else None


def count_commits(root: Path) -> int | None:
    """Return first_parent_commits of the repository whose top folder is `root`."""
    about = _git(root, "rev-parse", "--show-prefix", "--is-shallow-repository")
    if about != ["", "false"]:
        return None
    counted = _git(root, "rev-list", "--first-parent", "--count", "HEAD")
    return int(counted[0]) if counted else None


def seeds_of(commits: int | None, count: int = SEEDS) -> range:
    """`count` seeds for a commit that has `commits` up to it, other ones for each; the first ones without history."""
    start = count * (commits or 0)
    return range(start, start + count)


def in_turn(values: Sequence[T]) -> T:
    """Return this commit's of `values`; the next commit has the next one."""
    return values[(first_parent_commits() or 0) % len(values)]


def dealt(values: Sequence[T], partners: Sequence[U]) -> list[tuple[T, U]]:
    """Return each of `values` with one of `partners`; the next commit has each with the next one.

    All pairs come within len(partners) commits. Where there are as many values or more, each commit has all partners.
    """
    first = first_parent_commits() or 0
    return [(value, partners[(first + place) % len(partners)]) for place, value in enumerate(values)]


def header(commits: int | None) -> str:
    """The line that begins a run of the suite."""
    seeds = seeds_of(commits)
    why = "no history, or a shallow clone" if commits is None else f"{commits} commits"
    return f"seeds of the simulated cluster: {seeds[0]} to {seeds[-1]} ({why})"


def _git(root: Path, *arguments: str) -> list[str]:
    """Lines of what git says of `root`; none if git is missing or refuses."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
