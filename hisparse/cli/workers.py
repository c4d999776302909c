"""Commands on workers and host pools: list, drain, audit, release quarantine, stop the coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hisparse.cli.watch import list_rows, watch_option
from hisparse.console.options import deadline_option, output_option, with_config

if TYPE_CHECKING:
    from protocol.settings import Config


@click.command(short_help="List workers.")
@watch_option
@output_option
@with_config()
def workers(config: Config, interval_s: float | None, output: str) -> None:
    """List workers: state, running requests, free memory, step time, hit rate.

    GROUP is the name of a group and the worker's rank in it. While a rank is missing, no request is placed on the
    others. HOT FREE counts hot chunks, INDEX FREE index pages. HOT FLOOR is the smallest hot size that is given, and
    PREDICTED MS a step with it. A narrow terminal shows fewer columns; -o json has all.
    """
    from hisparse.console.output import share_text
    from hisparse.console.rows import floor_text, predicted_text, worker_state_text
    from hisparse.console.table import Column
    from protocol.messages import NOT_SEEN, WorkerRow

    columns: list[Column[WorkerRow]] = [
        Column("WORKER", lambda row: row.worker),
        Column("GROUP", lambda row: f"{row.group}/{row.rank}" if row.group else "-", goes=4),
        Column("NODE", lambda row: row.node, goes=6),
        Column("ROLE", lambda row: row.capacity.role, goes=7),
        Column("STATE", worker_state_text, least=24),
        Column("RUNNING", lambda row: str(row.running), True),
        Column("SEATS FREE", lambda row: f"{row.seats_free}/{row.capacity.seats}", True),
        Column("HOT FREE", lambda row: f"{row.hot_chunks_free}/{row.capacity.hot_chunks}", True, goes=3),
        Column("INDEX FREE", lambda row: f"{row.index_pages_free}/{row.capacity.index_pages}", True, goes=5),
        Column("STEPS", lambda row: str(row.steps), True, goes=8),
        Column("STEP MS", lambda row: f"{row.step_us / 1000:.2f}", True, goes=1),
        Column("PREDICTED MS", predicted_text, True, goes=10),
        Column("HOT FLOOR", floor_text, True, goes=11),
        Column("HIT RATE", lambda row: share_text(row.hits, row.hits + row.misses), True, goes=2),
        Column("ACK MS", lambda row: f"{row.command_ack_ms:.1f}", True, goes=9),
        Column("STANDBY", lambda row: row.standby or "-", goes=12),
        Column("LAST SEEN S", lambda row: "-" if row.link_age_s == NOT_SEEN else f"{row.link_age_s:.1f}", True),
    ]
    list_rows(config, lambda client: client.workers(), columns, output, interval_s)


@click.command(short_help="List host pools.")
@watch_option
@output_option
@with_config()
def pool(config: Config, interval_s: float | None, output: str) -> None:
    """List host pools: pages free, cached for reuse, owned, shared and quarantined.

    Since the coordinator's start: PREFIX HITS, the share of prompt tokens whose rows were reused, and EVICTED, cached
    pages that made room for others.
    """
    from hisparse.console.output import share_text, size_text
    from hisparse.console.table import Column
    from protocol.messages import PoolRow

    columns: list[Column[PoolRow]] = [
        Column("NODE", lambda row: row.node),
        Column("PAGES", lambda row: str(row.host_pages), True),
        Column("FREE", lambda row: str(row.free), True),
        Column("OWNED", lambda row: str(row.owned), True),
        Column("SHARED", lambda row: str(row.shared), True),
        Column("CACHED", lambda row: str(row.cached), True),
        Column("QUARANTINED", lambda row: str(row.quarantined), True),
        Column("PREFIX HITS", lambda row: share_text(row.prefix_reused_tokens, row.prefix_asked_tokens), True, goes=4),
        Column("EVICTED", lambda row: str(row.prefix_pages_evicted), True, goes=5),
        Column("PAGE", lambda row: size_text(row.page_bytes), True, goes=3),
        Column("SIZE", lambda row: size_text(row.page_bytes * row.host_pages), True, goes=1),
        Column("WORKERS", lambda row: " ".join(row.workers), goes=2, least=12),
    ]
    list_rows(config, lambda client: client.pools(), columns, output, interval_s)


@click.command(short_help="Stop placing requests on workers.")
@click.argument("names", nargs=-1, metavar="WORKER|GROUP...")
@click.option("--all", "every", is_flag=True, help="All workers.")
@click.option("--handover", is_flag=True, help="Move running requests to other workers of the node.")
@deadline_option(300.0, "When to retract requests that still run.")
@click.option("--wait", is_flag=True, help="Return when the workers are drained.")
@output_option
@with_config()
def drain(
    config: Config, output: str, names: tuple[str, ...], every: bool, handover: bool, deadline: float, wait: bool
) -> None:
    """Stop placing requests on workers and let theirs finish. The name of a group stands for all of its ranks.

    With --handover their requests move to other workers of the node at once, through the shared host pool; a request
    that fits none finishes in place. At the deadline the remaining ones are retracted and wait for capacity. Held
    requests do not block the drain.
    """
    from hisparse.console.session import run_command

    chosen = _chosen(names, every)
    run_command(config, "admin", output, lambda client: client.drain(chosen, handover=handover, deadline_s=deadline))
    if wait:
        from hisparse.console.session import wait_drained

        wait_drained(config, chosen, limit_s=deadline)


@click.command(short_help="Place requests on drained workers again.")
@click.argument("names", nargs=-1, metavar="WORKER|GROUP...")
@click.option("--all", "every", is_flag=True, help="All workers.")
@output_option
@with_config()
def undrain(config: Config, output: str, names: tuple[str, ...], every: bool) -> None:
    """Place requests on drained workers, or on all ranks of groups, again."""
    from hisparse.console.session import run_command

    chosen = _chosen(names, every)
    run_command(config, "admin", output, lambda client: client.undrain(chosen))


@click.command(short_help="Compare workers with the ledgers.")
@output_option
@with_config()
def audit(config: Config, output: str) -> int:
    """Compare the memory of every connected worker with its node's ledger, now, in two rounds; exit 1 on differences.

    The coordinator also audits periodically. It logs each difference with the history of its request, and repairs it
    if only one side still holds the memory.
    """
    from hisparse.console.options import EXIT_FAILED
    from hisparse.console.output import emit_one, print_table, write_line
    from hisparse.console.session import call
    from hisparse.console.table import Column
    from protocol.messages import AuditedRow, DifferenceRow

    found = call(config, "admin", lambda client: client.audit())
    if output != "table":
        emit_one({"audited": found.audited, "differences": found.differences}, output, ())
    else:
        audited: list[Column[AuditedRow]] = [
            Column("AUDITED", lambda row: row.name),
            Column("EPOCH", lambda row: str(row.epoch or "-")),
            Column("ANSWERED", lambda row: "yes" if row.answered else "NO"),
            Column("REQUESTS", lambda row: str(row.requests), True),
            Column("HOST PAGES", lambda row: str(row.host_pages), True),
            Column("DIFFERENCES", lambda row: str(row.differences), True),
        ]
        differences: list[Column[DifferenceRow]] = [
            Column("OF", lambda row: row.name),
            Column("KIND", lambda row: row.kind),
            Column("PLACEMENT", lambda row: str(row.placement or "-"), True),
            Column("REQUEST", lambda row: row.request_id or "-"),
            Column("LEDGER", lambda row: row.ledger),
            Column("WORKER", lambda row: row.worker),
            Column("REPAIRED", lambda row: "yes" if row.repaired else "no"),
        ]
        print_table(found.audited, audited)
        if found.differences:
            write_line("")
            print_table(found.differences, differences)
    return EXIT_FAILED if found.differences or not all(row.answered for row in found.audited) else 0


@click.command(name="release-quarantine", short_help="Vouch that a lost worker's process is gone.")
@click.argument("names", nargs=-1, required=True, metavar="WORKER...")
@click.option("--i-am-sure", "is_sure", is_flag=True, help="Its process is gone, or its machine is.")
@output_option
@with_config()
def release_quarantine(config: Config, output: str, names: tuple[str, ...], is_sure: bool) -> None:
    """Free the host pages that a lost worker might still write.

    Only for a worker whose process the coordinator cannot see (over tcp, or in another pid namespace); the exit of
    other processes is proved automatically. If the process still runs, it writes into pages that other requests own by
    then, and their outputs are wrong.
    """
    from hisparse.console.session import run_command

    if not is_sure:
        raise click.UsageError("check the machine, then pass --i-am-sure", click.get_current_context())
    run_command(config, "admin", output, lambda client: client.release_quarantine(names))


@click.command(short_help="List disconnected workers no longer.")
@click.argument("names", nargs=-1, required=True, metavar="WORKER|GROUP...")
@output_option
@with_config()
def forget(config: Config, output: str, names: tuple[str, ...]) -> None:
    """List disconnected workers no longer: all of the names, or none when one cannot be forgotten.

    Refused while a worker is connected, and while its process may still write host pages. A worker that comes back is
    listed again. `hisparse up` forgets the workers that it has given up.
    """
    from hisparse.console.session import run_command

    run_command(config, "admin", output, lambda client: client.forget(names))


@click.command(short_help="Drain the coordinator, then exit.")
@deadline_option(30.0, "How long requests may run on.")
@output_option
@with_config()
def stop(config: Config, output: str, deadline: float) -> None:
    """Drain the coordinator: refuse new requests, let running ones finish, then exit.

    Requests that have not finished at the deadline stay in the journal and resume at the next start; without a journal
    they fail. Held requests are not waited for.
    """
    from hisparse.console.session import run_command

    run_command(config, "admin", output, lambda client: client.stop(deadline_s=deadline))


def _chosen(names: tuple[str, ...], every: bool) -> tuple[str, ...]:
    """The names of the workers; an empty tuple stands for all, which needs --all."""
    if bool(names) == every:
        raise click.UsageError("name workers, or pass --all", click.get_current_context())
    return names
