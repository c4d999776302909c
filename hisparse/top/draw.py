"""A screen as lines of text: exactly `height` of them, none wider than `width`.

    head        the cluster and the connection to it
    pools       a line per node: host pages
    workers     at most a quarter of the height, around the selected one
    requests    the remaining height, around the selected one; or the history of one; or the keys
    foot        keys, a question that waits for an answer, or a notice

Text is ASCII except for names, so that it looks the same in any locale. Control characters are replaced, because names
and reasons come from other users. The selected row is also marked by a character, for terminals without reverse video.
Columns that do not fit a narrow terminal are left out, the least important first; names are cut in their middle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from textwrap import wrap
from typing import Final, TypeVar

from rich.cells import cell_len
from rich.text import Text

from basics.request_states import HELD, state_text
from hisparse.console.output import duration_text, hot_text, size_text
from hisparse.console.rows import draft_share, floor_text, hit_share, predicted_text
from hisparse.console.table import Column, clean, fit_cell, lay_out
from hisparse.top.screen import ENDED, ORDERS, STATES, Mode, Screen
from protocol.messages import NOT_SEEN, PoolRow, RequestDetail, RequestRow, WorkerRow

WIDTH_MIN: Final = 60
HEIGHT_MIN: Final = 12
POOLS_MAX: Final = 3
BAR_CELLS: Final = 20
#: Age from which on the head shows the age of the rows.
STALE_S: Final = 3.0
#: Shares of memory in use from which on they are highlighted.
BUSY: Final = 0.8
FULL: Final = 0.95

KEYS: Final = "r retract R resume a abort  d drain D undrain  s sort / find Tab  ? help q quit"
HELP: Final = (
    "up down j k, PgUp PgDn, Home End   select           Tab     workers or requests",
    "r   retract: leave the worker, keep host pages, wait for R",
    "R   resume a held request                           a       abort",
    "d   drain a worker with handover                    D       undrain",
    "Enter   the history of a request                      Esc     back; no filter",
    f"s   sort by {', '.join(ORDERS)}",
    "S   reverse the order                               e       show ended requests",
    "/   find: part of an id, a state, a worker, held    q       quit",
    "",
    "r R a d D ask first: y confirms, any other key cancels.",
    "Workers: TOK/S, HIT, H2D/S (bytes of swap-in) over 5 s. HOT, INDX, HOST: shares in use.",
    "PROMPT/S: prompt tokens, over 5 s. PROMPTS: those that wait or are under way, age of the oldest.",
    "FLOOR: smallest hot size that is given. PRED MS: a step there, as predicted.",
    "Requests: HIT since submission, a dash for a resident one. AGE of an ended one: until its end.",
    "DRAFTS: share of verified drafts that are in the output.  HELD: a retracted request that waits for R.",
)

MARK: Final = ">"
RUNNING: Final = "RUNNING"
#: Hit rate of a worker below which it is highlighted.
HIT_LOW: Final = 0.5
#: Age of the oldest waiting prompt of a worker from which it is highlighted.
PROMPT_WAIT_LONG_S: Final = 60.0
STYLES: Final = {
    **{"connected": "green", "draining": "yellow", "drained": "cyan", "disconnected": "bold red"},
    **{
        "RUNNING": "green",
        "RETRACTING": "yellow",
        "RETRACTED": "yellow",
        HELD: "bold yellow",
        "ABORTED": "red",
        "FAILED": "bold red",
    },
}

Row = TypeVar("Row")


def draw(screen: Screen, width: int, height: int, now: float) -> list[Text]:
    """The lines of `screen` at `now`, the clock that its samples were taken by."""
    if width < WIDTH_MIN or height < HEIGHT_MIN:
        small = f"{width}x{height} is too small: {WIDTH_MIN}x{HEIGHT_MIN} at least"
        return [_fit(Text(small), width), *(Text() for _ in range(height - 1))]
    lines = [_head(screen, width, now), *_pools(screen, width), *_workers(screen, width, max(1, height // 4))]
    room = height - len(lines) - 1
    if screen.mode is Mode.HELP:
        lines += [_fit(Text(line), width) for line in HELP[:room]]
    elif screen.history.latest is None:
        lines += [_fit(Text(f" {line}"), width) for line in wrap(clean(screen.lost), width - 2)[:room]]
    elif screen.history_id:
        lines += _history(screen, width, room)
    else:
        lines += _requests(screen, width, room)
    lines += [Text()] * (height - 1 - len(lines))
    return [*lines, _foot(screen, width)]


def page_rows(height: int) -> int:
    """Approximate number of rows of a page."""
    return max(1, height // 2)


# ---------------------------------------------------------------- parts


def _head(screen: Screen, width: int, now: float) -> Text:
    sample = screen.history.latest
    name = f" hisparse top  {clean(sample.model) or 'no model yet'}  " if sample else " hisparse top  "
    if screen.lost:
        since = f" for {duration_text(now - screen.lost_at_s)}" if sample else ""
        return _fit(Text(f"{name}DISCONNECTED{since}, trying again: {clean(screen.lost)}"), width, "bold white on red")
    assert sample is not None
    states = [row.state for row in sample.workers]
    there = f"{len(states) - states.count('disconnected')} of {len(states)} workers"
    stale = now - sample.at_s
    age = f", nothing new for {duration_text(stale)}" if stale > STALE_S else ""
    return _fit(Text(f"{name}connected{age}  {there}  incarnation {sample.incarnation}"), width, "reverse")


def _pools(screen: Screen, width: int) -> list[Text]:
    sample = screen.history.latest
    pools = sample.pools if sample else ()
    lines = [_fit(_pool(row, width), width) for row in pools[:POOLS_MAX]]
    return lines + ([Text(f" and {len(pools) - POOLS_MAX} nodes more")] if len(pools) > POOLS_MAX else [])


def _pool(row: PoolRow, width: int) -> Text:
    """The bar has what the numbers leave of the width."""
    used = 1 - row.free / row.host_pages if row.host_pages else 0.0
    name = f" {_node(row.node)} host "
    amounts = f" {_percent(used)} of {size_text(row.host_pages * row.page_bytes)}"
    pages = f"  pages: {row.free} free, {row.owned} owned, {row.shared} shared"
    quarantined = f", {row.quarantined} quarantined" if row.quarantined else ""
    cells = max(0, min(BAR_CELLS, width - cell_len(name + amounts + pages + quarantined)))
    filled = round(cells * used)
    bar = ("#" * filled, _load_style(used) or "green")
    return Text.assemble(name, bar, "." * (cells - filled), amounts, pages, (quarantined, "bold yellow"))


def _worker_state(row: WorkerRow) -> str:
    """A cell is short: of a group the first missing rank, or the awaited worker."""
    if row.state != "disconnected" and row.ranks_missing:
        more = "+" if len(row.ranks_missing) > 1 else ""
        return f"no rank {row.ranks_missing[0]}{more}"
    return f"for {row.awaits}" if row.state != "disconnected" and row.awaits else row.state


def _worker_style(row: WorkerRow) -> str:
    return "yellow" if _worker_state(row) != row.state else STYLES.get(row.state, "")


def _workers(screen: Screen, width: int, rows_max: int) -> list[Text]:
    rows, rates = screen.workers(), screen.history.worker_rates()
    sample = screen.history.latest
    host = {pool.node: 1 - pool.free / (pool.host_pages or 1) for pool in sample.pools} if sample else {}

    def swapped(row: WorkerRow) -> str:
        return _compact(rates[row.worker].swapped_bytes_per_s) if row.worker in rates else "-"

    def speed(row: WorkerRow) -> str:
        return f"{rates[row.worker].tokens_per_s:.0f}" if row.worker in rates else "-"

    def prompt_speed(row: WorkerRow) -> str:
        return f"{rates[row.worker].prompt_tokens_per_s:.0f}" if row.worker in rates else "-"

    def hits(row: WorkerRow) -> float | None:
        return rates[row.worker].hit_share if row.worker in rates else None

    def full(row: WorkerRow) -> float:
        return host.get(row.node, 0)

    prompts: list[Column[WorkerRow]] = []
    if any(row.prompt_tokens or row.prompts_waiting for row in rows):
        prompts = [
            Column("PROMPT/S", prompt_speed, True, goes=8, steady=8),
            Column("PROMPTS", _prompts, True, goes=9, steady=7, style=_prompts_style),
        ]
    standbys: list[Column[WorkerRow]] = []
    if any(row.standby for row in rows):
        standbys = [Column("STANDBY", lambda row: row.standby or "-", goes=13, steady=7)]
    columns: list[Column[WorkerRow]] = [
        Column("WORKER", lambda row: row.worker, least=8, steady=8, cuts_middle=True),
        Column("STATE", _worker_state, least=12, steady=12, style=_worker_style),
        Column("GROUP", lambda row: f"{row.group}/{row.rank}" if row.group else "-", goes=9, least=8, steady=8),
        Column("RUN", lambda row: f"{row.running}/{row.capacity.seats}", True, steady=7),
        Column("HOT", lambda row: _percent(_hot(row)), True, goes=5, steady=4),
        Column(
            "INDX", lambda row: _percent(_index(row)), True, 6, steady=4, style=lambda row: _load_style(_index(row))
        ),
        Column("HOST", lambda row: _percent(full(row)), True, 4, 0, 4, style=lambda row: _load_style(full(row))),
        Column("STEP MS", lambda row: f"{row.step_us / 1000:.1f}", True, goes=7, steady=7),
        Column("TOK/S", speed, True, goes=1, steady=6),
        *prompts,
        Column("HIT", lambda row: _hit(hits(row)), True, 3, steady=4, style=lambda row: _hit_style(hits(row))),
        Column("H2D/S", swapped, True, goes=2, steady=6),
        Column("ACK MS", lambda row: f"{row.command_ack_ms:.1f}", True, goes=10, steady=6),
        Column("ROLE", lambda row: row.capacity.role, goes=11, steady=7),
        *standbys,
        Column("NODE", lambda row: row.node, goes=12, least=12, steady=12, cuts_middle=True),
        Column("SEEN", _seen, True, goes=8, steady=5),
    ]
    if any(row.hot_sizing for row in rows):
        columns += [
            Column("FLOOR", floor_text, True, goes=13, steady=8),
            Column("PRED MS", predicted_text, True, goes=14, steady=7),
        ]
    selected = screen.selected(of_workers=True) if screen.focus_workers else ""
    return _table(rows, columns, lambda row: row.worker, selected, width, rows_max)


def _requests(screen: Screen, width: int, rows_max: int) -> list[Text]:
    rates = screen.history.request_rates()

    def speed(row: RequestRow) -> str:
        """Only of a running one: what is held or waits has no speed, and the last steps of its window are over."""
        return f"{rates[row.request_id]:.1f}" if row.state == RUNNING and row.request_id in rates else "-"

    drafts: list[Column[RequestRow]] = []
    if any(row.drafted_tokens for row in screen.requests()):
        drafts = [Column("DRAFTS", lambda row: _hit(draft_share(row)), True, goes=11, steady=6)]
    columns: list[Column[RequestRow]] = [
        Column("ID", lambda row: row.request_id, least=14, steady=14, cuts_middle=True),
        Column("STATE", _state, steady=12, style=lambda row: STYLES.get(_state(row), "")),
        Column("PRIO", lambda row: str(row.priority), True, goes=5, steady=4),
        Column("WORKER", lambda row: row.worker or "-", goes=4, least=8, steady=8, cuts_middle=True),
        Column("PROMPT", lambda row: str(row.prompt_tokens), True, goes=3, steady=7),
        Column("NEW", lambda row: f"{row.generated_tokens}/{row.max_tokens}", True, steady=11),
        Column("TOK/S", speed, True, goes=1, steady=5),
        Column("HIT", lambda row: _hit(hit_share(row)), True, goes=2, steady=4),
        *drafts,
        Column("HOT SLOTS", lambda row: hot_text(row.hot_slots), True, goes=7, steady=9),
        Column("PAGES", lambda row: str(row.host_pages), True, goes=8, steady=6),
        Column("RETR", lambda row: str(row.retractions), True, goes=9, steady=4),
        Column("AGE", lambda row: duration_text(row.age_s), True, goes=6, steady=6),
        Column("REASON", lambda row: row.reason, goes=10, least=30, steady=40),
    ]
    selected = screen.selected(of_workers=False) if not screen.focus_workers else ""
    shown = screen.requests()
    table = _table(shown, columns, lambda row: row.request_id, selected, width, rows_max - 2)
    return [_summary(screen, width), *table]


def _summary(screen: Screen, width: int) -> Text:
    sample = screen.history.latest
    rows = sample.requests if sample else ()
    counts = {state: sum(row.state == state for row in rows) for state in STATES}
    live = [f"{count} {state.lower()}" for state, count in counts.items() if count and state not in ENDED]
    held = sum(row.held for row in rows)
    ended = sum(counts[state] for state in ENDED)
    parts = [
        f" {sum(counts.values()) - ended}{'+' if sample and sample.truncated else ''} requests",
        ": " + ", ".join(live) if live else "",
        f" ({held} held)" if held else "",
        f", {ended} ended{'' if screen.show_ended else ' (e)'}" if ended else "",
        f"  by {screen.order}{', reversed' if screen.reverse else ''}",
        f"  find {clean(screen.filter)!r}" if screen.filter else "",
    ]
    return _fit(Text("".join(parts)), width, "bold")


def _history(screen: Screen, width: int, rows_max: int) -> list[Text]:
    sample = screen.history.latest
    detail = sample.history if sample else None
    head = [_fit(Text(f" {clean(screen.history_id)}: Esc goes back"), width, "bold")]
    if detail is None or detail.row.request_id != screen.history_id:
        return [*head, Text(" ...")]
    lines = [_fit(Text(f" {line}"), width) for line in _history_lines(detail)[screen.scroll :]]
    return head + lines[: rows_max - 1]


def _history_lines(detail: RequestDetail) -> list[str]:
    return [
        f"{datetime.fromtimestamp(line.at_s):%H:%M:%S.%f}"[:12]
        + f"  {line.event:<10} {line.state:<11} {clean(line.reason)}"
        for line in detail.history
    ]


def _foot(screen: Screen, width: int) -> Text:
    if screen.pending is not None:
        question = screen.pending.command.value.format(clean(screen.pending.target))
        return _fit(Text(f" {question} y/N"), width, "bold black on yellow")
    if screen.mode is Mode.FILTER:
        return _fit(Text(f" find: {clean(screen.filter)}_   Enter keeps it, Esc drops it"), width, "reverse")
    if screen.notice:
        return _fit(Text(f" {clean(screen.notice)}"), width, "bold white on red" if screen.notice_is_bad else "bold")
    return _fit(Text(f" {KEYS}"), width, "dim")


# ---------------------------------------------------------------- tables


def _table(
    rows: Sequence[Row],
    columns: Sequence[Column[Row]],
    name: Callable[[Row], str],
    selected: str,
    width: int,
    rows_max: int,
) -> list[Text]:
    """A header and at most `rows_max` rows around the selected one."""
    at = next((number for number, row in enumerate(rows) if name(row) == selected), 0)
    first = max(0, min(at - rows_max // 2, len(rows) - rows_max))
    seen = rows[first : first + rows_max]
    layout = lay_out(seen, columns, width - len(MARK), gap=1)

    def line(mark: str, texts: Sequence[str], styles: Sequence[str]) -> Text:
        fitted = [
            Text(fit_cell(text, wide, right=column.numeric, middle=column.cuts_middle), style=style)
            for column, wide, text, style in zip(layout.columns, layout.widths, texts, styles, strict=True)
        ]
        return Text(mark) + Text(" ").join(fitted)

    headers = [column.header for column in layout.columns]
    lines = [_fit(line(" ", headers, [""] * len(headers)), width, "dim")]
    for row, texts in zip(seen, layout.cells, strict=True):
        is_selected = name(row) == selected
        styles = [column.style(row) for column in layout.columns]
        lines.append(_fit(line(MARK if is_selected else " ", texts, styles), width, "reverse" if is_selected else ""))
    return lines


def _fit(text: Text, width: int, style: str = "") -> Text:
    """`text` in exactly `width` cells, on one line."""
    text.truncate(width, overflow="crop", pad=True)
    if style:
        text.stylize_before(style)
    return text


# ---------------------------------------------------------------- cells


def _state(row: RequestRow) -> str:
    return state_text(row.state, row.held)


def _node(name: str) -> str:
    """At most 16 cells of it."""
    return fit_cell(clean(name), min(16, cell_len(clean(name))), middle=True)


def _seen(row: WorkerRow) -> str:
    return "-" if row.link_age_s == NOT_SEEN else duration_text(row.link_age_s)


def _prompts(row: WorkerRow) -> str:
    """Prompts that wait or are under way, and since when the oldest of them."""
    return f"{row.prompts_waiting} {duration_text(row.prompt_wait_s)}" if row.prompts_waiting else "-"


def _prompts_style(row: WorkerRow) -> str:
    return "yellow" if row.prompt_wait_s >= PROMPT_WAIT_LONG_S else ""


def _hit_style(share: float | None) -> str:
    return "yellow" if share is not None and share < HIT_LOW else ""


def _hot(row: WorkerRow) -> float:
    return 1 - row.hot_chunks_free / (row.capacity.hot_chunks or 1)


def _index(row: WorkerRow) -> float:
    return 1 - row.index_pages_free / (row.capacity.index_pages or 1)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _hit(share: float | None) -> str:
    return "-" if share is None else _percent(share)


def _compact(size_bytes: float) -> str:
    """12_300_000 -> "12MB": at most 6 cells, 1000-based as link speeds are."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.1f}{unit}" if unit != "B" and size_bytes < 10 else f"{size_bytes:.0f}{unit}"
        size_bytes /= 1000
    return f"{size_bytes:.0f}TB"


def _load_style(share: float) -> str:
    return "bold red" if share >= FULL else "yellow" if share >= BUSY else ""
