"""State of the view and the selection: keys and samples in, asks out. Pure. Without terminal and connection.

The selection is a name, not a line, because rows appear, vanish and move. An ask concerns the row that was selected
when its key was pressed. Every command is confirmed first, by a question with its name; only y confirms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from hisparse.console.rows import hit_share
from hisparse.top.sample import History, Sample
from protocol.messages import RequestRow, WorkerRow

ENDED: Final = frozenset({"FINISHED", "ABORTED", "FAILED"})
#: The order of sorting by state: from running to ended.
STATES: Final = (
    *("RUNNING", "READY", "PREFILLED", "TRANSFERRING", "PREFILLING", "QUEUED"),
    *("RETRACTING", "RETRACTED", "RELEASING", "FAILED", "ABORTED", "FINISHED"),
)
#: How long a notice is shown.
NOTICE_S: Final = 8.0
FILTER_CHARS_MAX: Final = 64


class Mode(Enum):
    BROWSE = auto()
    CONFIRM = auto()
    FILTER = auto()
    HISTORY = auto()
    HELP = auto()


class OperatorAction(Enum):
    """Commands of the operator; the value is the question before it is carried out."""

    RETRACT = "retract {} and hold it until it is resumed, keeping its host pages?"
    RESUME = "resume {}?"
    ABORT = "abort {} for good?"
    DRAIN = "drain {}, handing its requests over?"
    UNDRAIN = "place requests on {} again?"
    QUIT = ""


@dataclass(frozen=True)
class OperatorAsk:
    """`target` is a request id or a worker's name."""

    command: OperatorAction
    target: str = ""


REQUEST_ACTIONS: Final = {"r": OperatorAction.RETRACT, "R": OperatorAction.RESUME, "a": OperatorAction.ABORT}
WORKER_ACTIONS: Final = {"d": OperatorAction.DRAIN, "D": OperatorAction.UNDRAIN}


def _hit_order(row: RequestRow) -> float:
    share = hit_share(row)
    return 2.0 if share is None else share  # requests without a rate come last


def _state_rank(row: RequestRow) -> int:
    return STATES.index(row.state) if row.state in STATES else len(STATES)


#: Sort keys of requests, in the order of the key `s`; the smallest comes first.
ORDERS: Final[dict[str, Callable[[RequestRow], float]]] = {
    "state": _state_rank,
    "tokens": lambda row: -(row.prompt_tokens + row.generated_tokens),
    "hit rate": _hit_order,
    "priority": lambda row: -row.priority,
    "age": lambda row: -row.age_s,
}


