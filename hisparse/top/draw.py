"""A screen as lines of text: exactly `height` of them, none wider than `width`. Pure.

    head        the cluster and the connection to it
    pools       a line per node: host pages
    workers     at most a quarter of the height, around the selected one
    requests    the remaining height, around the selected one; or the history of one; or the keys
    foot        keys, a question that waits for an answer, or a notice

Text is ASCII except for names, so that it looks the same in any locale. Control characters are replaced, because names
and reasons come from other users. The selected row is also marked by a character, for terminals without reverse video.
Columns that do not fit a narrow terminal are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from textwrap import wrap
from typing import Final, Generic, TypeVar

from rich.text import Text

from hisparse.console.output import duration_text, hot_text, size_text
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
    "Workers: TOK/S, HIT, H2D/S (bytes of swap-in) over 5 s. Requests: HIT since submission.",
)

HELD: Final = "HELD"
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


@dataclass(frozen=True)
class ScreenColumn(Generic[Row]):
    """`width` in cells; 0: the remaining width. Left out on a terminal narrower than `from_width`."""

    title: str
    width: int
    cell: Callable[[Row], str]
    style: Callable[[Row], str] = lambda _: ""
    right: bool = True
    from_width: int = 0


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
    lines = [_fit(_pool(row), width) for row in pools[:POOLS_MAX]]
    return lines + ([Text(f" and {len(pools) - POOLS_MAX} nodes more")] if len(pools) > POOLS_MAX else [])


def _pool(row: PoolRow) -> Text:
    used = 1 - row.free / row.host_pages if row.host_pages else 0.0
    filled = round(BAR_CELLS * used)
    return Text.assemble(
        f" {clean(row.node)[:16]} host ",
        ("#" * filled, _load_style(used) or "green"),
        "." * (BAR_CELLS - filled),
        f" {_percent(used)} of {size_text(row.host_pages * row.page_bytes)}",
        f"  free {row.free} owned {row.owned} shared {row.shared}",
        (f" quarantined {row.quarantined}", "bold yellow") if row.quarantined else "",
    )


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

    def hits(row: WorkerRow) -> float | None:
        return rates[row.worker].hit_share if row.worker in rates else None

    columns: list[ScreenColumn[WorkerRow]] = [
        ScreenColumn("WORKER", 0, lambda row: row.worker, right=False),
        ScreenColumn("STATE", 12, _worker_state, _worker_style, right=False),
        ScreenColumn(
            "GROUP", 8, lambda row: f"{row.group}/{row.rank}" if row.group else "-", right=False, from_width=100
        ),
        ScreenColumn("RUN", 7, lambda row: f"{row.running}/{row.capacity.seats}"),
        ScreenColumn("HOT", 4, lambda row: _percent(_hot(row))),
        ScreenColumn("INDX", 4, lambda row: _percent(_index(row)), lambda row: _load_style(_index(row))),
        ScreenColumn(
            "HOST", 4, lambda row: _percent(host.get(row.node, 0)), lambda row: _load_style(host.get(row.node, 0))
        ),
        ScreenColumn("STEP MS", 7, lambda row: f"{row.step_us / 1000:.1f}"),
        ScreenColumn("TOK/S", 6, speed),
        ScreenColumn("HIT", 4, lambda row: _hit(hits(row)), lambda row: "yellow" if (hits(row) or 1) < 0.5 else ""),
        ScreenColumn("H2D/S", 5, swapped),
        ScreenColumn("ACK MS", 6, lambda row: f"{row.command_ack_ms:.1f}", from_width=100),
        ScreenColumn("ROLE", 7, lambda row: row.capacity.role, right=False, from_width=100),
        ScreenColumn("NODE", 16, lambda row: row.node, right=False, from_width=120),
        ScreenColumn("SEEN", 5, lambda row: "-" if row.link_age_s == NOT_SEEN else duration_text(row.link_age_s)),
    ]
    selected = screen.selected(of_workers=True) if screen.focus_workers else ""
    return _table(rows, columns, lambda row: row.worker, selected, width, rows_max)


def _requests(screen: Screen, width: int, rows_max: int) -> list[Text]:
    rates = screen.history.request_rates()

    def speed(row: RequestRow) -> str:
        return f"{rates[row.request_id]:.1f}" if row.request_id in rates else "-"

    columns: list[ScreenColumn[RequestRow]] = [
        ScreenColumn("ID", 0, lambda row: row.request_id, right=False),
        ScreenColumn("STATE", 12, _state_text, lambda row: STYLES.get(_state_text(row), ""), right=False),
        ScreenColumn("PRIO", 4, lambda row: str(row.priority)),
        ScreenColumn("WORKER", 8, lambda row: row.worker or "-", right=False),
        ScreenColumn("PROMPT", 7, lambda row: str(row.prompt_tokens)),
        ScreenColumn("NEW", 11, lambda row: f"{row.generated_tokens}/{row.max_tokens}"),
        ScreenColumn("TOK/S", 5, speed),
        ScreenColumn("HIT", 4, lambda row: _hit(row.hits / (row.hits + row.misses) if row.hits + row.misses else None)),
        ScreenColumn("HOT", 8, lambda row: hot_text(row.hot_slots), from_width=100),
        ScreenColumn("PAGES", 6, lambda row: str(row.host_pages), from_width=100),
        ScreenColumn("RETR", 4, lambda row: str(row.retractions), from_width=100),
        ScreenColumn("AGE", 6, lambda row: duration_text(row.age_s)),
        ScreenColumn("REASON", 40, lambda row: row.reason, right=False, from_width=140),
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
    columns: Sequence[ScreenColumn[Row]],
    name: Callable[[Row], str],
    selected: str,
    width: int,
    rows_max: int,
) -> list[Text]:
    """A header and at most `rows_max` rows around the selected one."""
    shown = [column for column in columns if width >= column.from_width]
    left = width - 1 - sum(column.width + 1 for column in shown if column.width)
    widths = [column.width or left for column in shown]
    at = next((number for number, row in enumerate(rows) if name(row) == selected), 0)
    first = max(0, min(at - rows_max // 2, len(rows) - rows_max))
    head = Text(" ").join([_cell(Text(c.title), w, c.right) for c, w in zip(shown, widths, strict=True)])
    lines = [_fit(Text(" ") + head, width, "dim")]
    for row in rows[first : first + rows_max]:
        cells = [
            _cell(Text(clean(c.cell(row)), style=c.style(row)), w, c.right) for c, w in zip(shown, widths, strict=True)
        ]
        is_selected = name(row) == selected
        mark = Text(">" if is_selected else " ")
        lines.append(_fit(mark + Text(" ").join(cells), width, "reverse" if is_selected else ""))
    return lines


def _cell(text: Text, width: int, right: bool) -> Text:
    text.truncate(width, overflow="crop")
    missing = width - text.cell_len
    if right:
        text.pad_left(missing)
    else:
        text.pad_right(missing)
    return text


def _fit(text: Text, width: int, style: str = "") -> Text:
    """`text` in exactly `width` cells, on one line."""
    text.truncate(width, overflow="crop", pad=True)
    if style:
        text.stylize_before(style)
    return text


def clean(text: str) -> str:
    """`text` with control characters replaced."""
    return "".join(c if c.isprintable() else "?" for c in text)


# ---------------------------------------------------------------- cells


def _state_text(row: RequestRow) -> str:
    """The state; HELD for a retracted request that waits for an operator."""
    return HELD if row.held and row.state == "RETRACTED" else row.state


def _hot(row: WorkerRow) -> float:
    return 1 - row.hot_chunks_free / (row.capacity.hot_chunks or 1)


def _index(row: WorkerRow) -> float:
    return 1 - row.index_pages_free / (row.capacity.index_pages or 1)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _hit(share: float | None) -> str:
    return "-" if share is None else _percent(share)


def _compact(size_bytes: float) -> str:
    """12_300_000 -> "12M": at most 5 cells, 1000-based as link speeds are."""
    for unit in ("", "k", "M", "G"):
        if size_bytes < 999.5:
            return f"{size_bytes:.1f}{unit}" if unit and size_bytes < 10 else f"{size_bytes:.0f}{unit}"
        size_bytes /= 1000
    return f"{size_bytes:.0f}T"


def _load_style(share: float) -> str:
    return "bold red" if share >= FULL else "yellow" if share >= BUSY else ""
