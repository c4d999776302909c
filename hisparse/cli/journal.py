"""`hisparse journal`: a coordinator's journal at rest, looked at and salvaged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from coordinator.journal.salvage import Check

#: Lines of a list that are printed.
LINES_MAX: Final = 100

path_argument = click.argument("path", type=click.Path(path_type=Path))


@click.group(short_help="Check or salvage a journal.")
def journal() -> None:
    """Check or salvage a journal whose coordinator is stopped.

    PATH is the file that coordinator.journal names; what lies beside it under its name belongs to it.
    """


@journal.command()
@path_argument
def check(path: Path) -> None:
    """Read all of the journal at PATH and say what is wrong with it, what is lost and what could be kept.

    Changes nothing. Exit code 8 when it is damaged, or none of this version.
    """
    from coordinator.journal.salvage import check as check_journal
    from hisparse.console.output import write_line
    from protocol.errors import ConfigError

    found = check_journal(path)
    _print(path, found)
    if found.damages:
        raise ConfigError(
            "the journal is damaged",
            field="coordinator.journal",
            value=path,
            remedy=f"restore a backup of all its files, or keep what is whole: hisparse journal salvage {path}",
        )
    write_line("whole: all that was acknowledged is there")


@journal.command()
@path_argument
def salvage(path: Path) -> None:
    """Replace a damaged journal by what of it is whole.

    Requests whose submission is whole stay, with their tokens up to the first that is gone; those that had not ended
    run again from there. The damaged files are moved into a directory beside it. A journal that is whole stays as
    it is.
    """
    from coordinator.journal.salvage import salvage as salvage_journal
    from hisparse.console.output import write_line

    found, aside = salvage_journal(path)
    _print(path, found)
    if aside is None:
        write_line("whole: nothing to do")
    else:
        write_line(f"salvaged; the damaged files are in {aside}")


def _print(path: Path, found: Check) -> None:
    from hisparse.console.output import write_line

    kept, commits = found.salvaged, found.head.commits if found.head else 0
    write_line(f"{path}: {commits} commits are read")
    for title, lines in (("damaged", found.damages), ("lost", kept.lost)):
        for line in lines[:LINES_MAX]:
            write_line(f"{title}: {line}")
        if len(lines) > LINES_MAX:
            write_line(f"{title}: {len(lines) - LINES_MAX} more")
    what = "left" if found.damages else "there"
    write_line(f"{what}: {kept.live} live requests, {kept.ended} ended ones, {kept.tokens} tokens")