class Screen:
    """Takes samples and keys; the attributes are what to draw. `now` is seconds of any one clock."""

    def __init__(self) -> None:
        self.history = History()
        self.mode = Mode.BROWSE
        self.lost = "connecting"  # why there is no connection; empty while there is one
        self.lost_at_s = 0.0
        self.focus_workers = False
        self.order = "state"
        self.reverse = False
        self.filter = ""
        self.show_ended = False
        self.pending: OperatorAsk | None = None  # waits for its confirmation
        self.history_id = ""
        self.scroll = 0  # lines of a history above the first one shown
        self.notice = ""
        self.notice_is_bad = False
        self._notice_until_s = 0.0
        self._selected = {False: "", True: ""}  # by focus_workers
        self._index = {False: 0, True: 0}  # last line of the selected row, for when it vanishes

    # ---------------------------------------------------------------- events

    def take(self, sample: Sample) -> None:
        """The coordinator answered."""
        self.history.add(sample)
        self.lost = ""
        for focus in (False, True):
            self._follow(focus)

    def disconnected(self, why: str, now: float) -> None:
        if not self.lost:
            self.lost_at_s = now
        self.lost = why

    def note(self, text: str, now: float, *, bad: bool = False) -> None:
        """Show a notice for NOTICE_S."""
        self.notice, self.notice_is_bad, self._notice_until_s = text, bad, now + NOTICE_S

    def tick(self, now: float) -> None:
        """Drop a notice that was shown for NOTICE_S."""
        if now >= self._notice_until_s:
            self.notice = ""

    # ---------------------------------------------------------------- rows

    def requests(self) -> list[RequestRow]:
        """The filtered rows in the chosen order; equal ones by id."""
        sample = self.history.latest
        rows = [row for row in sample.requests if self._is_shown(row)] if sample else []
        rows.sort(key=lambda row: row.request_id)
        rows.sort(key=ORDERS[self.order], reverse=self.reverse)
        return rows

    def workers(self) -> list[WorkerRow]:
        sample = self.history.latest
        return sorted(sample.workers, key=lambda row: row.worker) if sample else []

    def selected(self, *, of_workers: bool) -> str:
        return self._selected[of_workers]

    def _is_shown(self, row: RequestRow) -> bool:
        if row.state in ENDED and not self.show_ended:
            return False
        sought = self.filter.lower()
        held = "held" if row.held else ""
        return any(sought in text.lower() for text in (row.request_id, row.state, row.worker, held))

    # ---------------------------------------------------------------- keys

    def handle(self, key: str, now: float, page_rows: int = 10) -> OperatorAsk | None:
        """Handle one key; returns an ask that it confirms, or None."""
        match self.mode:
            case Mode.CONFIRM:
                return self._confirm(key, now)
            case Mode.FILTER:
                self._edit_filter(key)
            case Mode.HELP:
                self.mode = Mode.BROWSE
            case Mode.HISTORY:
                return self._read_history(key, now, page_rows)
            case Mode.BROWSE:
                return self._browse(key, now, page_rows)
        return None

    def _confirm(self, key: str, now: float) -> OperatorAsk | None:
        pending, self.pending = self.pending, None
        self.mode = Mode.HISTORY if self.history_id else Mode.BROWSE
        if key in ("y", "Y"):
            return pending
        self.note("cancelled", now)
        return None

    def _edit_filter(self, key: str) -> None:
        if key in ("enter", "escape"):
            self.mode = Mode.BROWSE
            self.filter = self.filter if key == "enter" else ""
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif len(key) == 1 and len(self.filter) < FILTER_CHARS_MAX:
            self.filter += key
        self._follow(False)

    def _read_history(self, key: str, now: float, page_rows: int) -> OperatorAsk | None:
        if key in ("escape", "enter", "q"):
            self.close_history()
        elif key in MOVES:
            sample = self.history.latest
            lines = len(sample.history.history) if sample and sample.history else 0
            self.scroll = max(0, min(lines - 1, MOVES[key](self.scroll, page_rows, lines)))
        elif key in REQUEST_ACTIONS:
            self._ask(REQUEST_ACTIONS[key], self.history_id, now)
        return None

    def _browse(self, key: str, now: float, page_rows: int) -> OperatorAsk | None:
        if key in MOVES:
            self._move(key, page_rows)
        elif key in REQUEST_ACTIONS or key in WORKER_ACTIONS:
            self._ask_of_selected(key, now)
        elif key in _SETTINGS:
            _SETTINGS[key](self)
            self._follow(False)
        elif key == "enter":
            self._open_history(now)
        elif key == "escape":
            self.filter = ""
        elif key == "q":
            return OperatorAsk(OperatorAction.QUIT)
        return None

    def _ask_of_selected(self, key: str, now: float) -> None:
        of_workers = key in WORKER_ACTIONS
        if of_workers != self.focus_workers:
            self.note(f"Tab to the {'workers' if of_workers else 'requests'} and select one first", now, bad=True)
            return
        command = WORKER_ACTIONS[key] if of_workers else REQUEST_ACTIONS[key]
        self._ask(command, self._selected[of_workers], now)

    def _ask(self, command: OperatorAction, target: str, now: float) -> None:
        if not target:
            self.note("nothing is selected", now, bad=True)
        elif self.lost:
            self.note("not connected: no command can be sent", now, bad=True)
        else:
            self.pending, self.mode = OperatorAsk(command, target), Mode.CONFIRM

    def close_history(self) -> None:
        """Back to the requests, without a question that concerns the request."""
        self.mode, self.history_id, self.pending = Mode.BROWSE, "", None

    def _open_history(self, now: float) -> None:
        name = self._selected[False]
        if self.focus_workers or not name:
            self.note("select a request to read its history", now, bad=True)
            return
        self.mode, self.history_id, self.scroll = Mode.HISTORY, name, 0

    # ---------------------------------------------------------------- the selection

    def _names(self, of_workers: bool) -> list[str]:
        if of_workers:
            return [row.worker for row in self.workers()]
        return [row.request_id for row in self.requests()]

    def _move(self, key: str, page_rows: int) -> None:
        focus, names = self.focus_workers, self._names(self.focus_workers)
        if not names:
            return
        here = names.index(self._selected[focus]) if self._selected[focus] in names else 0
        there = max(0, min(len(names) - 1, MOVES[key](here, page_rows, len(names))))
        self._selected[focus], self._index[focus] = names[there], there

    def _follow(self, of_workers: bool) -> None:
        """Keep the selected row; if it has vanished, select the row that has its line now."""
        names = self._names(of_workers)
        if self._selected[of_workers] not in names:
            at = min(self._index[of_workers], len(names) - 1)
            self._selected[of_workers] = names[at] if names else ""
        if names:
            self._index[of_workers] = names.index(self._selected[of_workers])

    # ---------------------------------------------------------------- settings by key

    def _next_order(self) -> None:
        names = list(ORDERS)
        self.order = names[(names.index(self.order) + 1) % len(names)]
        self.reverse = False

    def _reverse(self) -> None:
        self.reverse = not self.reverse

    def _switch_focus(self) -> None:
        self.focus_workers = not self.focus_workers

    def _toggle_ended(self) -> None:
        self.show_ended = not self.show_ended

    def _begin_filter(self) -> None:
        self.mode = Mode.FILTER

    def _help(self) -> None:
        self.mode = Mode.HELP


#: New line from the current line, rows of a page and number of rows; the caller clips it.
MOVES: Final[dict[str, Callable[[int, int, int], int]]] = {
    "up": lambda at, page, count: at - 1,
    "k": lambda at, page, count: at - 1,
    "down": lambda at, page, count: at + 1,
    "j": lambda at, page, count: at + 1,
    "page_up": lambda at, page, count: at - page,
    "page_down": lambda at, page, count: at + page,
    "home": lambda at, page, count: 0,
    "g": lambda at, page, count: 0,
    "end": lambda at, page, count: count,
    "G": lambda at, page, count: count,
}
_SETTINGS: Final[dict[str, Callable[[Screen], None]]] = {
    "s": Screen._next_order,
    "S": Screen._reverse,
    "tab": Screen._switch_focus,
    "e": Screen._toggle_ended,
    "/": Screen._begin_filter,
    "?": Screen._help,
}
