"""Calls as JSON objects between markers: outputs, in any cut."""

from __future__ import annotations

from typing import Final

import pytest

from hisparse.http.models.formats.known import HERMES
from hisparse.http.models.formats.replies import Piece, Reasoning, ReplyPlan, Text, ToolCall
from tests.hisparse.http.models.formats.test_formats import HERMES_PLAN, PARIS, read

CALL: Final = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
CASES: Final[dict[str, tuple[str, list[Piece]]]] = {
    "call": (CALL, [PARIS]),
    "text and calls": (f"I look.\n{CALL}\n{CALL}", [Text("I look."), PARIS, PARIS]),
    "reasoning and call": (f"<think>Hm.</think>{CALL}", [Reasoning("Hm."), PARIS]),
    "no arguments": ('<tool_call>{"name": "now", "arguments": {}}</tool_call>', [ToolCall("now", "{}")]),
    "digits of a number": (
        '<tool_call>{"arguments": {"x": 1.10e2}, "name": "f"}</tool_call>',
        [ToolCall("f", '{"x": 1.10e2}')],
    ),
    "string that holds an end": (
        '<tool_call>{"name": "w", "arguments": {"t": "</tool_call>"}}</tool_call>',
        [ToolCall("w", '{"t": "</tool_call>"}')],
    ),
    "broken off": (CALL[:-14], [Text(CALL[:-14])]),
    "named in prose": ("The <tool_call> tag.", [Text("The <tool_call> tag.")]),
    **{
        text: (f"<tool_call>{text}</tool_call>", [Text(f"<tool_call>{text}</tool_call>")])
        for text in (
            *('{"name": "f"}', '{"name": "f", "arguments": "{}"}', '{"name": "", "arguments": {}}', "f", ""),
            *('{"name": "a b", "arguments": {}}', '[{"name": "f", "arguments": {}}]', '{"name": 1, "arguments": {}}'),
        )
    },
}


@pytest.mark.parametrize("name", CASES)
def test_output_is_read_in_any_cut(name: str) -> None:
    output, pieces = CASES[name]
    for at in range(len(output) + 1):
        assert read(HERMES_PLAN, output[:at], output[at:]) == pieces
    assert read(HERMES_PLAN, *output) == pieces


def test_second_call_is_text_where_one_is_asked_for() -> None:
    assert read(ReplyPlan(True, False, HERMES.syntax, False), f"{CALL}\n{CALL}") == [PARIS, Text(CALL)]
