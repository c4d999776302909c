"""Log lines: one line per event, whatever is in it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from protocol import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger(logs.ROOT)
    before = root.handlers[:], root.level, root.propagate
    yield io.StringIO()
    root.handlers[:], root.level, root.propagate = before


def test_logfmt_lines_quote_special_values(stream: io.StringIO) -> None:
    logs.configure("info", "logfmt", stream=stream, worker="w1")
    logs.logger("worker.link").info(
        "link down", extra=logs.fields(reason="lost", detail='said "no" = gone', took_s=0.5)
    )
    _, level, rest = stream.getvalue().split(maxsplit=2)
    assert level == "info"
    assert rest == 'worker.link link down reason=lost detail="said \\"no\\" = gone" took_s=0.5 worker=w1\n'


def test_json_lines_carry_the_same_fields(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream=stream, worker="w1")
    logs.logger("worker.link").warning("link down", extra=logs.fields(reason="lost", path=object))
    line = json.loads(stream.getvalue())
    assert (line["level"], line["logger"], line["event"]) == ("warning", "worker.link", "link down")
    assert (line["reason"], line["worker"]) == ("lost", "w1")


@pytest.mark.parametrize("form", ["logfmt", "json"])
def test_a_traceback_stays_on_one_line(stream: io.StringIO, form: str) -> None:
    logs.configure("info", form, stream=stream)
    try:
        int("two\nlines")
    except ValueError:
        logs.logger("worker").exception("failed\nbadly")
    assert stream.getvalue().count("\n") == 1
    assert "ValueError" in stream.getvalue()


@pytest.mark.parametrize("form", ["logfmt", "json"])
def test_long_traceback_keeps_its_end(stream: io.StringIO, form: str) -> None:
    """It names the error; the beginning is our own loop."""
    logs.configure("info", form, stream=stream)
    try:
        dict[str, int]()["x" * logs.VALUE_CHARS_MAX + " the reason"]
    except KeyError:
        logs.logger("worker").exception("failed")
    assert "the reason" in stream.getvalue()
    assert "Traceback" not in stream.getvalue()


@pytest.mark.parametrize("form", ["logfmt", "json"])
def test_levels_are_honoured_and_values_bounded(stream: io.StringIO, form: str) -> None:
    """I8."""
    logs.configure("warning", form, stream=stream)
    logs.logger("worker").info("not shown")
    logs.logger("worker").error("shown", extra=logs.fields(value="x" * 100_000))
    assert "not shown" not in stream.getvalue()
    assert len(stream.getvalue()) < 2 * logs.VALUE_CHARS_MAX


def test_configuring_again_replaces_the_handler(stream: io.StringIO) -> None:
    logs.configure("info", "logfmt", stream=io.StringIO())
    logs.configure("info", "logfmt", stream=stream)
    logs.logger("worker").info("once")
    assert stream.getvalue().count("once") == 1
    assert len(logging.getLogger(logs.ROOT).handlers) == 1
