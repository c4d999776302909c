"""Commands on requests: list, show one with its history, abort, retract, resume, resize."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hisparse.cli.watch import list_rows, watch_option
from hisparse.console.options import output_option, with_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hisparse.client.client import Client
    from protocol.messages import RequestDetail
    from protocol.settings import Config

#: Accepted by --state beside the states: requests that wait for `hisparse resume`.
HELD = "HELD"

ids_argument = click.argument("request_ids", nargs=-1, required=True, metavar="ID...")


@click.command()
@click.option("--state", "states", multiple=True, metavar="STATE", help="Only these, e.g. running or held; repeatable.")
@click.option("--limit", default=1_000, show_default=True, type=click.IntRange(1), help="Most rows.")
@watch_option
@output_option
@with_config()
def requests(config: Config, states: tuple[str, ...], limit: int, interval_s: float | None, output: str) -> None:
    """List live and recently ended requests."""
    from hisparse.console.output import Column, duration_text, hit_rate_text, hot_text, note
    from protocol.messages import RequestRow

    wanted, is_noted = _states(states), False
    columns: list[Column[RequestRow]] = [
        Column("ID", lambda row: row.request_id),
        Column("STATE", lambda row: row.state + (" held" if row.held else "")),
        Column("PRIO", lambda row: str(row.priority), True),
        Column("WORKER", lambda row: row.worker or "-"),
        Column("PROMPT", lambda row: str(row.prompt_tokens), True),
        Column("GENERATED", lambda row: f"{row.generated_tokens}/{row.max_tokens}", True),
        Column("DURABLE", lambda row: str(row.durable_tokens), True),
        Column("PAGES", lambda row: str(row.host_pages), True),
        Column("HOT SLOTS", lambda row: hot_text(row.hot_slots), True),
        Column("HIT RATE", hit_rate_text, True),
        Column("RETRACTED", lambda row: str(row.retractions), True),
        Column("AGE", lambda row: duration_text(row.age_s), True),
        Column("REASON", lambda row: row.reason),
    ]

    async def fetch(client: Client) -> list[RequestRow]:
        nonlocal is_noted
        reply = await client.requests(limit)
        if reply.truncated and not is_noted:
            note(f"only the first {limit} requests; raise --limit")
            is_noted = True
        return [row for row in reply.rows if not wanted or row.state in wanted or (row.held and HELD in wanted)]

    list_rows(config, fetch, columns, output, interval_s)


def _states(words: Iterable[str]) -> set[str]:
    from coordinator.scheduling.lifecycle import State

    wanted = {word.upper() for word in words}
    if unknown := sorted(wanted - {*State, HELD}):
        known = ", ".join([*State, HELD]).lower()
        raise click.BadParameter(f"{unknown[0].lower()!r} is none of {known}", param_hint="--state")
    return wanted


@click.command(short_help="Show one request and its history.")
@click.argument("request_id", metavar="ID")
@output_option
@with_config()
def request(config: Config, request_id: str, output: str) -> None:
    """Show one request with its history: every transition with time and reason, hit rate, pages."""
    from hisparse.console.output import emit_one
    from hisparse.console.session import call

    detail = call(config, "client", lambda client: client.request(request_id))
    emit_one({"request": detail.row, "history": detail.history}, output, _history_lines(detail))


def _history_lines(detail: RequestDetail) -> Iterator[str]:
    from datetime import datetime

    from hisparse.console.output import duration_text, hit_rate_text, hot_text, times_text

    row = detail.row
    yield f"{row.request_id}  {row.state}{' (held)' if row.held else ''}  {row.reason}".rstrip()
    yield f"  tokens    {row.prompt_tokens} prompt, {row.generated_tokens} of {row.max_tokens} generated"
    yield f"  memory    {row.host_pages} host pages, {row.durable_tokens} rows durable, {row.hot_chunks} hot chunks"
    yield f"  hot slots {hot_text(row.hot_slots)} on {row.worker or 'no worker'}"
    found = f"{hit_rate_text(row)} hits ({row.hits} hits, {row.misses} misses)" if row.hits + row.misses else "none yet"
    yield f"  swap-in   {found}"
    yield f"  age       {duration_text(row.age_s)}, priority {row.priority}, retracted {times_text(row.retractions)}"
    for line in detail.history:
        moment = datetime.fromtimestamp(line.at_s).isoformat(sep=" ", timespec="milliseconds")
        yield f"  {moment}  {line.event:<12} {line.state:<11} {line.reason}".rstrip()


@click.command()
@ids_argument
@output_option
@with_config()
def abort(config: Config, output: str, request_ids: tuple[str, ...]) -> None:
    """End requests now: all of the ids, or none when one cannot be aborted."""
    from hisparse.console.session import run_command

    run_command(config, "client", output, lambda client: client.abort(request_ids))


@click.command()
@ids_argument
@click.option("--keep/--drop", default=True, help="Keep host pages (resumes without prefill), or free them.")
@click.option("--hold/--no-hold", default=True, help="Wait for `hisparse resume`, or resume when memory allows.")
@output_option
@with_config()
def retract(config: Config, output: str, request_ids: tuple[str, ...], keep: bool, hold: bool) -> None:
    """Take running requests off their workers: all of the ids, or none."""
    from hisparse.console.session import run_command

    run_command(config, "admin", output, lambda client: client.retract(request_ids, keep=keep, hold=hold))


@click.command()
@ids_argument
@output_option
@with_config()
def resume(config: Config, output: str, request_ids: tuple[str, ...]) -> None:
    """Let held requests run again: all of the ids, or none."""
    from hisparse.console.session import run_command

    run_command(config, "admin", output, lambda client: client.resume(request_ids))


@click.command()
@ids_argument
@click.option(
    "--hot-slots",
    required=True,
    metavar="SLOTS|resident|auto",
    help="A size class of the worker; resident; or auto: the policy decides again.",
)
@output_option
@with_config()
def resize(config: Config, output: str, request_ids: tuple[str, ...], hot_slots: str) -> None:
    """Force the hot sizes of running requests: all of the ids, or none."""
    from hisparse.console.session import run_command

    slots = _slots(hot_slots)
    run_command(config, "admin", output, lambda client: client.resize(request_ids, slots))


def _slots(text: str) -> int:
    named = {"resident": 0, "auto": -1}
    if text in named:
        return named[text]
    if not text.isdecimal() or int(text) == 0:
        raise click.BadParameter(f"{text!r} is not a number of slots, resident or auto", param_hint="--hot-slots")
    return int(text)
