"""Live progress on stderr: one line per request and worker on a terminal, a line per event elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from hisparse.demo.watch import Outcome

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

REFRESHES_PER_S: Final = 8
BAR_CELLS: Final = 32
STATE_STYLES: Final = {
    "RUNNING": "green",
    "FINISHED": "bold green",
    "RETRACTING": "yellow",
    "RETRACTED": "bold yellow",
    "ABORTED": "bold red",
    "FAILED": "bold red",
}


class Display:
    """Draws the current `outcome` each time rich asks. `note` prints an event above it."""

    def __init__(self, console: Console, outcome: Outcome, new_tokens: int) -> None:
        self._console = console
        self._outcome = outcome
        self._new_tokens = new_tokens

    def note(self, text: str) -> None:
        self._console.print(f"[cyan]>[/] {text}" if self._console.is_terminal else text, soft_wrap=True)

    @contextmanager
    def live(self) -> Iterator[None]:
        """Redraw until the block ends. Without a terminal, only events are printed."""
        from rich.live import Live

        if not self._console.is_terminal:
            yield
            return
        with Live(self, console=self._console, refresh_per_second=REFRESHES_PER_S, transient=True):
            yield

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._requests()
        yield self._workers()

    def _requests(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, row in sorted(self._outcome.watch.rows.items()):
            done = len(self._outcome.tokens.get(name, ()))
            looked = row.hits + row.misses
            table.add_row(
                name,
                Text(row.state, style=STATE_STYLES.get(row.state, "dim")),
                row.worker or "-",
                ProgressBar(total=self._new_tokens, completed=done, width=BAR_CELLS),
                f"{done:>4}/{self._new_tokens}",
                f"{row.prompt_tokens:>6} prompt",
                f"{row.hot_slots if row.hot_slots > 0 else '-':>5} hot",
                f"{100 * row.hits / looked:5.1f}% hits" if looked else "",
                f"{row.host_pages:>4} pages",
            )
        return table

    def _workers(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, row in sorted(self._outcome.watch.workers.items()):
            table.add_row(
                name,
                Text(row.state, style="yellow" if row.state != "connected" else "green"),
                f"{row.running} running",
                f"step {row.step_us / 1000:.0f} ms",
                f"{row.hot_chunks_free}/{row.capacity.hot_chunks} hot chunks free",
            )
        return table


def stderr_console() -> Console:
    from rich.console import Console

    return Console(file=sys.stderr, stderr=True, highlight=False)
