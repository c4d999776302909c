"""`hisparse journal`: check and salvage the journal of a stopped coordinator."""

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

    PATH is the file that coordinator.journal names. Files beside it whose names begin with its name belong to it.
    """


@journal.command(short_help="Report damages, lost requests, and what a salvage would keep.")
@path_argument
def check(path: Path) -> None:
    """Read the whole journal at PATH and report damages, lost requests, and what a salvage would keep.

    Changes nothing. Exit code 8 when the journal is damaged or of another version.
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
            remedy=f"restore a backup of all its files, or keep whole requests: hisparse journal salvage {path}",
        )
    write_line("whole: every acknowledged commit exists")


@journal.command()
@path_argument
def salvage(path: Path) -> None:
    """Replace a damaged journal by one with its whole requests.

    A request is kept if its submission is whole, with its tokens up to the first lost one; if it had not ended, it
    runs on from there. The damaged files are moved into a directory beside the journal. A whole journal is not changed.
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
    write_line(f"{path}: {commits} commits read")
    for title, lines in (("damaged", found.damages), ("lost", kept.lost)):
        for line in lines[:LINES_MAX]:
            write_line(f"{title}: {line}")
        if len(lines) > LINES_MAX:
            write_line(f"{title}: {len(lines) - LINES_MAX} more")
    what = "left" if found.damages else "there"
    write_line(f"{what}: {kept.live} live requests, {kept.ended} ended ones, {kept.tokens} tokens")
