"""Keys for tcp:// endpoints: see protocol/transport/keys.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hisparse.console.options import output_option, with_config

if TYPE_CHECKING:
    from protocol.settings import Config

role_argument = click.argument("role", type=click.Choice(["client", "admin", "worker"]))
name_argument = click.argument("name")


@click.group()
def keys() -> None:
    """Make, list and revoke the keys that tcp:// endpoints want.

    They lie in --keys-dir, mode 0600: server.key and allowed.keys are the coordinator's, which reads the list again on
    SIGHUP; each other file is for one peer.
    """


@keys.command(name="init")
@with_config()
def init(config: Config) -> None:
    """Make a server key, and one key each for a client, an admin and a worker."""
    from hisparse.console.output import write_line
    from protocol.transport.keys import make_keys

    for path in make_keys(_directory(config)):
        write_line(str(path))


@keys.command()
@role_argument
@name_argument
@click.option("--output", "path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Where to.")
@with_config()
def add(config: Config, role: str, name: str, path: Path | None) -> None:
    """Make and allow a key for NAME, beside those it has: requests belong to names.

    Its bearer puts the file into a directory of its own as ROLE.key.
    """
    from hisparse.console.output import note, write_line
    from protocol.transport.keys import add_peer

    write_line(str(add_peer(_directory(config), role, name, path)))
    note("send the coordinator SIGHUP to let it in")


@keys.command()
@role_argument
@name_argument
@click.option("--keep-newest", is_flag=True, help="Of several keys, keep the one made last.")
@with_config()
def revoke(config: Config, role: str, name: str, keep_newest: bool) -> None:
    """Take the keys of NAME off the list; on SIGHUP the coordinator hangs up on whoever lost one."""
    from hisparse.console.output import note, write_line
    from protocol.transport.keys import revoke as revoke_key

    count = revoke_key(_directory(config), role, name, keep_newest=keep_newest)
    write_line(f"{count} revoked")
    note("send the coordinator SIGHUP to shut it out")


@keys.command(name="list")
@output_option
@with_config()
def list_keys(config: Config, output: str) -> None:
    """List who may connect."""
    from hisparse.console.output import Column, print_table, write_json
    from protocol.transport.keys import AllowedKey, read_allowed

    allowed = read_allowed(_directory(config))
    if output == "table":
        columns: list[Column[AllowedKey]] = [
            Column("ROLE", lambda key: key.role),
            Column("NAME", lambda key: key.name),
            Column("PUBLIC KEY", lambda key: key.public),
        ]
        print_table(allowed, columns)
        return
    rows = [key._asdict() for key in allowed]
    for value in rows if output == "jsonl" else [rows]:
        write_json(value)


def _directory(config: Config) -> Path:
    if not config.cluster.keys_dir:
        raise click.UsageError("say where: --keys-dir DIRECTORY", click.get_current_context())
    return Path(config.cluster.keys_dir)
