"""`hisparse reload`: files of keys and certificates are read again, without a restart and without a signal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hisparse.console.options import output_option, with_config

if TYPE_CHECKING:
    from protocol.settings import Config


@click.command(short_help="Read files of keys and certificates again.")
@click.argument("process", type=click.Choice(["coordinator", "http"]))
@output_option
@with_config()
def reload(config: Config, process: str, output: str) -> int:
    """Make a running process read its files again, and say what it found.

    coordinator: the list of allowed keys, through its admin endpoint. http: API keys and TLS files of every HTTP front
    of this user whose runtime directory is the same. Files that cannot be read change nothing (exit 1 or 8).

    `unchanged` names a file that is the very one that was read before. A container that mounts a single file keeps it
    when the host replaces it: mount its directory.
    """
    from hisparse.console.options import EXIT_FAILED
    from hisparse.console.output import emit_one
    from hisparse.console.session import run_command

    if process == "coordinator":
        run_command(config, "admin", output, lambda client: client.reload_keys())
        return 0
    from hisparse.http.server.control import reload_fronts

    answers = reload_fronts(config.cluster.runtime_dir)
    lines = [f"{front}: {line}" for front, it in answers.items() for line in it.lines]
    errors = [f"{front}: not read: {error}" for front, it in answers.items() for error in it.errors]
    emit_one({"read": lines, "not_read": errors}, output, (*lines, *errors))
    return EXIT_FAILED if errors else 0
