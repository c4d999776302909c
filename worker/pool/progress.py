"""Progress of a long start: a bar on stderr if that is a terminal, lines in the log otherwise; and its step for
the process that waits for it (protocol.start_and_end)."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from protocol.logs import fields
from protocol.start_and_end import tell_step

#: Lines about the same thing come at most this often.
LINE_INTERVAL_S: Final = 5.0
GIB: Final = 1 << 30


@contextmanager
def progress(what: str, total_bytes: int, log: logging.Logger, step: str) -> Iterator[Callable[[int], None]]:
    """Gives `advance(bytes)`, to be called from any thread; a last line says how long all of it took."""
    began = time.monotonic()
    with _bar(what, total_bytes) if sys.stderr.isatty() else _lines(what, total_bytes, log) as advance:
        yield _telling(step, total_bytes, advance)
    took_s = time.monotonic() - began
    gb_per_s = total_bytes / 1e9 / took_s if took_s else 0.0
    log.info(what, extra=fields(bytes=total_bytes, seconds=round(took_s, 3), gb_per_s=round(gb_per_s, 2)))


def _telling(step: str, total_bytes: int, advance: Callable[[int], None]) -> Callable[[int], None]:
    lock, done = threading.Lock(), 0
    tell_step(step, 0.0)

    def advance_and_tell(more: int) -> None:
        nonlocal done
        with lock:
            done += more
            tell_step(step, done / max(total_bytes, 1))
        advance(more)

    return advance_and_tell


@contextmanager
def _bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    console = Console(stderr=True)
    with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda done: bar.advance(task, done)


@contextmanager
def _lines(what: str, total_bytes: int, log: logging.Logger) -> Iterator[Callable[[int], None]]:
    lock, done, next_at = threading.Lock(), 0, time.monotonic() + LINE_INTERVAL_S

    def advance(more: int) -> None:
        nonlocal done, next_at
        with lock:
            done += more
            if time.monotonic() < next_at:
                return
            next_at = time.monotonic() + LINE_INTERVAL_S
            share = 100 * done // max(total_bytes, 1)
        log.info(what, extra=fields(gib=round(done / GIB, 1), of_gib=round(total_bytes / GIB, 1), percent=share))

    yield advance
