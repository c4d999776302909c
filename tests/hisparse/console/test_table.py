"""Tables at the widths of terminals (hisparse/console/table.py), and what `hisparse requests` shows in them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from hisparse.console.output import hot_text
from hisparse.console.rows import hit_share
from hisparse.console.table import Column, clean, fit_cell, lay_out, table_lines
from tests.hisparse.top.test_top import REQUEST, row

Fact = dict[str, str]


def columns() -> list[Column[Fact]]:
    return [
        Column("ID", lambda it: it["id"]),
        Column("TOKENS", lambda it: it["tokens"], True, goes=1),
        Column("PAGES", lambda it: it["pages"], True, goes=2),
        Column("REASON", lambda it: it["reason"], least=8, goes=3),
    ]


FACTS = [
    {"id": "r1", "tokens": "1000000", "pages": "17", "reason": "needs 1 seat, w0 has 0 of 8 free"},
    {"id": "request-of-a-team", "tokens": "9", "pages": "123456", "reason": ""},
]


@pytest.mark.parametrize(
    ("width", "header"),
    [
        (None, "ID TOKENS PAGES REASON"),
        (80, "ID TOKENS PAGES REASON"),
        (44, "ID TOKENS PAGES REASON"),
        (43, "ID TOKENS PAGES"),
        (33, "ID TOKENS"),
        (25, "ID"),
        (5, "ID"),
    ],
)
def test_less_important_columns_go_first(width: int | None, header: str) -> None:
    lines = table_lines(FACTS, columns(), width)
    assert " ".join(lines[0].split()) == header
    assert lines[1].startswith("r1")
    assert lines[2].startswith("request-of-a-team"), "an id is never cut"
    assert ("1000000" in lines[1]) == ("TOKENS" in header)
    assert ("123456" in lines[2]) == ("PAGES" in header)


def test_reasons_are_shortened_before_a_column_goes() -> None:
    (_, line, _) = table_lines(FACTS, columns(), 50)
    assert line.endswith("  needs 1 seat..") or line.endswith("..")
    assert cell_len(line) <= 50
    assert table_lines(FACTS, columns(), None)[1].endswith("w0 has 0 of 8 free")


@given(
    width=st.integers(1, 120),
    texts=st.lists(st.tuples(st.text(max_size=30), st.integers(0, 10**12), st.text(max_size=60)), max_size=6),
)
def test_numbers_are_whole_and_lines_fit_whenever_they_can(width: int, texts: list[tuple[str, int, str]]) -> None:
    rows = [{"id": name, "tokens": str(count), "pages": str(count), "reason": why} for name, count, why in texts]
    layout = lay_out(rows, columns(), width)
    for column, wide, at in zip(layout.columns, layout.widths, range(len(layout.columns)), strict=True):
        needed = max([cell_len(column.header), *(cell_len(line[at]) for line in layout.cells)])
        assert wide == needed if not column.least else min(needed, column.least) <= wide <= needed
    total = sum(layout.widths) + 2 * (len(layout.widths) - 1)
    assert total <= width or [column.header for column in layout.columns] == ["ID"]
    assert all(cell_len(line) <= total for line in table_lines(rows, columns(), width))


@pytest.mark.parametrize(
    ("text", "width", "middle", "shown"),
    [
        ("job-2026-01-31-a", 12, True, "job-2..-31-a"),
        ("job-2026-01-31-b", 12, True, "job-2..-31-b"),
        ("job-2026-01-31-b", 12, False, "job-2026-0.."),
        ("abcdef", 3, True, "abc"),
        ("ab", 4, True, "ab  "),
        ("漢字漢字漢字", 8, True, "漢 ..字 "),
    ],
)
def test_a_cut_shows_and_leaves_both_ends_of_a_name(text: str, width: int, middle: bool, shown: str) -> None:
    cell = fit_cell(text, width, middle=middle)
    assert (cell, cell_len(cell)) == (shown, width)


def test_control_characters_cannot_break_a_table() -> None:
    assert clean("a\nb\x1b[2J") == "a?b?[2J"
    evil = {"id": "r1\n", "tokens": "1", "pages": "1", "reason": "\r\x1b"}
    assert len(table_lines([evil], columns(), None)) == 2


@pytest.mark.parametrize(
    ("changed", "share"),
    [
        ({}, 0.9),
        ({"hot_slots": 0, "misses": 0}, None),
        ({"hits": 0, "misses": 0}, None),
        ({"hot_slots": -1}, 0.9),
    ],
)
def test_resident_requests_have_no_hit_rate(changed: dict[str, Any], share: float | None) -> None:
    assert hit_share(msgspec.structs.replace(REQUEST, **changed)) == share
    assert hot_text(0) == "resident"


@pytest.mark.parametrize("width", [80, 100, 120])
def test_requests_and_workers_fit_usual_terminals(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of a million tokens, with long ids and reasons: all numbers of the columns shown are whole."""
    from hisparse.cli import main
    from tests.hisparse.top.test_top import WORKER

    long = row(
        REQUEST, request_id="tenant-7-job-000123", worker="gpu-node-3", prompt_tokens=1_000_000, host_pages=16_641,
        generated_tokens=65_000, max_tokens=131_072, durable_tokens=1_064_999, reason="needs 1 seat, w0 has none " * 3,
    )  # fmt: skip
    answers = {"requests": [long, REQUEST], "workers": [row(WORKER, worker="gpu-node-3")]}
    shown: list[list[str]] = []

    def capture(config: Any, fetch: Any, columns: Any, output: str, interval_s: Any) -> None:
        shown.append(table_lines(answers[name], columns, width))

    for name in answers:
        monkeypatch.setattr(f"hisparse.cli.{name}.list_rows", capture)
        main([name], standalone_mode=False)
    requests, workers = shown
    assert max(map(len, requests + workers)) <= width
    assert requests[0].split()[:2] == ["ID", "STATE"]
    assert "tenant-7-job-000123" in requests[1]
    assert "65000/131072" in requests[1]
    assert "12" in workers[1].split()
