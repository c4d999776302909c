"""Listings, once or repeated until Ctrl-C (`--watch`), across restarts of the coordinator.

table on a terminal   drawn in place
table elsewhere       a table, a blank line, the next table
json                  one array per query, each on one line
jsonl                 one object per row, and again when another field than an age has changed: for pipes
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import click

if TYPE_CHECKING:
    from rich.live import Live

    from hisparse.client.client import Client
    from hisparse.console.table import Column
    from protocol.settings import Config

Row = TypeVar("Row")
Fetch = Callable[["Client"], Awaitable[Sequence[Row]]]
#: Fields that differ in every query.
AGES: Final = frozenset({"age_s", "link_age_s"})

watch_option = click.option(
    "-w",
    "--watch",
    "interval_s",
    is_flag=False,
    flag_value=1.0,
    type=click.FloatRange(0.1, 3600),
    metavar="[SECONDS]",
    help="List again every SECONDS (default 1) until Ctrl-C.",
)


def list_rows(
    config: Config, fetch: Fetch[Row], columns: Sequence[Column[Row]], output: str, interval_s: float | None
) -> None:
    """Print the rows of `fetch`, once or, with `interval_s`, until interrupted.

    Raises HiSparseError when no coordinator answers, unless repeated.
    """
    if interval_s is None:
        from hisparse.console.output import emit
        from hisparse.console.session import call

        emit(call(config, "client", fetch), columns, output)
        return
    import trio

    with ListingWatch(columns, output) as watch:
        trio.run(_watch, config, fetch, watch, interval_s)


async def _watch(config: Config, fetch: Fetch[Row], watch: ListingWatch[Row], interval_s: float) -> None:
    import trio

    from hisparse.client.polling import keep_looking
    from hisparse.console.session import connected

    async def look(client: Client) -> None:
        watch.show(await fetch(client))

    connect = partial(connected, config, "client", reconnect_limit_s=0)
    await keep_looking(connect, look, watch.lost, partial(trio.sleep, interval_s))


class ListingWatch(ExitStack, Generic[Row]):
    """Shows rows of repeated queries. Inside the block a table on a terminal is drawn in place; the last one stays."""

    def __init__(self, columns: Sequence[Column[Row]], output: str) -> None:
        super().__init__()
        self._columns = columns
        self._output = output
        self._shown: dict[str, Any] = {}
        self._live: Live | None = None
        self._why_lost = ""

    def __enter__(self) -> ListingWatch[Row]:
        if self._output == "table" and sys.stdout.isatty():
            from rich.live import Live

            from hisparse.console.output import console

            self._live = self.enter_context(Live(console=console(), auto_refresh=False))
        return self

    def show(self, rows: Sequence[Row]) -> None:
        from hisparse.console.output import plain, print_table, write_json, write_line

        self._why_lost = ""
        if self._live is not None:
            self._draw(self._live, rows)
        elif self._output == "table":
            print_table(rows, self._columns)
            write_line("")
        elif self._output == "json":
            write_json([plain(row) for row in rows])
        else:
            for row in self._changed([plain(row) for row in rows]):
                write_json(row)
        sys.stdout.flush()

    def _draw(self, live: Live, rows: Sequence[Row]) -> None:
        from rich.text import Text

        from hisparse.console.table import table_lines

        lines = table_lines(rows, self._columns, live.console.width)
        live.update(Text("\n".join(lines), no_wrap=True, overflow="crop"), refresh=True)

    def lost(self, why: str) -> None:
        """No coordinator answers; prints each reason once."""
        from hisparse.console.output import note

        if why != self._why_lost:
            note(f"hisparse: {why}; trying again")
        self._why_lost = why

    def _changed(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows that differ from the row last shown with the same name; the name is a row's first field."""
        before, self._shown = self._shown, {}
        changed = []
        for row in rows:
            name, news = str(next(iter(row.values()))), {k: v for k, v in row.items() if k not in AGES}
            if before.get(name) != news:
                changed.append(row)
            self._shown[name] = news
        return changed
