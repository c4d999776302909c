"""Log lines of every process: one line per event, logfmt or JSON, on stderr.

    2026-01-31T12:00:00.123Z info worker.link welcomed incarnation=3 epoch=1764
    {"ts": "2026-01-31T12:00:00.123Z", "level": "info", "logger": "worker.link", "event": "welcomed", "incarnation": 3}

Modules log through the standard library: `log.info("welcomed", extra=fields(incarnation=3))`. `configure` takes the
fields of the process (worker name, node) once. Newlines of tracebacks are escaped: an event is always one line.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, TextIO

#: Longest value in a line, so that a hostile string cannot flood the log.
VALUE_CHARS_MAX: Final = 4_096

ROOT: Final = "hisparse"


def logger(name: str) -> logging.Logger:
    """The logger of a module, below the project's root."""
    return logging.getLogger(f"{ROOT}.{name}")


def fields(**values: object) -> dict[str, dict[str, object]]:
    """`extra=` of a logging call."""
    return {"fields": values}


def configure(level: str, form: str, *, stream: TextIO | None = None, **process: object) -> None:
    """Send this process's log lines from `level` on to `stream` (stderr). `form` is "logfmt" or "json"."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if form == "json" else LogfmtFormatter(process))
    root = logging.getLogger(ROOT)
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


class _Formatter(logging.Formatter):
    def __init__(self, process: Mapping[str, object]) -> None:
        super().__init__()
        self._process = dict(process)

    def values(self, record: logging.LogRecord) -> dict[str, object]:
        """The record's fields, the process's last, and the traceback if there is one."""
        values: dict[str, object] = dict(getattr(record, "fields", {}))
        values.update(self._process)
        if record.exc_info:
            values["traceback"] = self.formatException(record.exc_info)[-VALUE_CHARS_MAX:]
        return values


class LogfmtFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix(f"{ROOT}.")
        pairs = "".join(f" {key}={_logfmt_value(value)}" for key, value in self.values(record).items())
        message = _one_line(record.getMessage())
        return f"{_timestamp(record)} {record.levelname.lower():<7} {name} {message}{pairs}"


class JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head: dict[str, object] = {
            "ts": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name.removeprefix(f"{ROOT}."),
            "event": record.getMessage(),
        }
        bounded = {key: _bounded(value) for key, value in (head | self.values(record)).items()}
        return json.dumps(bounded, default=lambda value: str(value)[:VALUE_CHARS_MAX])


def _timestamp(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC).replace(tzinfo=None)
    return f"{at.isoformat(timespec='milliseconds')}Z"


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")[:VALUE_CHARS_MAX]


def _bounded(value: object) -> object:
    return value[:VALUE_CHARS_MAX] if isinstance(value, str) else value


def _logfmt_value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)[:VALUE_CHARS_MAX]
    is_plain = text.isprintable() and not (" " in text or '"' in text or "=" in text)
    return text if is_plain and text else json.dumps(text)
