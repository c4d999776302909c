"""`hisparse keys`: keys for tcp:// endpoints, see protocol/transport/keys.py."""

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
    """Make, list and revoke the keys of tcp:// endpoints.

    The files are in --keys-dir, mode 0600. server.key and allowed.keys belong to the coordinator, which reads
    allowed.keys again on `hisparse reload coordinator`, or SIGHUP. Each other file is for one peer.
    """


@keys.command(name="init", short_help="Make a server key, and keys for a client, an admin, a worker.")
@with_config()
def init(config: Config) -> None:
    """Make a server key, and a key for a client, for an admin and for a worker."""
    from hisparse.console.output import write_line
    from protocol.transport.keys import make_keys

    for path in make_keys(_directory(config)):
        write_line(str(path))


@keys.command()
@role_argument
@name_argument
@click.option(
    "--output", "path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="File to write."
)
@click.option(
    "--priority", "priority_max", type=int, metavar="N", help="Highest priority that a client may ask for, else 0."
)
@click.option("--front", "is_front", is_flag=True, help="A client that is an HTTP front: it limits its users itself.")
@with_config()
def add(config: Config, role: str, name: str, path: Path | None, priority_max: int | None, is_front: bool) -> None:
    """Make and allow a further key for NAME. Requests belong to the name, not to the key.

    The peer needs the file as ROLE.key in its --keys-dir. A further key of a client has the rights of the one before,
    unless --priority or --front say otherwise.
    """
    from hisparse.console.output import note, write_line
    from protocol.transport.keys import add_peer

    made = add_peer(_directory(config), role, name, path, priority_max=priority_max, is_front=is_front)
    write_line(str(made))
    note("to allow it: hisparse reload coordinator")


@keys.command(short_help="Remove the keys of NAME from allowed.keys.")
@role_argument
@name_argument
@click.option("--keep-newest", is_flag=True, help="Of several keys, keep the one made last.")
@with_config()
def revoke(config: Config, role: str, name: str, keep_newest: bool) -> None:
    """Remove the keys of NAME from allowed.keys; at a reload the coordinator ends the connections of NAME."""
    from hisparse.console.output import note, write_line
    from protocol.transport.keys import revoke as revoke_key

    count = revoke_key(_directory(config), role, name, keep_newest=keep_newest)
    write_line(f"{count} revoked")
    note("to end its connections: hisparse reload coordinator")


@keys.command(name="list")
@output_option
@with_config()
def list_keys(config: Config, output: str) -> None:
    """List the allowed keys."""
    from hisparse.console.output import print_table, write_json
    from hisparse.console.table import Column
    from protocol.transport.keys import AllowedKey, read_allowed

    allowed = read_allowed(_directory(config))
    if output == "table":
        columns: list[Column[AllowedKey]] = [
            Column("ROLE", lambda key: key.role),
            Column("NAME", lambda key: key.name),
            Column("PUBLIC KEY", lambda key: key.public),
            Column("PRIORITY", lambda key: str(key.priority_max) if key.role == "client" else "", True),
            Column("FRONT", lambda key: "yes" if key.is_front else ""),
        ]
        print_table(allowed, columns)
        return
    rows = [key._asdict() for key in allowed]
    for value in rows if output == "jsonl" else [rows]:
        write_json(value)


def _directory(config: Config) -> Path:
    if not config.cluster.keys_dir:
        raise click.UsageError("no directory of keys: give --keys-dir DIRECTORY", click.get_current_context())
    return Path(config.cluster.keys_dir)
