"""Commands on requests: list, show one with its history, abort, retract, resume, resize."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hisparse.cli.watch import list_rows, watch_option
from hisparse.console.options import output_option, with_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hisparse.client.client import Client
    from protocol.messages import RequestDetail, RequestRow
    from protocol.settings import Config

#: Most rows that the coordinator gives: a listing by state chooses among them.
ROWS_ASKED = 20_000
#: Ended requests that a table shows, so that live ones are not pushed off the screen.
ENDED_SHOWN = 10

ids_argument = click.argument("request_ids", nargs=-1, required=True, metavar="ID...")


@click.command(short_help="List live and recently ended requests.")
@click.option("--live", "live_only", is_flag=True, help="Only requests that have not ended.")
@click.option("--state", "states", multiple=True, metavar="STATE", help="Only these, e.g. running or held; repeatable.")
@click.option("--limit", default=1_000, show_default=True, type=click.IntRange(1), help="Most rows.")
@watch_option
@output_option
@with_config()
def requests(
    config: Config, live_only: bool, states: tuple[str, ...], limit: int, interval_s: float | None, output: str
) -> None:
    """List live requests in rank order, then ended ones, latest first.

    A table shows at most 10 ended requests; --state finished, or -o json, lists all that are kept. AGE is the time
    since the submission, of an ended request until its end. REUSED counts prompt tokens that were not computed.
    HELD is RETRACTED until `hisparse resume`. A narrow terminal shows fewer columns; -o json has all.
    """
    from basics.request_states import HELD, TERMINAL, state_text
    from hisparse.console.output import duration_text, hot_text, note, rate_text
    from hisparse.console.rows import hit_share
    from hisparse.console.table import Column

    wanted = _states(states)
    if live_only and (ended := sorted(wanted & TERMINAL)):
        raise click.UsageError(f"--live lists no {ended[0].lower()} request: leave out one of --live and --state")
    told = ""
    columns: list[Column[RequestRow]] = [
        Column("ID", lambda row: row.request_id),
        Column("STATE", lambda row: state_text(row.state, row.held)),
        Column("PRIO", lambda row: str(row.priority), True, goes=5),
        Column("WORKER", lambda row: row.worker or "-"),
        Column("PROMPT", lambda row: str(row.prompt_tokens), True, goes=2),
        Column("REUSED", lambda row: str(row.prefix_tokens), True, goes=9),
        Column("GENERATED", lambda row: f"{row.generated_tokens}/{row.max_tokens}", True),
        Column("DURABLE", lambda row: str(row.durable_tokens), True, goes=8),
        Column("PAGES", lambda row: str(row.host_pages), True, goes=6),
        Column("HOT SLOTS", lambda row: hot_text(row.hot_slots), True, goes=4),
        Column("HIT RATE", lambda row: rate_text(hit_share(row)), True, goes=3),
        Column("RETRACTED", lambda row: str(row.retractions), True, goes=7),
        Column("AGE", lambda row: duration_text(row.age_s), True),
        Column("REASON", lambda row: row.reason, least=16, goes=1),
    ]

    if live_only or (wanted and not wanted & TERMINAL):
        ended_max = 0
    else:
        ended_max = ENDED_SHOWN if output == "table" and not wanted else ROWS_ASKED

    async def fetch(client: Client) -> list[RequestRow]:
        nonlocal told
        reply = await client.requests(ROWS_ASKED if wanted else limit)
        rows = [it for it in reply.rows if not wanted or it.state in wanted or (it.held and HELD in wanted)]
        shown, left_out = _shown(rows, limit, ended_max, truncated=reply.truncated)
        if left_out and left_out != told:
            note(left_out)
            told = left_out
        return shown

    list_rows(config, fetch, columns, output, interval_s)


def _shown(rows: Sequence[RequestRow], limit: int, ended_max: int, *, truncated: bool) -> tuple[list[RequestRow], str]:
    """`limit` of `rows`, at most `ended_max` of them ended, and what to say of those left out; "" when there are none.

    `truncated`: the coordinator left out rows that would follow.
    """
    from basics.request_states import TERMINAL

    live = [row for row in rows if row.state not in TERMINAL]
    ended = rows[len(live) :]
    few = [*live, *ended[:ended_max]]
    lacks_live = truncated and not ended and len(live) >= limit
    if len(few) > limit or lacks_live or (truncated and ended_max >= limit):
        return few[:limit], f"only the first {limit} requests; raise --limit"
    if ended_max and (len(ended) > ended_max or truncated):
        return few, f"only the latest {ended_max} ended requests; -o json has more"
    return few, ""


def _states(words: Iterable[str]) -> set[str]:
    from basics.request_states import HELD, State

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

    from basics.request_states import TERMINAL, state_text
    from hisparse.console.output import duration_text, hot_text, rate_text, times_text
    from hisparse.console.rows import count_text, draft_share, swap_text

    row = detail.row
    yield f"{row.request_id}  {state_text(row.state, row.held)}  {row.reason}".rstrip()
    reused = f" ({row.prefix_tokens} reused)" if row.prefix_tokens else ""
    yield f"  tokens    {row.prompt_tokens} prompt{reused}, {row.generated_tokens} of {row.max_tokens} generated"
    rows, chunks = count_text(row.durable_tokens, "row"), count_text(row.hot_chunks, "hot chunk")
    yield f"  memory    {count_text(row.host_pages, 'host page')}, {rows} durable, {chunks}"
    yield f"  hot slots {hot_text(row.hot_slots)} on {row.worker or 'no worker'}"
    yield f"  swap-in   {swap_text(row)}"
    if (share := draft_share(row)) is not None:
        yield f"  drafts    {row.drafted_tokens} verified, {row.accepted_tokens} accepted ({rate_text(share)})"
    age = f"{'took' if row.state in TERMINAL else 'age'}".ljust(10) + duration_text(row.age_s)
    yield f"  {age}, priority {row.priority}, retracted {times_text(row.retractions)}"
    for line in detail.history:
        moment = datetime.fromtimestamp(line.at_s).isoformat(sep=" ", timespec="milliseconds")
        yield f"  {moment}  {line.event:<12} {line.state:<11} {line.reason}".rstrip()


@click.command(short_help="End requests now.")
@ids_argument
@output_option
@with_config()
def abort(config: Config, output: str, request_ids: tuple[str, ...]) -> None:
    """End requests now: all of the ids, or none when one cannot be aborted."""
    from hisparse.console.session import run_command

    run_command(config, "client", output, lambda client: client.abort(request_ids))


@click.command(short_help="Take running requests off their workers.")
@ids_argument
@click.option("--keep/--drop", default=True, help="Keep host pages (resumes without prefill; default), or free them.")
@click.option(
    "--hold/--no-hold", default=True, help="Wait for `hisparse resume` (default), or resume when memory allows."
)
@output_option
@with_config()
def retract(config: Config, output: str, request_ids: tuple[str, ...], keep: bool, hold: bool) -> None:
    """Take running requests off their workers: all of the ids, or none."""
    from hisparse.console.session import run_command

    run_command(config, "admin", output, lambda client: client.retract(request_ids, keep=keep, hold=hold))


@click.command(short_help="Let held requests run again.")
@ids_argument
@output_option
@with_config()
def resume(config: Config, output: str, request_ids: tuple[str, ...]) -> None:
    """Let held requests run again: all of the ids, or none."""
    from hisparse.console.session import run_command

    run_command(config, "admin", output, lambda client: client.resume(request_ids))


@click.command(short_help="Force the hot sizes of running requests.")
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
