"""`hisparse top`: see hisparse/top."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hisparse.console.options import with_config

if TYPE_CHECKING:
    from protocol.settings import Config


@click.command(short_help="Watch and operate, full screen.")
@click.option(
    "--interval",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.2, 60),
    metavar="SECONDS",
    help="How often to look.",
)
@click.option("--limit", default=1_000, show_default=True, type=click.IntRange(1), help="Most requests to look at.")
@with_config()
def top(config: Config, interval: float, limit: int) -> None:
    """Watch workers, host pools and requests, and retract, resume, abort or drain what is selected.

    It outlives restarts of the coordinator. Looking needs the client endpoint, acting the admin endpoint. ? lists keys.
    """
    from hisparse.top.run import run_top

    run_top(config, interval, limit)
