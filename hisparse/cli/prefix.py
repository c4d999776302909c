"""`hisparse prefix`: the largest cached prefixes, and dropping them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hisparse.console.options import output_option, with_config

if TYPE_CHECKING:
    from protocol.messages import PrefixRow
    from protocol.settings import Config


@click.group(invoke_without_command=True, short_help="List or drop cached prefixes.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 1_000), help="Most rows.")
@output_option
@with_config()
@click.pass_context
def prefix(context: click.Context, config: Config, limit: int, output: str) -> None:
    """List the largest cached prefixes that no other continues; for admins.

    PAGES lead to the prefix, OWN of them to no other. OWNER may reuse it: the user of a key, and behind an HTTP front
    the owner of an API key; - is a deployment without keys. USE says whether requests hold its last page.
    """
    if context.invoked_subcommand is not None:
        return
    from hisparse.console.output import emit, note
    from hisparse.console.session import call
    from hisparse.console.table import Column

    columns: list[Column[PrefixRow]] = [
        Column("ID", lambda row: row.prefix_id),
        Column("NODE", lambda row: row.node, goes=2),
        Column("OWNER", lambda row: row.owner or "-", least=12),
        Column("SALTED", lambda row: "yes" if row.salted else "no", goes=1),
        Column("TOKENS", lambda row: str(row.tokens), True),
        Column("PAGES", lambda row: str(row.pages), True),
        Column("OWN", lambda row: str(row.own_pages), True),
        Column("USE", lambda row: "held" if row.in_use else "idle", goes=3),
    ]
    found = call(config, "admin", lambda client: client.prefixes(limit))
    emit(found.rows, columns, output)
    if found.prefixes > len(found.rows):
        note(f"{len(found.rows)} of {found.prefixes} cached prefixes; raise --limit")


@prefix.command(short_help="Forget cached prefixes.")
@click.argument("prefix_ids", nargs=-1, metavar="[ID]...")
@click.option("--owner", "owners", multiple=True, metavar="OWNER", help="All prefixes of this owner; repeatable.")
@click.option("--all", "every", is_flag=True, help="All prefixes.")
@output_option
@with_config()
def drop(config: Config, prefix_ids: tuple[str, ...], owners: tuple[str, ...], every: bool, output: str) -> None:
    """Forget cached prefixes: of each ID the pages that lead to no other prefix, or all of an owner.

    Requests keep the pages that they hold, and cache them again when they end.
    """
    from hisparse.console.session import run_command

    if bool(prefix_ids or owners) == every:
        raise click.UsageError("name prefixes, pass --owner, or pass --all", click.get_current_context())
    run_command(config, "admin", output, lambda client: client.drop_prefixes(prefix_ids, owners=owners))
